"""What `./test` says of folders of tests that have become dear."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import costs

ROOT = Path(__file__).parents[2]


def test_a_folder_that_grew_by_half_is_named_and_no_other() -> None:
    same = dict.fromkeys(("tests/one", "tests/two", "tests/three"), 100.0)
    kept = {**same, "tests/near": 100.0, "tests/grown": 100.0, "tests/small": 1.0}
    more = {"tests/near": 149.0, "tests/grown": 151.0}
    found = {**same, **more, "tests/small": costs.LEAST - 1, "tests/new": costs.LEAST + 1}
    assert [each.split()[0] for each in costs.grown(found, kept)] == ["tests/grown", "tests/new"]
    assert not list(costs.grown({"tests/small": costs.LEAST + 1}, {"tests/small": costs.LEAST}))


def test_a_run_that_is_dear_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(costs, "LAST", tmp_path / "last.json")
    monkeypatch.setattr(costs, "KEPT", tmp_path / "costs.toml")
    assert not costs.failed(), "nothing ran"
    costs.LAST.write_text(json.dumps({"tests/unit": 100.0}))
    costs.main()
    assert not costs.failed()
    costs.LAST.write_text(json.dumps({"tests/unit": 201.0}))
    assert costs.failed()
    assert "test: folders cost 2.0 times what is written down, in the median" in capsys.readouterr().err


def test_on_a_machine_where_all_costs_more_a_folder_has_to_grow_by_more() -> None:
    kept = {f"tests/{number}": 100.0 for number in range(5)}
    slower = {name: 1.7 * cost for name, cost in kept.items()}
    assert not list(costs.grown(slower, kept))
    assert [each.split()[0] for each in costs.grown({**slower, "tests/3": 256.0}, kept)] == ["tests/3"]
    faster = {name: 0.5 * cost for name, cost in kept.items()}
    assert not list(costs.grown({**faster, "tests/3": 149.0}, kept)), "the loop alone may differ"


def test_a_run_says_what_its_folders_cost(tmp_path: Path) -> None:
    for name, turns, end in (("dear", 2_000_000, "pass"), ("cheap", 1, "pass"), ("failed", 2_000_000, "assert 0")):
        (tmp_path / "tests" / name).mkdir(parents=True)
        text = f"def test_it():\n    total = 0\n    for at in range({turns}):\n        total += at * at\n    {end}\n"
        (tmp_path / "tests" / name / "test_it.py").write_text(text)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\n")
    (tmp_path / costs.LAST.parent).mkdir(parents=True)
    command = ["-m", "pytest", "-q", "--workers", "2", "--import-mode=importlib"]
    command += ["-p", "tests.support.folder_times", "-p", "tests.support.workers"]
    run = subprocess.run([sys.executable, *command, "tests"], cwd=tmp_path, capture_output=True, text=True)
    assert "1 failed, 2 passed" in run.stdout, run.stdout + run.stderr
    found = json.loads((tmp_path / costs.LAST).read_text())
    assert found["tests/dear"] > found["tests/cheap"] >= 0.0
    assert found["tests/dear"] > found["tests/failed"], "to look for the smallest example that fails is no cost"
    assert "ten million turns of a loop took " in run.stdout
