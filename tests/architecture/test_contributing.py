"""CONTRIBUTING.md tells the truth: its tree is the house, and its recipes work when they are followed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
RECIPES: dict[str, str] = dict(re.findall(r"^## Recipe: (.+?)\n(.*?)(?=^## |\Z)", GUIDE, re.MULTILINE | re.DOTALL))
SOURCES = (
    *("lab", "tools"),
    *("services", "gateway", "carbon_service", "optimizer_service", "gpu_agent", "migrations"),
    *(
        "examples",
        "deploy",
        "clients",
        "tests",
        "pyproject.toml",
        "docker-compose.yml",
        "requirements.lock",
        "README.md",
    ),
)


@dataclass(frozen=True)
class Block:
    """A fenced block, with the file that the text before it names last."""

    language: str
    file: str
    lines: tuple[str, ...]


def blocks_of(recipe: str) -> Iterator[Block]:
    """Yield a recipe's fenced blocks in order."""
    file = ""
    for before, language, body in re.findall(r"(.*?)^```(\w+)\n(.*?)^```$", recipe, re.MULTILINE | re.DOTALL):
        named = re.findall(r"`([\w/.]+\.(?:py|toml))`", re.sub(r"`tests/architecture/\S+`", "", before))
        file = named[-1] if named else file
        yield Block(language, file, tuple(body.splitlines()))


def follow(block: Block, house: Path) -> None:
    """Do what a block says: write a new file, or change the lines that it marks."""
    path = house / block.file
    if block.language != "diff":
        assert not path.exists(), f"{block.file} is said to be new"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(block.lines) + "\n")
        return
    source = path.read_text()
    for hunk in "\n".join(block.lines).split("\n ...\n"):
        lines = hunk.split("\n")
        old = "".join(line[1:] + "\n" for line in lines if not line.startswith("+"))
        new = "".join(line[1:] + "\n" for line in lines if not line.startswith("-"))
        assert source.count(old) == 1, f"{block.file} has {source.count(old)} places like this:\n{old}"
        source = source.replace(old, new)
    path.write_text(source)


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """Return a copy of the checkout that a recipe may change."""
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=left_out)
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_that_is_followed_works(house: Path, title: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(house)}
    python = [sys.executable, "-P", "-m"]
    for block in blocks_of(RECIPES[title]):
        if block.language != "sh":
            follow(block, house)
            continue
        for line in block.lines:
            command, *arguments = shlex.split(line, comments=True)
            start = {
                "./test": [*python, "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(house)],
                ".venv/bin/wattshift": [*python, "services.cli.main"],
                ".venv/bin/python": python[:2],
            }[command]
            done = subprocess.run([*start, *arguments], cwd=house, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{line}\n{done.stdout[-3_000:]}\n{done.stderr[-3_000:]}"


def test_the_three_recipes_are_there() -> None:
    assert sorted(RECIPES) == ["a carbon provider", "a policy", "an endpoint"]


def test_a_policy_takes_fewer_than_sixty_lines() -> None:
    (policy, *_) = (block for block in blocks_of(RECIPES["a policy"]) if block.language == "python")

    assert len(policy.lines) < 60


def test_the_tree_is_the_house() -> None:
    (tree,) = re.findall(r"^## The house\n\n```\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    drawn: set[str] = set()
    above: list[str] = []
    for indent, name in re.findall(r"^( *)([\w-]+)/", tree, re.MULTILINE):
        above[len(indent) // 2 :] = [name]
        drawn.add("/".join(above))

    assert sorted(path for path in drawn if not (ROOT / path).is_dir()) == []
    rooms = {
        path.relative_to(ROOT).as_posix()
        for folder in (ROOT, ROOT / "services", ROOT / "services/core")
        for path in folder.iterdir()
        if path.is_dir() and (path / "__init__.py").exists()
    }
    assert sorted(rooms - drawn) == []
