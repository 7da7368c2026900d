"""``wattshift lab partition``: what it prints, and how it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

from lab.commands import app, graphs
from services.cli.commands import CliError
from services.core.policies.clover.layouts import LAYOUTS
from tests.support.api_examples import EXAMPLES

EXAMPLE = Path(__file__).parents[3] / "examples" / "partition" / "two-applications.json"


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """Return what the command prints as JSON."""
    app(["partition", *arguments, "--json"], standalone_mode=False)
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., str]:
    """A problem of one application, with changes to the whole and to the application."""

    def write(application: dict[str, Any] | None = None, **changes: Any) -> str:
        document = json.loads(json.dumps(EXAMPLES["PartitionRequest"])) | changes
        document["applications"][0] |= application or {}
        path = tmp_path / "problem.json"
        path.write_text(json.dumps(document))
        return str(path)

    return write


def test_two_applications_share_the_gpus_within_their_limits(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, str(EXAMPLE))

    assert found["status"] == "feasible"
    assert sum(each["gpus"] for each in found["applications"]) == 4
    for each in found["applications"]:
        assert each["keeps_limits"]
        assert each["p95_ms"] <= each["sla_p95_ms"]
        assert each["objective_pct"] <= each["bound_pct"] + 0.5
    assert found["applications"][1]["accuracy_loss_pct"] <= 0.5
    held = [f"{size}g" for layout in found["layouts"] for size in LAYOUTS[layout - 1]]
    used = [each["slice"] for plan in found["applications"] for each in plan["instances"] for _ in range(each["count"])]
    assert all(used.count(size) <= held.count(size) for size in set(used))
    assert found["recut"] == [gpu for gpu, layout in enumerate(found["layouts"]) if layout != 1]


def test_the_best_configurations_are_named_where_they_are_asked_for(
    capsys: pytest.CaptureFixture[str], written: Callable[..., str]
) -> None:
    (found,) = planned(capsys, written(candidates=3))["applications"]

    assert 1 <= len(found["candidates"]) <= 3
    assert found["candidates"][0]["instances"] == found["instances"]
    worths = [each["objective_pct"] for each in found["candidates"]]
    assert worths == sorted(worths, reverse=True)
    assert all(each["p95_ms"] <= found["sla_p95_ms"] for each in found["candidates"])


def test_equal_problems_have_equal_answers(capsys: pytest.CaptureFixture[str], written: Callable[..., str]) -> None:
    first, second = (planned(capsys, written()) for _ in range(2))

    assert {**first, "solve_s": 0} == {**second, "solve_s": 0}


def test_an_sla_that_nothing_keeps_is_an_answer(
    capsys: pytest.CaptureFixture[str], written: Callable[..., str]
) -> None:
    found = planned(capsys, written({"sla_p95_ms": 0.5}))

    assert found["status"] == "infeasible"
    assert found["applications"][0]["bound_pct"] is None
    assert not found["applications"][0]["keeps_limits"]


def test_people_get_a_table(capsys: pytest.CaptureFixture[str], written: Callable[..., str]) -> None:
    app(["partition", written()], standalone_mode=False)

    shown = capsys.readouterr().out
    assert "photos" in shown
    assert "cut anew" in shown


def test_graphs_are_written_for_programs_that_draw(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, write = [tmp_path / name for name in ("graphs.graphml", "graphs.dot")], graphs.write_graphs
    both = lambda file, of: (write(file, of), write(files[1], of))  # noqa: E731
    monkeypatch.setattr(graphs, "write_graphs", both)
    found = planned(capsys, str(EXAMPLE), "--graph", str(files[0]))

    graph = nx.read_graphml(files[0])
    edges = {(source, target): data["weight"] for source, target, data in graph.edges(data=True)}
    assert edges == {
        (f"{plan['name']}/{each['variant']}", f"{plan['name']}/{each['slice']}"): each["count"]
        for plan in found["applications"]
        for each in plan["instances"]
    }
    assert graph.nodes["scans/b7"]["accuracy_pct"] == pytest.approx(84.582)
    assert all(data["service_ms"] > 0 for _, _, data in graph.edges(data=True))
    drawn = files[1].read_text()
    assert drawn.startswith("digraph configuration {")
    assert all(f'"{source}" -> "{target}" [label="{weight}"];' in drawn for (source, target), weight in edges.items())


@pytest.mark.parametrize(
    ("file", "message"), [("graphs.png", "must end in .graphml or .dot"), ("away/graphs.dot", "there is no folder")]
)
def test_a_graph_that_cannot_be_written_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, file: str, message: str
) -> None:
    with pytest.raises(CliError, match=message):
        planned(capsys, str(EXAMPLE), "--graph", str(tmp_path / file))


@pytest.mark.parametrize(
    ("application", "changes", "message"),
    [
        ({}, {"gpus": 0}, "gpus"),
        ({}, {"layouts": [1]}, "layouts has 1 entries for 4 GPUs"),
        ({"carbon_weight": 2}, {}, "carbon_weight"),
        ({"max_accuracy_loss_pct": -1}, {}, "accuracy floor of 85.45 %, and the best accuracy is 84.6 %"),
        ({"variants": []}, {}, "variants"),
        ({"requests_per_s": 0}, {}, "requests_per_s"),
        ({"sla_p95_ms": None, "requests_per_s": 10_000}, {}, "needs sla_p95_ms"),
        ({"running": [{"variant": "b9", "slice": "1g", "count": 1}]}, {}, "variant b9 has no profile on 1g"),
        ({"running": [{"variant": "b3", "slice": "1g", "count": 29}]}, {}, "running cannot be cut from 4 GPUs"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str],
    written: Callable[..., str],
    application: dict[str, Any],
    changes: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(CliError, match=message) as raised:
        planned(capsys, written(application, **changes))

    assert "\n" not in str(raised.value)


def test_several_applications_need_slas(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    document = json.loads(EXAMPLE.read_text())
    document["applications"][0]["sla_p95_ms"] = None
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(document))

    with pytest.raises(CliError, match="application photos needs sla_p95_ms, as there are several"):
        planned(capsys, str(path))
