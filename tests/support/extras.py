"""A Python that finds only what some of the project's extras install, without installing anything."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.servers import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_BLOCKER = """
import importlib.metadata
import sys

HIDDEN = {hidden}

class _Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        return None

sys.meta_path.insert(0, _Blocker())
_entry_points = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **asked: importlib.metadata.EntryPoints(
    each for each in _entry_points(**asked) if each.module.partition(".")[0] not in HIDDEN
)
"""


def needs(*extras: str) -> set[str]:
    """Return the names of all distributions that installing the project with ``extras`` installs, itself excluded."""
    found: set[str] = set()
    _follow(PROJECT["dependencies"], set(), found)
    for extra in extras:
        _follow(PROJECT["optional-dependencies"][extra], set(), found)
    return found


def _follow(requirements: Iterable[str], extras: set[str], found: set[str]) -> None:
    for line in requirements:
        requirement = Requirement(line)
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras or {""}):
            continue
        name = canonicalize_name(requirement.name)
        if name == PROJECT["name"]:
            for extra in requirement.extras:
                _follow(PROJECT["optional-dependencies"][extra], set(), found)
            continue
        if name in found and not requirement.extras:
            continue
        found.add(name)
        try:
            _follow(requires(name) or (), set(requirement.extras), found)
        except PackageNotFoundError as error:
            raise AssertionError(f"{name} is needed, but not installed here") from error


def blocker(folder: Path, *extras: str) -> Path:
    """Write a ``sitecustomize`` that hides every other package and its plugins; put its folder first in PYTHONPATH."""
    there = needs(*extras)
    hidden = sorted(
        package
        for package, distributions in packages_distributions().items()
        if not {canonicalize_name(each) for each in distributions} & {*there, PROJECT["name"], "wattshift"}
        and re.fullmatch(r"\w+", package)
    )
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(_BLOCKER.format(hidden=json.dumps(hidden)))
    return folder
