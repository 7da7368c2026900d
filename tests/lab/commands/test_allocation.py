"""``wattshift lab allocation``: what it prints, and how it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.commands import app
from services.cli.commands import CliError
from tests.support.api_examples import EXAMPLES

EXAMPLE = Path(__file__).parents[3] / "examples" / "allocation" / "five-jobs.json"
Document = dict[str, Any]


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """Return what the command prints as JSON."""
    app(["allocation", *arguments, "--json"], standalone_mode=False)
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., str]:
    """The problem of the API's example, changed by a function."""

    def write(change: Callable[[Document], Any] = lambda document: None) -> str:
        document = json.loads(json.dumps(EXAMPLES["AllocationRequest"]))
        change(document)
        path = tmp_path / "problem.json"
        path.write_text(json.dumps(document))
        return str(path)

    return write


def test_the_example_fills_its_nodes_within_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, str(EXAMPLE))

    assert found["status"] == "feasible"
    assert found["solver"] == "greedy"
    assert found["power_w"] <= 9000
    jobs = {each["name"]: each for each in found["jobs"]}
    assert jobs["eval"]["nodes"] == [{"node": "node-1", "gpus": 2}]
    assert all(share["gpus"] % 4 == 0 for share in jobs["gpt"]["nodes"]), "tensor groups of four stay whole"
    assert jobs["gpt"]["iteration_s"] > 0.6
    taken = [(share["node"], share["gpus"]) for each in found["jobs"] for share in each["nodes"]]
    assert sum(gpus for _, gpus in taken) + found["free_gpus"] == 32
    assert all(sum(gpus for node, gpus in taken if node == name) <= 8 for name, _ in taken)


def test_equal_problems_have_equal_answers(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (planned(capsys, str(EXAMPLE)) for _ in range(2))

    assert {**first, "solve_s": 0} == {**second, "solve_s": 0}


def test_a_limit_below_what_runs_is_an_answer(capsys: pytest.CaptureFixture[str], written: Callable[..., str]) -> None:
    found = planned(capsys, written(lambda document: document.update(power_limit_w=100)))

    assert found["status"] == "infeasible"
    assert "exceeds the power limit" in found["note"]
    assert [each["waits"] for each in found["jobs"]] == ["power_limit", None]


def test_a_known_gpu_model_needs_no_idle_power(capsys: pytest.CaptureFixture[str], written: Callable[..., str]) -> None:
    def on_h200s(document: Document) -> None:
        del document["idle_w"]
        for node in document["nodes"]:
            node["gpu_model"] = "H200"

    assert planned(capsys, written(on_h200s))["idle_w"] == pytest.approx(3 * 83.8)


def test_people_get_a_table(capsys: pytest.CaptureFixture[str], written: Callable[..., str]) -> None:
    app(["allocation", written(lambda document: document.update(power_limit_w=700))], standalone_mode=False)

    shown = capsys.readouterr().out
    assert "waits: the power limit leaves too little" in shown
    assert "1 on n1" in shown
    assert "of 700 W" in shown


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda it: it.update(nodes=[]), "nodes: must have at least 1"),
        (lambda it: it.update(power_limit_w=0), "power_limit_w: must be at least 1e-06"),
        (lambda it: it.update(idle_w={}), "idle_w needs the power of a free GPU of model gpu"),
        (lambda it: it.update(idle_w={"gpu": 1, "B9": 1}), "idle_w: no node has GPUs of model B9"),
        (lambda it: it["nodes"].append(it["nodes"][0]), "node n0 is there twice"),
        (lambda it: it["jobs"].append(it["jobs"][0]), "job bert is there twice"),
        (lambda it: it["nodes"][0].update(gpu_model="A100"), "job bert needs a gpu_model, as there are A100 and gpu"),
        (lambda it: it["jobs"][0].update(gpu_model="V100"), "job bert: no node has GPUs of model V100"),
        (lambda it: it["jobs"][1].update(held=[{"node": "n7", "gpus": 1}]), "held names node n7, which is not there"),
        (lambda it: it["jobs"][1].update(held=[{"node": "n1", "gpus": 2}]), "sizes must have the size of the gang"),
        (lambda it: it["nodes"][1].update(gpu_model="A100"), "needs a gpu_model"),
        (lambda it: it["jobs"][0]["sizes"].reverse(), "sizes must ascend by gpus"),
        (lambda it: it["jobs"][1]["sizes"][0]["controls"][0].update(power_w=0), "power_w: must be at least 1e-06"),
        (lambda it: it["jobs"][1]["sizes"][0]["controls"][0].update(value=300), "has a control value twice"),
        (lambda it: it["jobs"][0]["layout"]["stages"][0].update(expert_parallel=2), "expert_parallel does not divide"),
        (lambda it: it["jobs"][0].update(work_s=float("nan")), "must be a finite number"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], written: Callable[..., str], change: Callable[[Document], Any], message: str
) -> None:
    with pytest.raises(CliError, match=message) as raised:
        planned(capsys, written(change))

    assert "\n" not in str(raised.value)
