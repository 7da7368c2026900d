"""The package itself: what it is made from, what it needs, and what it may import."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.servers import ROOT

PACKAGE = ROOT / "clients" / "python" / "src" / "wattshift"
COMMAND = "run `.venv/bin/python -m tools.published`"


def test_what_is_generated_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "clients" / "python"))
    import generate

    stale = [path.name for path, text in generate.made().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], COMMAND


def test_the_helper_for_jobs_needs_the_standard_library_alone() -> None:
    script = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); from wattshift import job; job.progress(1)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")


def test_httpx_is_all_that_it_needs() -> None:
    project = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())["project"]
    extras = {"lightning", "mcp", "mlflow", "torch", "transformers", "wandb"}

    assert [requirement.partition(">")[0] for requirement in project["dependencies"]] == ["httpx"]
    for module in PACKAGE.rglob("*.py"):
        allowed = {"httpx", "wattshift", *sys.stdlib_module_names}
        if module.parent.name == "integrations":
            allowed |= extras
        elif module.name == "ray.py":  # runs inside Ray
            allowed |= {"ray"}
        assert _imported(module) <= allowed, module


def _imported(module: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(module.read_text(encoding="utf-8"))))
    plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return {
        name.partition(".")[0]
        for name in [*plain, *(node.module or "" for node in nodes if isinstance(node, ast.ImportFrom))]
    }


def test_types_are_for_its_users_too() -> None:
    assert (PACKAGE / "py.typed").is_file()
