"""The rules of the house as functions of source text: who may import whom, and what the core must not touch.

Imports are read from the syntax tree wherever they stand: in functions, under ``TYPE_CHECKING``, and as
``importlib.import_module("...")`` with a literal name.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass

LIBRARIES = {
    "services.core": {"services.core"},
    "services.core.domain": {"services.core.domain"},
    "services.contracts": {"services.core.domain", "services.contracts"},
    "services.kit": {"services.core", "services.contracts", "services.kit"},
    "services.db": {"services.core", "services.contracts", "services.db"},
    "services.learning": {"services.core", "services.learning"},
    "services.solving": {"services.core", "services.contracts", "services.solving"},
}
PROCESSES = (
    "gateway",
    "carbon_service",
    "optimizer_service",
    "gpu_agent",
    "services.admission",
    "services.scheduler",
    "services.router",
    "services.serving",
    "services.telemetry",
    "services.simulator",
    "services.engines.kueue",
    "services.engines.ray",
    "services.engines.slurm",
)
ENGINES = tuple(process for process in PROCESSES if process.startswith("services.engines."))
WITHOUT_DB = ("gateway", "gpu_agent", "services.router", *ENGINES)
FRONT_DOORS = {
    "services.cli": {
        "services.core",
        "services.contracts",
        "services.kit",
        "services.learning",
        "services.solving",
        "services.standalone",
        "services.simulator",
    },
    "services.standalone": {*LIBRARIES, "migrations"},
}
MIGRATIONS = {"migrations": {*LIBRARIES}, "migrations.versions": set[str]()}
ENGINE = "services.simulator.engine"
WORKLOAD = "services.simulator.workload"
"""What the engine is given; as pure as the engine itself."""
LAB = "lab"
"""What only compares and remakes papers: may import every room, and no room of the product imports it."""
TOOLS = "tools"
"""What sets a checkout up, shows it, and makes checked-in files from its code; no part of the product."""
PURE = ("services.core", "lab.policies")
"""What computes and does nothing else."""

MAY_IMPORT: dict[str, set[str]] = {
    **LIBRARIES,
    **{process: {*LIBRARIES, process} for process in PROCESSES},
    **{process: {*LIBRARIES, process} - {"services.db"} for process in WITHOUT_DB},
    **{door: {*allowed, door} for door, allowed in FRONT_DOORS.items()},
    **{room: {*allowed, room} for room, allowed in MIGRATIONS.items()},
    ENGINE: {"services.core", ENGINE, WORKLOAD},
    WORKLOAD: {"services.core", WORKLOAD},
    LAB: {*LIBRARIES, *PROCESSES, *FRONT_DOORS, *MIGRATIONS, LAB},
    TOOLS: {*LIBRARIES, *PROCESSES, *FRONT_DOORS, TOOLS},
}
"""Per room, the rooms of ours that it may import. The longest name that fits a module is its room."""

CORE_LAYERS = {
    "domain": {"domain"},
    "profiles": {"domain", "profiles"},
    "accounting": {"domain", "accounting"},
    "solvers": {"domain", "solvers"},
    "parallel": {"domain", "solvers", "parallel"},
    "cycle": {"domain", "profiles", "accounting", "solvers", "parallel", "cycle"},
    "policies": {"domain", "profiles", "accounting", "solvers", "parallel", "cycle", "policies"},
}
SOLVER_PACKAGES = {"pulp", "gurobipy", "highspy"}
CORE_PACKAGES = {"numpy", "scipy"}
LEARNING_PACKAGES = {"sklearn": ("services.learning", "lab"), "torch": ("lab",)}

EFFECT_MODULES = {
    "asyncio",
    "concurrent",
    "glob",
    "http",
    "importlib",
    "io",
    "logging",
    "multiprocessing",
    "os",
    "pathlib",
    "random",
    "secrets",
    "shutil",
    "socket",
    "sqlite3",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
    "time",
    "urllib",
    "uuid",
}
CLOCK_CALLS = {"now", "utcnow", "today"}
FILE_CALLS = {
    "read_text",
    "write_text",
    "read_bytes",
    "write_bytes",
    "load",
    "loadtxt",
    "genfromtxt",
    "fromfile",
    "save",
    "savez",
    "savetxt",
    "tofile",
    "memmap",
}
NUMPY_NAMES = {"np", "numpy"}


@dataclass(frozen=True)
class Import:
    """One imported name: ``module`` is absolute, and may name something inside a module."""

    line: int
    module: str


@functools.cache
def tree_of(source: str) -> ast.Module:
    """Return the syntax tree of a source; every rule asks for those of all modules."""
    return ast.parse(source)


@functools.cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """Return what ``ast.walk`` yields of a source's tree: to walk it takes longer than to parse it."""
    return tuple(ast.walk(tree_of(source)))


@functools.cache
def imports_of(source: str, module: str, *, is_package: bool = False) -> tuple[Import, ...]:
    """Return every import in a module's source, relative ones made absolute."""
    found: list[Import] = []
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            found += [Import(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".") if is_package else module.split(".")[:-1]
                parents = parts[: len(parts) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            found += [Import(node.lineno, f"{base}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__") and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                found.append(Import(node.lineno, name.value))
    return tuple(found)


def within(module: str, room: str) -> bool:
    """Whether a dotted name is the room or lies inside it."""
    return module == room or module.startswith(room + ".")


def room_of(module: str) -> str | None:
    """Return the room a module of ours belongs to: the longest that fits; None for what is not ours."""
    rooms = [room for room in MAY_IMPORT if within(module, room)]
    if module.startswith(ENGINE):  # also engine_events.py and the like
        rooms.append(ENGINE)
    return max(rooms, key=len, default=None)


def wrong_arrows(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Return the imports of other rooms that a module must not make, as sentences."""
    room = room_of(module)
    if room is None:
        return []
    wrong: list[str] = []
    for imported in imports_of(source, module, is_package=is_package):
        target = room_of(imported.module)
        if target is not None and not any(within(target, allowed) for allowed in MAY_IMPORT[room]):
            wrong.append(f"{module}:{imported.line}: {room} must not import {target}")
    return wrong


def wrong_layers(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Return the imports against the grain inside the core: domain <- profiles, accounting, solvers <- cycle <- ..."""
    layer = _core_layer(module)
    if layer is None:
        return []
    wrong: list[str] = []
    for imported in imports_of(source, module, is_package=is_package):
        target = _core_layer(imported.module)
        if target is not None and target not in CORE_LAYERS.get(layer, set()):
            wrong.append(f"{module}:{imported.line}: core {layer} must not import core {target}")
    return wrong


def wrong_packages(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Return packages that only one room imports, elsewhere, and packages in the core that it does not need."""
    solver = within(module, "services.core.solvers")
    core = _is_pure(module)
    wrong: list[str] = []
    for imported in imports_of(source, module, is_package=is_package):
        package = imported.module.split(".")[0]
        foreign = package not in sys.stdlib_module_names and package not in ("services", LAB)
        if package in SOLVER_PACKAGES and not solver:
            wrong.append(f"{module}:{imported.line}: only services.core.solvers imports {package}")
        elif package in LEARNING_PACKAGES and not any(within(module, home) for home in LEARNING_PACKAGES[package]):
            wrong.append(f"{module}:{imported.line}: only {' and '.join(LEARNING_PACKAGES[package])} import {package}")
        elif core and foreign and package not in CORE_PACKAGES | SOLVER_PACKAGES:
            wrong.append(f"{module}:{imported.line}: the core must not import {package}")
    return wrong


def effects(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Return what a module of the core does beside computing: clocks, global randomness, environment, files, logs.

    The lab's policies are held to it too: the simulator and the scheduler call them as they call the product's.
    """
    if not _is_pure(module):
        return []
    wrong = [
        f"{module}:{imported.line}: the core must not import {imported.module.split('.')[0]}"
        for imported in imports_of(source, module, is_package=is_package)
        if imported.module.split(".")[0] in EFFECT_MODULES
    ]
    for node in nodes_of(source):
        if isinstance(node, ast.Call):
            wrong += [f"{module}:{node.lineno}: {fault}" for fault in _faults(node)]
    return wrong


def _faults(call: ast.Call) -> Iterator[str]:
    name = _called(call)
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    owners = ast.unparse(owner) if owner is not None else ""
    if owner is None and name in ("open", "input", "print", "eval", "exec", "__import__"):
        yield f"the core must not call {name}()"
    if name in CLOCK_CALLS and owners.split(".")[-1] in ("datetime", "date"):
        yield f"the core has no clock: {owners}.{name}()"
    if owners in {f"{numpy}.random" for numpy in NUMPY_NAMES} and name.islower() and name != "default_rng":
        yield f"the core has no global randomness: {owners}.{name}()"
    seed = call.args[0] if call.args else next((keyword.value for keyword in call.keywords), None)
    if name == "default_rng" and (seed is None or (isinstance(seed, ast.Constant) and seed.value is None)):
        yield "the core has no randomness without a seed: default_rng()"
    if owner is not None and name in FILE_CALLS and (owners in NUMPY_NAMES or name.split("_")[0] in ("read", "write")):
        yield f"the core touches no files: {owners}.{name}()"
    if name == "tofile":
        yield "the core touches no files: tofile()"


def _called(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _is_pure(module: str) -> bool:
    return any(within(module, room) for room in PURE)


def _core_layer(module: str) -> str | None:
    parts = module.split(".")
    return parts[2] if parts[:2] == ["services", "core"] and len(parts) > 2 and parts[2] in CORE_LAYERS else None
