"""What ``wattshift explain`` says."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from rich.text import Text

from services.cli.jobs import explain as command
from services.cli.jobs.explain import array_lines, explanation_lines
from services.contracts.explanations import Explanation
from tests.cli.conftest import Run

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
JOB = "job_01m7x7bdh29b0c6vxjkxnx11mt"
CET = timezone(timedelta(hours=1), "CET")

_COMMON: dict[str, Any] = {"job_id": JOB, "name": "train", "as_of": "2026-03-01T12:00:00Z", "policy": "green"}
_COMMON |= {"submitted_at": "2026-03-01T11:00:00Z", "story": [{"at": "2026-03-01T11:00:00Z", "text": "Submitted."}]}
_EMISSION = {"zone": "DE", "signal": "average_direct", "carbon_gco2_per_hour": 240.0}
_WAITING: dict[str, Any] = {
    "since": "2026-03-01T11:00:00Z",
    "starts_now": False,
    "place": {
        **{"position": 4, "waiting_jobs": 6, "ahead": 3, "ahead_gpus": 9, "hidden_ahead": 1},
        "first": [{"job_id": JOB, "name": "first", "gpus": 4}],
    },
    "gpus": {"min": 2, "max": 8, "model": "A100", "suitable": 8, "free": 1, "drained": 4},
    "length": {"seconds": 7_200, "low_s": 3_600, "high_s": 10_800, "source": "prediction"},
    "now": _EMISSION | {"starts_at": "2026-03-01T12:00:00Z", "intensity_gco2_per_kwh": 400, "carbon_gco2": 480.0},
    "greenest": _EMISSION | {"starts_at": "2026-03-02T03:00:00Z", "intensity_gco2_per_kwh": 50, "carbon_gco2": 60.0},
    "forecast": {
        **{"zone": "DE", "signal": "average_direct", "stale": True},
        **{"made_at": "2026-03-01T11:30:00Z", "known_until": "2026-03-03T12:00:00Z"},
    },
}
_UNDER: dict[str, Any] = {
    "status": "ready",
    "as_of": "2026-03-01T11:59:00Z",
    "items": [
        {"policy": "fifo", "starts_at": "2026-03-01T13:00:00Z", "ends_at": "2026-03-01T15:00:00Z", "waits_s": 3_660}
        | {"carbon_gco2": 470.0},
        {"policy": "sjf", "starts_at": "2026-03-01T13:00:00Z", "ends_at": "2026-03-01T15:00:00Z", "waits_s": 3_660}
        | {"carbon_gco2": 470.0},
        {"policy": "green", "in_force": True},
        {"policy": "pollux", "failure": "took too long"},
    ],
    "assumptions": ["No further job comes."],
}


def lines(**parts: Any) -> list[str]:
    found = Explanation.model_validate({**_COMMON, **parts}).model_dump(mode="json")
    return explanation_lines(found, NOW, CET)


def test_a_waiting_job_has_a_page_of_short_lines() -> None:
    shown = lines(
        state="queued", summary="It is number 4 of the 6 jobs that wait.", waiting=_WAITING, under_policies=_UNDER
    )

    assert shown == [
        f"[bold]train[/] ({JOB}) is [blue]queued[/].",
        "  It is number 4 of the 6 jobs that wait.",
        "  asks for: 2 to 8 GPUs of model A100; 1 of 8 suitable GPUs are free, 4 more on drained nodes",
        "  ahead of it: 3 jobs that ask for 9 GPUs: first (4), 1 more, 1 of others",
        "  may start: unknown",
        "  length: 2 h, 8 of 10 between 1 h and 3 h",
        "  if it began now: 480.00 g CO2 (240.00 g to 720.00 g) at 400 gCO2/kWh in DE",
        "  in the greenest window: 60.00 g CO2 (30.00 g to 90.00 g) at 50 gCO2/kWh in DE, "
        "from Mon 02 Mar 04:00 CET (in 15 h)",
        "  forecast: DE, average_direct, made 30 min ago, known until Tue 03 Mar 13:00 CET (in 2 d), "
        "stale: its newest value is older than it should be",
        "  what happened:",
        "    01 Mar 12:00:00 CET  Submitted.",
        "  under each policy, if no further job came (queue as of 12:59 CET (1 min ago)):",
        "    starts               waits      ends                 CO2       policy",
        "    01 Mar 14:00:00 CET  1 h 1 min  01 Mar 16:00:00 CET  470.00 g  fifo, sjf",
        "    later                -          -                    -         green (in force)",
        "    took too long                                                  pollux",
        "    [dim]No further job comes.[/]",
    ]


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ({"starts_now": True}, "  may start: at the next round, within seconds"),
        (
            {"expected_start_at": "2026-03-01T14:00:00Z", "expected_start_from": "policy"},
            "  may start: 15:00 CET (in 2 h), planned by the policy, if GPUs are free by then",
        ),
        (
            {"expected_start_at": "2026-03-01T14:00:00Z", "expected_start_from": "simulation"},
            "  may start: 15:00 CET (in 2 h), by a simulation of the queue if nothing unforeseen happens",
        ),
    ],
)
def test_how_sure_a_start_is(parts: dict[str, Any], line: str) -> None:
    assert line in lines(state="queued", summary="It waits.", waiting=_WAITING | parts)


def test_a_start_that_rests_on_lengths_nobody_knows_says_so() -> None:
    said = "The lengths of 73 of 74 jobs are unknown: one GPU hour each is assumed."
    waiting = _WAITING | {"expected_start_at": "2026-03-01T14:00:00Z", "expected_start_from": "simulation"}
    shown = lines(state="queued", summary="It waits.", waiting=waiting, under_policies=_UNDER | {"assumptions": [said]})
    assert (
        f"  may start: 15:00 CET (in 2 h), by a simulation of the queue if nothing unforeseen happens. {said}" in shown
    )


def test_an_emission_of_unknown_length_is_one_per_hour() -> None:
    unknown = {"length": {}, "now": _WAITING["now"] | {"carbon_gco2": None}, "greenest": None}

    shown = lines(state="queued", summary="It waits.", waiting=_WAITING | unknown)

    assert "  if it began now: 240.00 g CO2 per hour at 400 gCO2/kWh in DE" in shown
    assert "  in the greenest window: unknown" in shown


def test_a_greenest_window_that_is_now_is_said_once() -> None:
    shown = lines(state="queued", summary="It waits.", waiting=_WAITING | {"greenest": _WAITING["now"]})

    assert "  in the greenest window: now is the greenest time that it has" in shown


def test_a_running_job_says_what_the_next_round_does() -> None:
    following = {
        "action": "stop",
        "at": "2026-03-01T12:30:00Z",
        "reason": "scale_out",
        "detail": "It grows.",
        "gpus": 4,
    }
    running = {"since": "2026-03-01T11:10:00Z", "gpus": 2, "placement": [{"node_id": "n1", "devices": [0, 1]}]}
    running |= {"why": ["2 GPUs."], "expected_end_at": None, "next": following}

    shown = lines(state="running", summary="It runs.", running=running)

    assert "  since: 12:10 CET (50 min ago), on n1[0, 1]" in shown
    assert "  ends: unknown" in shown
    assert "  next round, 13:30 CET (in 30 min): it would be stopped and restarted on 4 GPUs. It grows." in shown


@pytest.mark.parametrize("kind", ["waiting", "running", "ended"])
def test_the_answer_has_five_lines_and_is_the_beginning_of_the_page(kind: str) -> None:
    running = {"since": "2026-03-01T11:10:00Z", "gpus": 2, "placement": [{"node_id": "n1", "devices": [0, 1]}]}
    step = {"action": "keep", "at": "2026-03-01T12:30:00Z", "detail": "It is expected to have ended by then."}
    running |= {"why": ["2 GPUs."], "expected_end_at": "2026-03-01T12:10:00Z", "next": step}
    ended = {"exit_code": 1, "waited_s": 600, "held_gpus_s": 3_000, "starts": 2, "preemptions": 1, "restarts": 0}
    parts: dict[str, Any] = {"waiting": _WAITING, "running": running, "ended": ended}
    footprint = {"energy_j": 3.6e6, "gpu_energy_j": 3e6, "carbon_gco2": 90.0, "gpu_s": 6_000}
    document = {**_COMMON, "state": "queued", "summary": "So it is.", kind: parts[kind], "footprint": footprint}
    document |= {"under_policies": _UNDER}
    found = Explanation.model_validate(document).model_dump(mode="json")

    brief, whole = explanation_lines(found, NOW, CET, everything=False), explanation_lines(found, NOW, CET)

    assert len(brief) == 5
    assert [line for line in whole if line in brief] == brief
    assert {"waiting": "may start", "running": "ends", "ended": "exit status: 1"}[kind] in "".join(brief)


def test_the_next_round_does_not_repeat_the_answer() -> None:
    step = {"action": "stop", "at": None, "detail": "Jobs ahead of it need its GPUs."}
    running = {"since": "2026-03-01T11:10:00Z", "gpus": 2, "placement": [], "why": [], "next": step}

    shown = lines(state="running", summary="It runs. Jobs ahead of it need its GPUs.", running=running)

    assert "  next round: it would be stopped." in shown


def test_an_ended_job_is_set_beside_the_mean_intensity() -> None:
    ended = {"exit_code": 0, "waited_s": 600, "held_gpus_s": 3_000, "starts": 2, "preemptions": 1, "restarts": 0}
    footprint = {"energy_j": 3.6e6, "gpu_energy_j": 3e6, "carbon_gco2": 90.0, "gpu_s": 6_000}

    shown = lines(state="succeeded", summary="Done.", ended=ended, footprint=footprint, baseline_gco2=120.0)

    assert "  exit status: 0" in shown
    assert "  waited 10 min; held GPUs for 50 min" in shown
    assert "  started 2 times; preempted: 1; restarted after failures: 0" in shown
    assert "  used: 1.000 kWh, 90.00 g CO2 with PUE, 1 h 40 min of GPU time" in shown
    assert "  same work at mean intensity: 120.00 g CO2; the job emitted 75% of that" in shown


def test_what_users_wrote_is_no_markup() -> None:
    assert "  It says \\[red]stop." in lines(state="held", summary="It says [red]stop.")


def test_wait_asks_until_the_policies_part_is_there(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pending = {**_UNDER, "status": "pending", "items": []}
    parts = [
        Explanation.model_validate({**_COMMON, "state": "queued", "summary": "It waits.", "under_policies": under})
        for under in (pending, pending, _UNDER, _UNDER)
    ]
    answers = [each.model_dump(mode="json") for each in parts]
    asked: list[dict[str, str]] = []

    class Stub:
        def get(self, path: str, **query: str) -> Any:
            assert path == f"/v1/jobs/{JOB}/explain"
            asked.append(query)
            return answers.pop(0)

    monkeypatch.setattr(command, "Gateway", Stub)
    monkeypatch.setattr(command, "POLL_S", 0.0)

    command.explain(JOB, wait=True, as_json=False)

    assert asked == [{}, {}, {}, {"one_change": "true"}], "the queue is replayed once, not with every poll"
    assert "pollux" in capsys.readouterr().out


_ARRAY: dict[str, Any] = {
    "id": "array_01m7x7bdh29b0c6vxjkxnx1000",
    "name": "sweep",
    "state": "running",
    "count": 6,
    "max_running": 2,
    "tasks": {"queued": 3, "running": 2, "succeeded": 1, "failed": 0},
    "waiting": {"array_limit": 2, "dependency": 1},
    "footprint": {"energy_j": 3.6e6, "carbon_gco2": 400.0, "gpu_s": 7_200.0},
}


@pytest.mark.parametrize(
    ("state", "said"),
    [("held", "is held"), ("succeeded", "has succeeded"), ("failed", "has failed"), ("cancelled", "was cancelled")],
)
def test_a_state_ends_a_sentence(state: str, said: str) -> None:
    first = Text.from_markup(lines(state=state, summary="So.")[0])
    assert first.plain == f"train ({JOB}) {said}."


def test_numbers_stand_beside_the_ids() -> None:
    task: Any = Explanation.model_validate(_COMMON | {"state": "queued", "summary": "It waits.", "number": 12})
    task = task.model_dump(mode="json")
    array = {"id": "array_1", "number": 12, "name": "sweep", "state": "queued", "count": 2, "max_running": None}
    array |= {"waiting": {}, "tasks": {"queued": 2}, "footprint": {"energy_j": 0}}

    assert explanation_lines(task, NOW, CET)[0] == f"[bold]train[/] (#12, {JOB}) is [blue]queued[/]."
    lines = array_lines(array, task | {"array_index": 3}, NOW, CET)
    assert lines[0] == "[bold]sweep[/] (#12, array_1) is [blue]queued[/]."
    assert lines[3] == f"    [bold]train[/] (#12.3, {JOB}) is [blue]queued[/]."


def test_an_array_is_explained_by_its_counts_and_its_next_task() -> None:
    found = Explanation.model_validate(
        {**_COMMON, "name": "sweep.3", "state": "queued", "summary": "At most 2 tasks of its array may run at once."}
    ).model_dump(mode="json")

    shown = array_lines(_ARRAY, found, NOW, CET)

    assert shown[:8] == [
        "[bold]sweep[/] (array_01m7x7bdh29b0c6vxjkxnx1000) is [green]running[/].",
        "  tasks: 6, of which 3 queued, 2 running, 1 succeeded",
        "  limit: at most 2 run at once",
        "  waiting for: 2 array limit, 1 dependency",
        "  used: 1.000 kWh, 400.00 g CO2 with PUE, 2 h of GPU time",
        "  the next task:",
        f"    [bold]sweep.3[/] ({JOB}) is [blue]queued[/].",
        "      At most 2 tasks of its array may run at once.",
    ]


def test_an_array_of_which_nothing_waits_has_no_next_task(run: Run) -> None:
    run("submit", "--array", "0-2", "--name", "over", "--", "true")
    run("cancel", "over")

    shown, document = run("explain", "over"), json.loads(run("explain", "over", "--json"))

    assert shown.splitlines()[1:] == ["  tasks: 3, of which 3 cancelled"]
    assert (document["array"]["name"], document["next_task"]) == ("over", None)


def test_levers_are_told_in_grams_and_minutes() -> None:
    levers = [
        {"lever": "width", "carbon_saved_gco2": -12.0, "minutes_added": -45.0, "detail": "Against a gang of 1."},
        {"lever": "hours", "carbon_saved_gco2": 120.0, "minutes_added": 90.0, "detail": "Against it at once."},
        {"lever": "order", "detail": "Not known."},
        {"lever": "power_limit", "carbon_saved_gco2": 0.0, "minutes_added": 0.0, "detail": "It has the default."},
    ]
    said = [Text.from_markup(line).plain for line in lines(state="running", summary="It runs.", levers=levers)]
    at = said.index("  levers of the policy, each against the job without it:")

    assert said[at + 1 : at + 5] == [
        "    width: 12.00 g CO2 more, ends 45 min earlier. Against a gang of 1.",
        "    hours: 120.00 g CO2 saved, ends 1 h 30 min later. Against it at once.",
        "    order: CO2 unknown, time unknown. Not known.",
        "    no effect: power limit",
    ]
