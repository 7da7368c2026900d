"""Experiments: the file, the cells, resuming, the bound, the causes and the page."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from lab.experiments import runner
from lab.experiments.cell import GRID_BLIND, grid_of, packed_s, run_cell, run_cells, unpacked_s
from lab.experiments.plan import load_experiment
from lab.report.markdown import BASELINE, fill, fill_page, load, tables, whole
from lab.report.page import defaults_of, render
from lab.report.tables import FIGURES, RATIOS, by_signal, causes, changes, compare, sensitivities, write_csv
from services.cli.reports.charts import ticks
from services.core.domain.errors import DomainError
from services.core.policies.registry import POLICIES
from services.simulator.workload import ForecastKind

FILE = """
name = "small"
cluster = "4x2:RTX3090"
zones = ["GB"]
baseline = "Tiresias (LAS)"
bound_horizons_h = [24, 0]
bound_rows = true

[[traces]]
label = "two hours"
jobs = "green-year"
start = "2023-08-01"
days = 0.08
tail_days = 2

[[policies]]
label = "Tiresias (LAS)"
policy = "las"

[[policies]]
policy = "green"
params = { mu = 3.0 }
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(FILE, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ran")
    path = folder / "small.toml"
    path.write_text(FILE, encoding="utf-8")
    plan = load_experiment(path)
    results = runner.run_experiment(plan, folder / "small")
    return folder, results, runner.run_bounds(plan, folder / "small", results)


def test_a_file_lists_its_cells_the_baseline_first(file: Path) -> None:
    plan = load_experiment(file)
    cells = plan.cells()

    assert [cell.choice.label for cell in cells] == ["Tiresias (LAS)", "green"]
    assert len({cell.key() for cell in cells}) == 2
    assert [cell.key() for cell in cells] == [cell.key() for cell in load_experiment(file).cells()]


def test_the_experiments_that_pages_name_can_be_read() -> None:
    files = sorted((Path(__file__).parents[3] / "lab" / "examples").glob("*.toml"))

    assert len(files) > 10
    assert {file.name: load_experiment(file).name for file in files} == {file.name: file.stem for file in files}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("name =", "nam ="), "unknown key 'nam'"),
        (('zones = ["GB"]', "zones = []"), "zones must be a list"),
        (('baseline = "Tiresias (LAS)"', 'baseline = "x"'), "baseline must be one of them"),
        (("days = 0.08", "dayz = 0.08"), "unknown key 'dayz'"),
        (("name =", "name"), "is not TOML"),
        (('policy = "green"', 'label = "x"'), "missing"),
        (("tail_days = 2", "options = { host_per_job = 1.0 }"), "the engine has no option 'host_per_job'"),
        (("tail_days = 2", "options = { host_per_job_once = true }"), "once needs host_per_job_w"),
        (("bound_rows = true", "bound_rows = 1"), "bound_rows must be true or false, not 1"),
        (("params = {", 'options = { grace_s = "2" }\nparams = {'), "grace_s must be a number, not '2'"),
    ],
)
def test_a_file_that_cannot_be_meant_is_one_clear_error(file: Path, change: tuple[str, str], message: str) -> None:
    file.write_text(FILE.replace(*change), encoding="utf-8")

    with pytest.raises(DomainError, match=message):
        load_experiment(file)


def test_a_second_run_does_only_what_is_missing(
    ran: tuple[Path, list[dict[str, Any]], list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, results, _ = ran
    monkeypatch.setattr(runner, "ProcessPoolExecutor", None)
    told: list[tuple[int, int, str]] = []
    plan = load_experiment(folder / "small.toml")

    again = runner.run_experiment(plan, folder / "small", report=lambda *what: told.append(what))

    assert again == results
    assert told == [(2, 2, "")]
    assert all(result["summary"]["completed"] == result["summary"]["jobs"] > 10 for result in results)
    assert all(sum(size["jobs"] for size in result["sizes"]) == result["summary"]["jobs"] for result in results)


def test_a_cell_holds_every_completion_time(ran: tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]) -> None:
    _, results, _ = ran

    for result in results:
        jct_s = unpacked_s(result["jct_s"])
        assert jct_s.size == result["summary"]["jobs"]
        assert 0 <= jct_s.mean() - result["summary"]["avg_jct_s"] < 1
    assert unpacked_s(packed_s(np.array([0.2, np.nan, 3.0]))) == pytest.approx([1, np.nan, 3], nan_ok=True)


def test_equal_cells_give_equal_results(file: Path) -> None:
    cell = load_experiment(file).cells()[1]
    one, other = run_cell(cell), run_cell(cell)

    for result in (one, other):
        del result["summary"]["wall_s"]
    assert json.dumps(one) == json.dumps(other)


def test_no_run_goes_below_its_bounds(ran: tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]) -> None:
    folder, results, bounds = ran
    named = {(each["label"], each["horizon_h"], each["of"]): each for each in bounds}
    kg = {key: each["carbon_kg"] for key, each in named.items()}

    assert set(named) == {
        *((BASELINE, horizon, of) for horizon in (None, 24.0, 0.0) for of in ("own", "all")),
        *(("green", None, of) for of in ("own", "all")),
    }
    for result in results:
        label, carbon_kg = result["inputs"]["choice"]["label"], result["summary"]["carbon_kg"]
        assert 0 < kg[label, None, "all"] < kg[label, None, "own"] < carbon_kg
    for of in ("own", "all"):
        assert kg[BASELINE, 0.0, of] <= kg[BASELINE, 24.0, of] <= kg[BASELINE, None, of] * (1 + 1e-6)
    assert named[BASELINE, None, "own"]["levers"] == "hours"
    assert named["green", None, "own"]["levers"] == "hours, widths"
    assert (named[BASELINE, 24.0, "all"]["slack"], named["green", None, "all"]["slack"]) == ("24 h", "none")
    assert {each["zone"] for each in load(folder / "small")[1]} == {"GB"}
    assert len(load(folder / "small")[1]) == len(bounds)


def test_a_cell_from_before_completion_times_were_kept_has_no_bound(tmp_path: Path, file: Path) -> None:
    plan = load_experiment(file)
    cells = [{"inputs": {}, "summary": {}} for _ in plan.cells()]

    assert runner.run_bounds(plan, tmp_path, cells) == []


def test_causes_add_up_and_are_told_apart() -> None:
    base = {"energy_kwh": 100.0, "idle_energy_kwh": 20.0, "carbon_kg": 20.0, "idle_carbon_kg": 4.0}
    less = {"energy_kwh": 92.0, "idle_energy_kwh": 20.0, "carbon_kg": 18.4, "idle_carbon_kg": 4.0}
    moved = {"energy_kwh": 100.0, "idle_energy_kwh": 20.0, "carbon_kg": 18.0, "idle_carbon_kg": 4.0}
    idle = {"energy_kwh": 90.0, "idle_energy_kwh": 10.0, "carbon_kg": 18.0, "idle_carbon_kg": 2.0}

    assert causes(less, base) == pytest.approx((-0.08, 0.0, 0.0))
    assert causes(moved, base) == pytest.approx((0.0, 0.0, -0.1))
    assert causes(idle, base) == pytest.approx((0.0, -0.1, 0.0))


def test_reports_are_whole(ran: tuple[Path, list[dict[str, Any]], list[dict[str, Any]]], tmp_path: Path) -> None:
    folder, results, bounds = ran
    page = render("small <1>", "Tiresias (LAS)", results, bounds)
    write_csv(tmp_path / "results.csv", results)

    root = ElementTree.fromstring(page.replace("<!doctype html>", "").replace('<meta charset="utf-8">', ""))
    titles = [title.text for title in root.findall(".//h2")]
    assert titles[:4] == ["In short", "By zone", "Over time", "By size of job"]
    assert {link.get("href") for link in root.findall(".//nav/a")} == {
        f"#{title.get('id')}" for title in root.findall(".//h2")
    }
    assert len(root.findall(".//svg")) == 1 + 4 + 5 + 1
    assert "least possible, 24 h, all levers" in page
    assert "hours, widths, batches, limits, sleep" in page
    assert "mu = 3.0" in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "small &lt;1&gt;" in page
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 3
    assert next(row.carbon for row in compare(results, "Tiresias (LAS)")) == 1.0
    filled = fill("before\n<!-- small -->\nold\n<!-- end -->\n<!-- other -->\nkept\n<!-- end -->", folder)
    assert "old" not in filled
    assert "kept" in filled
    assert "| policy | carbon GB | **carbon** |" in filled
    assert "| green | " in filled
    assert "| *least possible, 24 h* | " in filled
    assert "| *least possible, 24 h, all levers* | " in filled
    assert "| green | none | hours, widths | +" in filled


def test_a_page_of_results_is_filled_and_its_cells_lie_beside_it(
    ran: tuple[Path, list[dict[str, Any]], list[dict[str, Any]]],
) -> None:
    folder, results, _ = ran
    page = folder / "page.md"
    page.write_text(
        "<!-- small means -->\n<!-- end -->\nby hand\n<!-- small traces -->\n<!-- end -->\n", encoding="utf-8"
    )

    (folder / "small" / "cells" / "earlier.json").write_text("{}", encoding="utf-8")  # of a version of the file before
    fill_page(page, folder)
    once = page.read_text(encoding="utf-8")
    fill_page(page, folder)

    assert page.read_text(encoding="utf-8") == once
    assert "\nby hand\n" in once
    assert "| setting | policy | **carbon** |" in once
    assert "| two hours | green | " in once
    rows = gzip.decompress((folder / "page-cells.csv.gz").read_bytes()).decode().splitlines()
    assert len(rows) == 1 + len(results)
    assert rows[1].startswith("small,Tiresias (LAS),two hours,GB,direct,1,")

    fill_page(page, folder / "elsewhere")

    assert page.read_text(encoding="utf-8") == once, "an experiment without results keeps its tables"
    assert gzip.decompress((folder / "page-cells.csv.gz").read_bytes()).decode().splitlines() == rows


def half_run(folder: Path) -> None:
    """Leave cells of an experiment in a folder, one of which is yet to run: of policy ``a`` in SE, direct."""
    named = {
        "k1": ("a", "t", "GB", "direct", 1),
        "k2": ("a", "t", "SE", "direct", 1),
        "k3": ("a", "t", "GB", "lifecycle", 1),
        "k4": ("b", "t", "GB", "direct", 1),
        "k5": ("b", "t", "SE", "direct", 1),
    }
    (folder / "cells").mkdir(parents=True)
    (folder / "index.json").write_text(json.dumps([[key, *of] for key, of in named.items()]), encoding="utf-8")
    for key, (label, trace, zone, signal, seed) in named.items():
        inputs = {"choice": {"label": label, "policy": "fifo"}, "trace": {"label": trace}, "zone": zone}
        cell = {"inputs": {**inputs, "signal": signal, "seed": seed}, "sizes": []}
        cell["summary"] = dict.fromkeys(FIGURES, 2.0) | {"carbon_kg": {"a": 1.0, "b": 2.0}[label]}
        if key != "k2":
            (folder / "cells" / f"{key}.json").write_text(json.dumps(cell), encoding="utf-8")


def test_a_policy_that_has_not_run_everywhere_is_not_whole(tmp_path: Path) -> None:
    half_run(tmp_path / "half")

    cells = whole(load(tmp_path / "half")[0])

    found = [(cell["inputs"]["choice"]["label"], cell["inputs"]["signal"]) for cell in cells]
    assert found == [("a", "lifecycle"), ("b", "direct"), ("b", "direct")]


def test_a_policy_that_has_not_run_everywhere_says_how_often_it_has(tmp_path: Path) -> None:
    half_run(tmp_path / "half")
    cells = load(tmp_path / "half")[0]
    for cell in cells:
        cell["inputs"]["choice"]["label"] = {"a": "some", "b": BASELINE}[cell["inputs"]["choice"]["label"]]

    direct = [cell for cell in cells if cell["inputs"]["signal"] == "direct"]
    assert "| some (1 of 2 runs) | -50.0 % | - | -50.0 % |" in tables(direct, [])


def test_a_cell_of_an_earlier_run_stands_in_for_one_that_is_missing_and_the_page_says_so(tmp_path: Path) -> None:
    half_run(tmp_path / "half")
    page = tmp_path / "page.md"
    page.write_text("<!-- half means -->\n<!-- end -->\n", encoding="utf-8")
    rows = ["half,a,t,SE,direct,1," + ",".join(["3"] * len(FIGURES)), "half,a,t,GB,direct,1" + ",4" * len(FIGURES)]
    head = ",".join(["experiment", "policy", "trace", "zone", "signal", "seed", *FIGURES])
    beside = tmp_path / "page-cells.csv.gz"
    beside.write_bytes(gzip.compress("\n".join([head, *rows]).encode()))

    fill_page(page, tmp_path)

    assert "Of an earlier run, and not among completion times by size: a in SE." in page.read_text(encoding="utf-8")
    found = [line.split(",") for line in gzip.decompress(beside.read_bytes()).decode().splitlines()[1:]]
    assert [(row[1], row[3], row[4], row[6]) for row in found] == [
        ("a", "GB", "direct", "2"),
        ("a", "GB", "lifecycle", "2"),
        ("a", "SE", "direct", "3"),
        ("b", "GB", "direct", "2"),
        ("b", "SE", "direct", "2"),
    ]


@pytest.mark.parametrize("policy", sorted(GRID_BLIND & set(POLICIES)))
def test_a_policy_blind_to_the_grid_is_simulated_once_for_all_grids(file: Path, policy: str) -> None:
    text = FILE.replace('zones = ["GB"]', 'zones = ["GB", "SE"]\nsignals = ["direct", "lifecycle"]')
    file.write_text(text.replace('policy = "las"', f'policy = "{policy}"'), encoding="utf-8")
    cells = [cell for cell in load_experiment(file).cells() if cell.choice.policy == policy]
    assert [len(group) for group in runner.together({cell.key(): cell for cell in cells})] == [4]

    for cell, shared in zip(cells, run_cells(cells), strict=True):
        own = run_cell(cell)
        assert shared["inputs"] == own["inputs"]
        assert shared["sizes"] == own["sizes"]
        assert shared["series"]["power_w"] == own["series"]["power_w"]
        assert shared["series"]["carbon_gco2"] == pytest.approx(own["series"]["carbon_gco2"], rel=2e-3, abs=0.1)
        for figure in ("carbon_kg", "idle_carbon_kg", "energy_kwh", "avg_jct_s"):
            assert shared["summary"][figure] == pytest.approx(own["summary"][figure], rel=2e-3)


def test_a_policy_may_be_told_less_than_the_truth(file: Path) -> None:
    file.write_text(FILE.replace("params = { mu", 'forecast = "persistence"\nparams = { mu'), encoding="utf-8")
    told = load_experiment(file).cells()[1]

    assert run_cell(told)["inputs"]["choice"]["forecast"] == "persistence"
    assert grid_of(told.trace, told.zone, told.signal, told.forecast).forecast is ForecastKind.PERSISTENCE
    file.write_text(FILE.replace("params = { mu", 'forecast = "no/{zone}.csv"\nparams = { mu'), encoding="utf-8")
    with pytest.raises(DomainError, match=r"no/GB\.csv cannot be read"):
        load_experiment(file).cells()[1].key()


def test_a_parameter_tried_at_several_values_is_drawn_beside_its_default() -> None:
    def cell(label: str, params: dict[str, float], carbon: float) -> dict[str, Any]:
        choice = {"label": label, "policy": "green", "params": params, "options": {}}
        inputs = {"choice": choice, "trace": {"label": "t"}, "zone": "GB", "signal": "direct", "seed": 1}
        return {"inputs": inputs, "summary": {"carbon_kg": carbon}}

    cells = [
        cell("g", {}, 1.0),
        cell("b", {"mu": 3.0}, 1.0),
        cell("c", {"mu": 1.0}, 1.0),
        cell("d", {"theta": 0.6}, 1.0),
    ]
    cells.append(cell("e", {"mu": 5.0, "theta": 0.1}, 1.0))
    found = sensitivities(cells, defaults_of(cells))

    assert [(each.name, each.labels) for each in found] == [("mu", {1.0: "c", 2.0: "g", 3.0: "b"})]


def test_means_over_seeds_say_how_far_apart_those_are() -> None:
    def cell(label: str, seed: int, zone: str, carbon: float) -> dict[str, Any]:
        inputs = {"choice": {"label": label}, "trace": {"label": "t"}, "zone": zone, "signal": "direct", "seed": seed}
        amounts = {
            "energy_kwh": 10.0,
            "idle_energy_kwh": 1.0,
            "idle_carbon_kg": 0.1,
            "avg_jct_s": 5.0 + seed if label == "x" else 10.0,
            "p99_jct_s": 1.0,
        }
        return {"inputs": inputs, "summary": {**amounts, "carbon_kg": carbon, "peak_power_w": 1.0}}

    cells = [cell("base", seed, zone, 10.0) for seed in (1, 2) for zone in ("GB", "SE")]
    cells += [
        cell("x", seed, zone, carbon)
        for seed, zone, carbon in ((1, "GB", 8), (1, "SE", 9), (2, "GB", 9), (2, "SE", 10))
    ]
    row = next(row for row in compare(cells, "base", by_signal) if row.label == "x")

    assert row.carbon == pytest.approx(0.9)
    assert row.between_seeds == row.deviations["carbon"] == pytest.approx(np.std([0.85, 0.95], ddof=1))
    assert row.deviations["avg_jct"] == pytest.approx(np.std([0.6, 0.7], ddof=1))
    assert changes(row)[:3] == ["-10.0 % ± 7.1", "0.0 % ± 0.0", "-35.0 % ± 7.1"]
    alone = next(row for row in compare(cells[:2] + cells[4:6], "base", by_signal) if row.label == "x")
    assert changes(alone)[:3] == ["-15.0 %", "0.0 %", "-40.0 %"], "one seed has no deviation"


def test_one_setting_on_several_days_is_one_row() -> None:
    def cell(label: str, trace: str, carbon: float) -> dict[str, Any]:
        inputs = {"choice": {"label": label}, "trace": {"label": trace}, "zone": "GB", "signal": "direct", "seed": 1}
        summary = dict.fromkeys((*RATIOS.values(), "idle_energy_kwh", "idle_carbon_kg"), 1.0)
        return {"inputs": inputs, "summary": {**summary, "carbon_kg": carbon}}

    traces = ("10 W, August 8", "10 W, August 22", "5 W, August 8")
    cells = [cell(BASELINE, trace, 10.0) for trace in traces]
    cells += [cell("x", trace, carbon) for trace, carbon in zip(traces, (8.0, 9.0, 11.0), strict=True)]

    lines = tables(cells, [], "settings").splitlines()

    assert [line.split(" | ")[:3] for line in lines if "| x |" in line] == [
        ["| 5 W", "x", "+10.0 %"],
        ["| 10 W", "x", "-15.0 %"],
    ]


def test_where_traces_are_settings_completion_times_by_size_are_those_of_each() -> None:
    def cell(policy: str, trace: str, tails: dict[str, float]) -> dict[str, Any]:
        label = BASELINE if policy == "las" else policy
        inputs = {"choice": {"label": label, "policy": policy}, "trace": {"label": trace}, "zone": "GB"}
        of = [{"size": size, "jobs": 2, "avg_jct_s": tail / 2, "p99_jct_s": tail} for size, tail in tails.items()]
        summary = dict.fromkeys((*RATIOS.values(), "idle_energy_kwh", "idle_carbon_kg"), 1.0)
        return {"inputs": {**inputs, "signal": "direct", "seed": 1}, "summary": summary, "sizes": of}

    short, long = {"short": 10.0, "long": 100.0}, {"short": 10.0}
    cells = [cell("las", "10 Gb/s", short), cell("las", "1 Gb/s", long)]
    cells += [cell("joint", "10 Gb/s", {"short": 5.0, "long": 150.0}), cell("joint", "1 Gb/s", {"short": 20.0})]
    cells += [cell("fifo", "10 Gb/s", short), cell("fifo", "1 Gb/s", long)]

    _, tails = tables(cells, [], "traces").split("99th percentile of completion time by size of job")

    assert [line for line in tails.splitlines() if line.startswith("| ")] == [
        "| setting | policy | short | long |",
        "| 1 Gb/s | joint | +100.0 % | - |",
        "| 10 Gb/s | joint | -50.0 % | +50.0 % |",
    ]
    kept = [{**each, "sizes": []} for each in cells]
    assert "by size" not in tables(kept, [], "traces"), "figures kept beside a page have no sizes"


@pytest.mark.parametrize(("low", "top", "least", "most"), [(0.0, 1.04, 4, 8), (0.0, 203.0, 4, 8), (-0.21, 0.21, 4, 10)])
def test_axes_have_round_values(low: float, top: float, least: int, most: int) -> None:
    found = ticks(low, top)

    assert least <= len(found) <= most
    assert all(low - 1e-9 <= value <= top + 1e-9 for value in found)
    assert all(float(f"{value:.2g}") == pytest.approx(value) for value in found)
