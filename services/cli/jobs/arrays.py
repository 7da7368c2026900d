"""How arrays of jobs are listed and described."""

from typing import Any

from services.cli import output
from services.cli.jobs.names import ENDED, number_of
from services.core.domain.jobs import JobState

HOLDING = [state.value for state in JobState if state.holds_gpus]


def newest_first(jobs: list[Any], arrays: list[Any], limit: int) -> list[Any]:
    """Return jobs and arrays in one list, newest first: their ids sort by the time of submission."""
    return sorted([*jobs, *arrays], key=lambda each: each["id"].partition("_")[2], reverse=True)[:limit]


def is_array(job: dict[str, Any]) -> bool:
    """Return whether the API's answer is an array."""
    return "max_running" in job


def counts(array: dict[str, Any]) -> str:
    """Return how many tasks are in each state, leaving out states without tasks."""
    return ", ".join(f"{count} {state}" for state, count in array["tasks"].items() if count)


def waiting_words(array: dict[str, Any]) -> str:
    """Return the reasons why tasks wait, with the number of tasks for each."""
    return ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in array["waiting"].items())


def done(array: dict[str, Any]) -> float:
    """Return the share of tasks that have ended."""
    return sum(array["tasks"][state] for state in ENDED) / array["count"]


def what_follows(action: str, array: dict[str, Any]) -> str:
    """Return, in a sentence, the states of an array's tasks after it was cancelled, held or released."""
    running = sum(array["tasks"][state] for state in HOLDING)
    stops = ""
    if running and action != "release":
        grace_s = array["spec"].get("grace_s", 120)
        stops = f" Those that have GPUs are being stopped, with {grace_s:g} s to save their work."
    return f"Of its {array['count']} tasks: {counts(array)}.{stops}"


def rows(array: dict[str, Any]) -> dict[str, str]:
    """Return what `wattshift job` shows for an array, by label."""
    footprint, limit = array["footprint"], array["max_running"]
    return {
        "number": number_of(array),
        "array": array["id"],
        "name": array["name"],
        "state": output.state(array["state"]),
        "tasks": f"{array['count']}, from {array['name']}.{array['first']} to {array['name']}.{array['last']}"
        + (f", at most {limit} at once" if limit else ""),
        "of which": counts(array),
        "waiting for": waiting_words(array) or "-",
        "GPUs": str(array["gpus"]),
        "submitted": f"{output.clock(array['submitted_at'], output.SECONDS)} ({output.age(array['submitted_at'])} ago)",
        "ended": output.clock(array.get("ended_at"), output.SECONDS),
        "energy": f"{output.energy(footprint['energy_j'])} ({output.energy(footprint['gpu_energy_j'])} by GPUs)",
        "emissions": f"{output.carbon(footprint['carbon_gco2'])} CO2",
    }
