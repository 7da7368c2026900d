"""``wattshift lab placement``: what it prints, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.commands import app
from lab.placement.mapping import Mapper, Mapping
from services.cli.commands import CliError

PAIR = {"stages": [{"replicas": 2, "parameter_bytes": 2e7, "output_bytes": 2e6}, {"replicas": 2}]}


def placed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """Return what the command prints as JSON."""
    app(["placement", *arguments, "--json"], standalone_mode=False)
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return a file with the two-stage job."""
    file = tmp_path / "job.json"
    file.write_text(json.dumps(PAIR))
    return file


@pytest.mark.parametrize("method", ["heavy-edge", "refined", "ilp"])
def test_a_job_file_is_placed_by_every_method(capsys: pytest.CaptureFixture[str], job: Path, method: str) -> None:
    found = placed(capsys, str(job), "--servers", "2,1,1", "--method", method)

    assert set(found) == {"assignment", "iteration_time_s", "cut_bytes", "solve_ms"}
    assert found["assignment"][0] == ["S1-R1", "S1-R2"]
    assert sorted(found["assignment"][1] + found["assignment"][2]) == ["S2-R1", "S2-R2"]
    assert found["cut_bytes"] == 4e6
    assert found["iteration_time_s"] == pytest.approx(2e7 / 300e9 + 2e6 * 8 / 1.25e9)


def test_bandwidths_are_options(capsys: pytest.CaptureFixture[str], job: Path) -> None:
    network = ("--inter-gbps", "100", "--intra-gbytes", "600", "--server-gpus", "4")
    found = placed(capsys, str(job), "--servers", "2,1,1", *network)

    assert found["iteration_time_s"] == pytest.approx(2e7 / 600e9 + 2e6 * 4 / 12.5e9)


def test_a_model_by_name_stands_in_for_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    found = placed(capsys, "--model", "vgg19", "--gpus", "8", "--servers", "4,3,2")
    large = placed(capsys, "--model", "gpt-175b", "--gpus", "16", "--servers", "8,0,8")

    assert sum(map(len, found["assignment"])) == 8
    assert [len(names) for names in large["assignment"]] == [8, 0, 8]
    assert {name.rpartition("-")[0] for name in large["assignment"][0]} == {"S1-R1"}


@pytest.mark.parametrize(("method", "placements"), [("heavy-edge", 6), ("refined", 6), ("ilp", 2)])
def test_the_first_placement_of_a_process_is_not_timed(
    capsys: pytest.CaptureFixture[str], job: Path, monkeypatch: pytest.MonkeyPatch, method: str, placements: int
) -> None:
    clock, true = [0.0], Mapper.map
    took_s = iter([1.0, 0.010, 0.009, 0.004, 0.006, 0.005])
    calls: list[int] = []

    def placing(self: Mapper, *arguments: Any, **named: Any) -> Mapping:
        calls.append(self.graph.gpus)
        clock[0] += next(took_s)
        return true(self, *arguments, **named)

    monkeypatch.setattr(Mapper, "map", placing)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    found = placed(capsys, str(job), "--servers", "2,1,1", "--method", method)

    assert len(calls) == placements
    assert found["solve_ms"] == (10.0 if method == "ilp" else 4.0)


def test_the_other_forms_of_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    for document in ({"gpus": 4, "parameter_bytes": 1e9}, {"model": "bert-large", "gpus": 4}, {"layout": PAIR}):
        file.write_text(json.dumps(document))
        assert sum(map(len, placed(capsys, str(file), "--servers", "3,3")["assignment"])) == 4


def test_people_get_a_table(capsys: pytest.CaptureFixture[str], job: Path) -> None:
    app(["placement", str(job), "--servers", "2,1,1"], standalone_mode=False)

    shown = capsys.readouterr().out
    assert "S1-R1 S1-R2" in shown
    assert "iteration 12.87 ms" in shown


@pytest.mark.parametrize(
    ("content", "arguments", "complaint", "code"),
    [
        (None, ["--servers", "4"], "give a JOB.json", 2),
        (None, ["--model", "vgg19", "--servers", "4"], "--model needs --gpus", 2),
        (None, ["--model", "vgg20", "--gpus", "4", "--servers", "4"], "no model 'vgg20'", 2),
        (None, ["--model", "vgg19", "--gpus", "8", "--servers", "4,3"], "needs 8 GPUs, the servers have 7", 2),
        (None, ["--model", "vgg19", "--gpus", "8", "--servers", "4;4"], "is not a list of free GPUs", 2),
        (None, ["--model", "vgg19", "--gpus", "8", "--servers", "16"], "cannot be free", 2),
        (None, ["--model", "vgg19", "--gpus", "0", "--servers", "8"], "must be at least 1", 2),
        (None, ["--model", "gpt-175b", "--gpus", "8", "--servers", "4,4"], "whole", 2),
        (None, ["--model", "vgg19", "--gpus", "4", "--servers", "4", "--method", "luck"], "no placement method", 2),
        (None, ["--model", "vgg19", "--gpus", "4", "--servers", "4", "--inter-gbps", "0"], "bandwidths", 2),
        ("{", ["--servers", "4"], "is not JSON", 2),
        ("[]", ["--servers", "4"], "the job", 2),
        ('{"stages": [{"replicas": 3, "expert_parallel": 2}]}', ["--servers", "4"], "does not divide", 2),
        ('{"stages": [{"copies": 3}]}', ["--servers", "4"], "replicas", 2),
        ("absent", ["--servers", "4"], "cannot be read", 3),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(
    tmp_path: Path, content: str | None, arguments: list[str], complaint: str, code: int
) -> None:
    file = tmp_path / "job.json"
    if content not in (None, "absent"):
        file.write_text(content)
    with pytest.raises(CliError, match=complaint) as caught:
        app(["placement", *([] if content is None else [str(file)]), *arguments], standalone_mode=False)
    assert caught.value.exit_code == code
