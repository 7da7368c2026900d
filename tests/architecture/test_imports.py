"""The house stands as drawn, and each rule can tell when it does not."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import pytest

from tests.architecture import rules
from tests.architecture.rules import effects, imports_of, room_of, wrong_arrows, wrong_layers, wrong_packages

ROOT = Path(__file__).parents[2]
ROOTS = (*("services", "gateway", "carbon_service", "optimizer_service", "gpu_agent", "migrations"), *("lab", "tools"))
PACKAGES = ("services", "services.engines")
"""Of rooms, and none themselves."""
RULES = (wrong_arrows, wrong_layers, wrong_packages, effects)


def modules() -> list[tuple[str, Path]]:
    """Return every module of ours by dotted name."""
    files = sorted(path for root in ROOTS for path in (ROOT / root).rglob("*.py"))
    return [(module_of(path), path) for path in files]


def module_of(path: Path) -> str:
    """Return the dotted name of a module in the checkout."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_the_rule(rule: Callable[..., list[str]]) -> None:
    faults = [
        fault
        for module, path in modules()
        for fault in rule(path.read_text(encoding="utf-8"), module, is_package=path.name == "__init__.py")
    ]

    assert faults == []


def circle_in(sources: Mapping[str, str], packages: Collection[str] = ()) -> list[str]:
    """Return modules each of which imports the one before it, wherever the import stands; empty if there are none."""
    arrows: dict[str, set[str]] = {}
    for module, source in sources.items():
        found = imports_of(source, module, is_package=module in packages)
        named = {name if name in sources else name.rpartition(".")[0] for name in (each.module for each in found)}
        parents = {name.rsplit(".", up)[0] for name in named for up in range(1, name.count(".") + 1)}
        around = {module.rsplit(".", up)[0] for up in range(1, module.count(".") + 1)}  # these are being imported
        arrows[module] = (named | parents - around) & sources.keys() - {module}
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """An import inside a function may put off what is heavy; it may not hide that two modules need each other."""
    client = ROOT / "clients/python/src"
    files = [
        *modules(),
        *(
            (".".join(path.relative_to(client).with_suffix("").parts).removesuffix(".__init__"), path)
            for path in client.rglob("*.py")
        ),
    ]
    packages = {module for module, path in files if path.name == "__init__.py"}

    assert circle_in({module: path.read_text(encoding="utf-8") for module, path in files}, packages) == []


def test_a_circle_through_a_function_is_seen() -> None:
    sources = {"a.b": "from a import c", "a.c": "def f():\n    from a.d import g", "a.d": "import a.b", "a": ""}

    assert {*circle_in(sources)} == {"a.b", "a.c", "a.d"}
    assert circle_in({**sources, "a.d": "import a"}) == []


def test_a_circle_through_a_package_is_seen() -> None:
    sources = {
        "a": "",
        "a.b": "from a.c import d",
        "a.c": "from a.c import e",
        "a.c.d": "",
        "a.c.e": "from a.b import f",
    }

    assert {*circle_in(sources, {"a", "a.c"})} == {"a.b", "a.c", "a.c.e"}
    assert circle_in({**sources, "a.c": ""}, {"a", "a.c"}) == []


def test_every_module_has_a_room() -> None:
    rooms = {module: room_of(module) for module, _ in modules()}

    assert len(rooms) > 50
    assert [module for module, room in rooms.items() if room is None and module not in PACKAGES] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("services.core.cycle.run_cycle", "from services.contracts.jobs import JobSpec"),
        ("services.core.cycle.run_cycle", "def f():\n    import services.db.engine"),
        ("services.contracts.jobs", "from services.kit import problems"),
        ("services.contracts.jobs", "from services import db"),
        ("services.kit.app", "import services.db"),
        ("services.db.engine", "from services.kit.settings import Settings"),
        ("services.scheduler.service", "from services.admission.service import submit"),
        ("services.scheduler.service", "import gateway.app"),
        ("services.scheduler.service", "import importlib\nimportlib.import_module('services.telemetry.app')"),
        ("services.telemetry.app", "from ..router import app"),
        ("services.telemetry.app", "from services.cli import output"),
        ("carbon_service.app", "if TYPE_CHECKING:\n    import optimizer_service.tasks"),
        ("gateway.app", "from services.db import engine"),
        ("gpu_agent.app", "from services import db"),
        ("gpu_agent.app", "import services.simulator.engine"),
        ("services.simulator.engine", "from services.contracts import jobs"),
        ("services.simulator.engine.events", "from services.simulator import readers"),
        ("services.simulator.engine_events", "import services.kit"),
        ("services.cli.jobs.jobs", "from services.db import engine"),
        ("services.cli.jobs.jobs", "from services.scheduler import service"),
        ("services.standalone.stack", "import services.scheduler.app"),
        ("migrations.versions.2026_add_jobs", "from services.db.tables import jobs"),
        ("migrations.env", "from services.admission import app"),
        ("services.simulator.service", "from lab.reproductions.marked import fill"),
        ("services.cli.planning.simulate", "def f():\n    import lab.reproductions.asrpt"),
        ("services.core.policies.registry", "from lab.reproductions import equal_energy"),
        ("services.core.policies.registry", "from lab.policies.entries import ENTRIES"),
        ("services.cli.main", "def f():\n    import lab"),
        ("services.kit.policies", "import importlib\nimportlib.import_module('lab.policies')"),
        ("gpu_agent.app", "from lab import policies"),
        ("migrations.env", "import lab.policies"),
        ("gateway.app", "from tools.openapi import describe"),
        ("tools.operations", "import lab.policies"),
    ],
)
def test_a_wrong_arrow_is_seen(module: str, source: str) -> None:
    assert len(wrong_arrows(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("services.scheduler.service", "from services.core.cycle import run_cycle\nfrom services.db import engine"),
        ("services.scheduler.service", "from . import repository\nimport numpy, services.kit.app"),
        (
            "services.cli.site.local",
            "import services.simulator.service, services.standalone.stack, services.core.domain",
        ),
        (
            "services.simulator.service",
            "from services.simulator.engine import run\nfrom services.contracts import jobs",
        ),
        ("services.simulator.engine.run", "from services.core.cycle.run_cycle import run_cycle\nfrom .events import E"),
        ("migrations.env", "from services.db.tables import jobs"),
        ("lab.reproductions.traffic", "from services.learning import demand\nfrom services.cli.reports import charts"),
        ("lab.policies.entries", "from services.core.policies.registry import PolicyEntry"),
        ("lab.experiments.runner", "import services.simulator.engine, services.cli.client, lab.policies"),
        ("tools.operations", "import gateway.endpoints, services.admission.app"),
        ("scripts.anything", "import services.scheduler.app"),
    ],
)
def test_a_right_arrow_is_let_be(module: str, source: str) -> None:
    assert wrong_arrows(source, module) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("services.core.domain.jobs", "from services.core.accounting import energy"),
        ("services.core.accounting.energy", "from services.core.cycle.snapshot import Floats"),
        ("services.core.profiles.power", "import services.core.solvers.solve"),
        ("services.core.solvers.solve", "from ..profiles import power"),
        ("services.core.cycle.reconcile", "from services.core.policies.registry import POLICIES"),
        ("services.core.cycle.reconcile", "from services.core import policies"),
    ],
)
def test_a_wrong_layer_is_seen(module: str, source: str) -> None:
    assert len(wrong_layers(source, module)) == 1


def test_a_right_layer_is_let_be() -> None:
    source = "from services.core.cycle.plan import Plan\nfrom services.core.domain.ids import JobId"

    assert wrong_layers(source, "services.core.policies.green.mlfq") == []
    assert wrong_layers("import services.core.policies.registry", "services.scheduler.service") == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("optimizer_service.tasks", "import pulp"),
        ("services.core.policies.freesh.pools", "def f():\n    from gurobipy import Model"),
        ("services.core.cycle.reconcile", "import highspy"),
        ("services.core.domain.jobs", "import pydantic"),
        ("services.simulator.training", "from sklearn.tree import DecisionTreeRegressor"),
        ("services.learning.traffic", "def f():\n    importlib.import_module('torch')"),
        ("services.core.domain.jobs", "from sqlalchemy import Table"),
    ],
)
def test_a_wrong_package_is_seen(module: str, source: str) -> None:
    assert len(wrong_packages(source, module)) == 1


def test_right_packages_are_let_be() -> None:
    assert wrong_packages("import pulp, numpy\nfrom highspy import Highs", "services.core.solvers.highs") == []
    assert wrong_packages("import pydantic, aiohttp", "services.kit.http") == []
    assert wrong_packages("import math\nimport numpy.typing\nfrom services.core import x", "services.core.a") == []


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "from time import monotonic",
        "import os.path",
        "import random",
        "from pathlib import Path",
        "import logging",
        "from datetime import datetime\ndatetime.now()",
        "import datetime\ndatetime.datetime.utcnow()",
        "from datetime import date\ndate.today()",
        "import numpy as np\nnp.random.rand(3)",
        "import numpy\nnumpy.random.seed(1)",
        "from numpy.random import default_rng\ndefault_rng()",
        "import numpy as np\nnp.random.default_rng(None)",
        "open('x')",
        "print('x')",
        "x.read_text()",
        "import numpy as np\nnp.load('x')",
        "a.tofile('x')",
    ],
)
def test_an_effect_in_the_core_is_seen(source: str) -> None:
    assert effects(source, "services.core.policies.green.mlfq") != []
    assert effects(source, "lab.policies.zeus.cost") != []


def test_computing_is_no_effect_and_other_rooms_may_have_them() -> None:
    pure = (
        "import numpy as np\nfrom datetime import datetime, timezone\n"
        "np.random.default_rng(7).random()\ndatetime.fromtimestamp(0, timezone.utc)\nself.load({})\nrng.random()"
    )

    assert effects(pure, "services.core.policies.green.mlfq") == []
    assert effects("import time, os\nopen('x')", "services.kit.settings") == []


def test_relative_imports_are_made_absolute() -> None:
    inside = imports_of("from . import a\nfrom ..b import c", "services.core.cycle.plan")
    package = imports_of("from . import a", "services.core.cycle", is_package=True)

    assert [each.module for each in inside] == ["services.core.cycle.a", "services.core.b.c"]
    assert [each.module for each in package] == ["services.core.cycle.a"]


def missing_in(trees: Mapping[str, ast.Module], tree_of: Callable[[str], ast.Module | None]) -> list[str]:
    """Return what modules import from others of ours that do not have it; ``tree_of`` is None for what is not ours."""
    found: list[str] = []
    known: dict[str, set[str]] = {}
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
                continue
            source = node.module
            if source not in known:
                known[source] = {"*"} if (asked := tree_of(source)) is None else bound_in(asked)
            if not {"*", "__getattr__"} & known[source]:
                names = (each.name for each in node.names if each.name not in known[source])
                found += [f"{module}: {source} has no {name}" for name in names if tree_of(f"{source}.{name}") is None]
    return found


def bound_in(tree: ast.Module) -> set[str]:
    """Return the names that a module binds, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
            case ast.Import() | ast.ImportFrom():
                found |= {(each.asname or each.name).partition(".")[0] for each in node.names}
            case _:
                pass
    return found


UNSEEN = ("benchmarks", "browser", "compose", "fuzz", "hardware", "integration")
"""Of the tests, what the default run does not import, and pyright does not read."""


def test_what_is_imported_is_there() -> None:
    """A benchmark that no test runs may name what has moved: nobody else would notice."""

    def tree_of(module: str) -> ast.Module | None:
        path = ROOT / module.replace(".", "/")
        if path.is_dir():
            path /= "__init__"
        path = path.with_suffix(".py")
        return rules.tree_of(path.read_text()) if path.is_file() else None

    files = [path for folder in UNSEEN for path in sorted((ROOT / "tests" / folder).rglob("*.py"))]
    assert len(files) > 60
    assert missing_in({module_of(path): rules.tree_of(path.read_text()) for path in files}, tree_of) == []


def test_an_import_of_what_is_not_there_is_found() -> None:
    trees = {
        "a": ast.parse(""),
        "a.b": ast.parse("x = 1\nif x:\n    import y\nclass C:\n    pass\n"),
        "a.lazy": ast.parse("def __getattr__(name): ...\n"),
        "a.user": ast.parse(
            "from a import b, lazy, old\nfrom a.b import C, x, y, gone\nfrom a.lazy import any\nfrom os import no\n"
        ),
    }
    assert missing_in(trees, trees.get) == ["a.user: a has no old", "a.user: a.b has no gone"]
