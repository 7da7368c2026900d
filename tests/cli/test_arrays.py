"""Arrays and dependencies on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.cli.client import Gateway
from services.cli.commands import EXIT_USAGE, CliError
from services.cli.jobs.following import ended_words
from services.cli.jobs.names import job_id
from tests.cli.conftest import Run


def submitted(run: Run, name: str, *words: str) -> str:
    return run("submit", "--name", name, *words, "--", "true").strip()


def test_an_array_is_one_line_and_its_tasks_are_jobs(run: Run, gateway: Gateway) -> None:
    array = submitted(run, "sweep", "--array", "0-9:2%2")
    single = submitted(run, "single-beside")

    listed = [job["id"] for job in json.loads(run("jobs", "--json", "--since", "1h"))]
    tasks = [job["name"] for job in json.loads(run("jobs", "--json", "--array", "sweep"))]

    assert array.startswith("array_")
    assert listed[:2] == [single, array]
    assert tasks == [f"sweep.{index}" for index in (8, 6, 4, 2, 0)]
    assert "5 queued" in run("jobs")
    assert "sweep.0 to sweep.8, at most 2 at once" in run("job", array[:30])
    assert json.loads(run("job", "sweep", "--json"))["count"] == 5
    assert gateway.get(f"/v1/jobs/{job_id(gateway, 'sweep.4')}")["array_id"] == array
    with pytest.raises(CliError, match="'single-beside' is a single job"):
        run("jobs", "--array", "single-beside")


def test_commands_on_an_array_act_on_all_tasks(run: Run) -> None:
    submitted(run, "steered", "--array", "1-3")
    assert "Of its 3 tasks: 3 held." in run("hold", "steered")
    assert "3 queued" in run("release", "steered")
    assert "1 cancelled" not in run("cancel", "steered.2")
    assert "Of its 3 tasks: 3 cancelled." in run("cancel", "steered")


def test_an_array_has_no_output_of_its_own(run: Run) -> None:
    submitted(run, "silent", "--array", "4-5")
    with pytest.raises(CliError, match=r"is an array of 2 jobs; name one of them, such as silent\.4"):
        run("logs", "silent")
    with pytest.raises(CliError, match="not of an array; use --wait"):
        run("submit", "--array", "0-1", "--follow", "--", "true")


def test_waiting_for_an_array_says_whether_every_task_succeeded(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    key = ("--idempotency-key", "waited")
    submitted(run, "waited", "--array", "0-2", *key)
    run("cancel", "waited")
    assert run("submit", "--name", "waited", "--array", "0-2", *key, "--wait", "--", "true", exit_code=1)


def test_how_an_array_ended_is_one_sentence() -> None:
    array = {
        "name": "sweep",
        "state": "failed",
        "count": 3,
        "max_running": None,
        "tasks": {"succeeded": 2, "failed": 1, "cancelled": 0},
        "footprint": {"energy_j": 0, "carbon_gco2": 0},
    }
    assert ended_words(array).startswith("sweep failed: of its 3 tasks 2 succeeded, 1 failed (")


def test_dependencies_are_named_by_name_and_kept_by_id(run: Run, gateway: Gateway) -> None:
    prepare, sweep = submitted(run, "prepare"), submitted(run, "sweep-after", "--array", "0-1", "--after", "ok:prepare")
    then = submitted(run, "evaluate", "--after", "ok:sweep-after", "--after", f"any:{prepare[:-2]}")
    assert gateway.get(f"/v1/arrays/{sweep}")["spec"]["after"]["ok"] == [prepare]
    after = gateway.get(f"/v1/jobs/{then}")["spec"]["after"]
    assert (after["ok"], after["any"]) == ([sweep], [prepare])


def test_a_test_finds_that_a_dependency_does_not_exist(run: Run) -> None:
    with pytest.raises(CliError, match="there is no job 'nobody-here'"):
        run("submit", "--test-only", "--after", "any:nobody-here", "--", "true")


def test_a_file_of_jobs_names_its_own(run: Run, gateway: Gateway, tmp_path: Path) -> None:
    file = tmp_path / "chain.yaml"
    file.write_text(
        "jobs:\n"
        "- {name: first-of-file, command: [make]}\n"
        "- {name: many-of-file, command: [train], array: 0-3%2, after: {ok: first-of-file}}\n"
        "- {name: last-of-file, command: [evaluate], after: {ok: [1], any: 0}}\n"
    )
    first, many, last = run("submit", str(file)).split()
    assert gateway.get(f"/v1/arrays/{many}")["spec"]["after"]["ok"] == [first]
    assert gateway.get(f"/v1/jobs/{last}")["spec"]["after"]["ok"] == [many]


def test_a_script_may_be_an_array(run: Run, gateway: Gateway, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/sh\n#WATTSHIFT --array 0-3%2\nexec train $WATTSHIFT_ARRAY_INDEX\n")
    array = gateway.get(f"/v1/arrays/{run('submit', str(script)).strip()}")
    assert (array["count"], array["max_running"]) == (4, 2)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--array", "5-1"), "--array: .*empty"),
        (("--array", "0-99999"), "--array: .*more than 10,000"),
        (("--after", "prepare"), r"--after: 'prepare' is none of .*; did you mean ok:prepare\?"),
        (("--after", "done:prepare"), "--after: 'done:prepare' is none of ok:JOB, any:JOB and not_ok:JOB$"),
        (("--after", "ok:no such"), "--after: "),
        (("--after", "ok:nobody-at-all"), "/after/ok: there is no job 'nobody-at-all'"),
    ],
)
def test_what_is_wrong_is_one_line_and_submits_nothing(
    run: Run, gateway: Gateway, words: tuple[str, ...], says: str
) -> None:
    before = [gateway.pages(path, 500) for path in ("/v1/jobs", "/v1/arrays")]
    with pytest.raises(CliError, match=says) as refused:
        submitted(run, "wrong", *words)
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code in (EXIT_USAGE, 4)
    assert [gateway.pages(path, 500) for path in ("/v1/jobs", "/v1/arrays")] == before
