"""``wattshift lab serving``: what it prints, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.commands import app
from services.cli.commands import CliError

NEEDED = (
    *("energy_wh", "carbon_kg", "violation_rate", "e2e_mean_s", "e2e_p50_s", "e2e_p90_s", "e2e_p99_s"),
    *("ttft_mean_ms", "tbt_mean_ms", "jain", "requests", "wall_s"),
)
EXAMPLE = Path(__file__).parents[3] / "examples" / "pools" / "two-zones.json"


@pytest.fixture
def requests(tmp_path: Path) -> str:
    rows = [f"{at},{100 + 10 * (at % 30)},{20 + 7 * (at % 90)}" for at in range(300)]
    path = tmp_path / "requests.csv"
    path.write_text("\n".join(["arrived_at,input_tokens,output_tokens", *rows]) + "\n")
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what the command prints."""
    app(["serving", *arguments], standalone_mode=False)
    return capsys.readouterr().out


def test_the_figures_as_json(capsys: pytest.CaptureFixture[str], requests: str) -> None:
    arguments = ["--policy", "llf", "--frequency", "miad", "--qps-scale", "2", "--json"]

    found = json.loads(run(capsys, "--requests", requests, *arguments))
    again = json.loads(run(capsys, "--requests", requests, *arguments))

    assert all(found[name] is not None for name in NEEDED)
    assert found["requests"] == 600
    assert {name: again[name] for name in NEEDED if name != "wall_s"} == {
        name: found[name] for name in NEEDED if name != "wall_s"
    }


def test_people_get_a_table_and_the_plans(capsys: pytest.CaptureFixture[str], requests: str) -> None:
    shown = run(capsys, "--requests", requests, "--policy", "fcfs", "--frequency", "fixed", "--objective", "energy")

    assert "Violations" in shown
    assert "partition" in shown


def test_a_pool_and_carbon_of_ones_own(capsys: pytest.CaptureFixture[str], requests: str, tmp_path: Path) -> None:
    document = json.loads(EXAMPLE.read_text())
    for place in document["places"]:
        place["gpus"] = {"A100-SXM4-40GB": 4}
    for part in document["partitions"]:
        for each in part["classes"]:
            each["profiles"][0] |= {"latency_s": 5, "ttft_ms": 100, "tbt_ms": 30}
    pool, carbon = tmp_path / "pool.json", tmp_path / "carbon.csv"
    pool.write_text(json.dumps(document))
    carbon.write_text("time,US-CAL-CISO,DE\n2024-01-01T00:00Z,300,100\n2024-01-01T01:00Z,300,100\n")

    found = json.loads(run(capsys, "--requests", requests, "--pools", str(pool), "--carbon", str(carbon), "--json"))

    assert {each["place"] for each in found["plans"][0]["instances"]} == {"germany"}
    assert found["carbon_kg"] == pytest.approx(found["energy_wh"] * 1e-3 * 0.1)


def test_memory_and_prefixes_are_shown_where_they_matter(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [
        {"timestamp": 100 * at, "input_length": 2_100, "output_length": 300, "hash_ids": [0, 1, 2, 3, 4 + at]}
        for at in range(200)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    options = ["--kv-kib-per-token", "320", "--prefill", "length", "--prefix-cache-tokens", "50000"]

    found = json.loads(run(capsys, "--requests", str(trace), *options, "--json"))
    plain = json.loads(run(capsys, "--requests", str(trace), "--json"))
    shown = run(capsys, "--requests", str(trace), *options)

    assert found["prefix_hit_share"] > 0.9
    assert found["waited_for_memory"] > 0
    assert (plain["prefix_hit_share"], plain["waited_for_memory"]) == (None, 0)
    assert "requests waited for memory" in shown
    assert "were in a prefix cache" in shown


@pytest.mark.parametrize(
    ("arguments", "complaint", "code"),
    [
        (["--requests", "nowhere.csv"], "no trace", 3),
        (["--requests", str(EXAMPLE)], "is no trace of requests", 2),
        (["--pools", str(EXAMPLE)], "no gpus for place california", 2),
        (["--pools", __file__], "JSON", 2),
        (["--carbon", "nowhere.csv"], "there is no file", 3),
        (["--carbon", __file__], "column", 2),
        (["--carbon-hour", "0.01"], "cannot begin", 2),
        (["--qps-scale", "0"], "more than 0", 2),
        (["--qps-scale", "nan"], "more than 0", 2),
        (["--partition", "z"], "no partition 'z'", 2),
        (["--objective", "cost"], "price_per_kwh", 2),
        (["--miad-factor", "1"], "factor above 1", 2),
        (["--length-mae", "-1"], "length", 2),
        (["--kv-kib-per-token", "-1"], "not negative", 2),
        (["--kv-kib-per-token", "320", "--weights-gib", "150"], "mode A100_TP2: 150 GiB of weights leave no room", 2),
        (["--prefix-cache-tokens", "1000"], "by length only", 2),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(requests: str, arguments: list[str], complaint: str, code: int) -> None:
    with pytest.raises(CliError, match=complaint) as caught:
        app(["serving", "--requests", requests, *arguments], standalone_mode=False)

    assert caught.value.exit_code == code
    assert "\n" not in str(caught.value)
