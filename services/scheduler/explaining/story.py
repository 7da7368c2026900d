"""A job's events as dated sentences."""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from services.contracts.explanations import StoryLine
from services.core.domain.counted import counted
from services.kit.text import duration
from services.scheduler.ingest.gangs import EndReason
from services.scheduler.reasons import SENTENCES
from services.scheduler.repository.explanations import EventRow

PLANNED = {reason.value: words for reason, words in SENTENCES.items()}
ENDINGS: dict[str, str] = {
    EndReason.FINISHED: "All its processes exited with status 0.",
    EndReason.FAILED: "One of its processes failed.",
    EndReason.OUT_OF_MEMORY: "It was killed because it used more memory than its limit.",
    EndReason.PORT_TAKEN: "It failed while another process listened on its port.",
    EndReason.CANCELLED: "Its owner cancelled it.",
    EndReason.HELD: "Its owner put it on hold.",
    EndReason.PREEMPTED: "It was stopped with its grace period, and continues from its checkpoint.",
    EndReason.NODE_LOST: "A node it ran on was lost; it continues from its checkpoint.",
    EndReason.START_FAILED: "Its processes did not start.",
    EndReason.TIME_LIMIT: "It reached its time limit.",
    EndReason.GPU_LOST: "A GPU it ran on was taken out of service; it continues from its checkpoint.",
    EndReason.NODE_DRAINED: "A node it ran on was drained and went away; it continues from its checkpoint.",
    EndReason.NODE_NOT_WOKEN: "A node that it was to run on did not wake.",
    EndReason.INSTALLATION_STOPPED: "The installation was stopped; it continues from its checkpoint.",
    EndReason.NODE_LOSSES: "Nodes or GPUs were lost under it again and again, while most others stayed up.",
    EndReason.SLICE_LOST: "Its node no longer had its MIG slice; it continues from its checkpoint.",
}
OTHERS = {
    "budget_exceeded": "The budget of its project or tenant is used up.",
    "budget_available": "The budget of its project or tenant has room again.",
}


def sentence(code: str | None) -> str:
    """Return what a reason code means; an unknown one, such as one of another release, as plain words."""
    if not code:
        return ""
    return PLANNED.get(code) or ENDINGS.get(code) or OTHERS.get(code) or f"{code.replace('_', ' ').capitalize()}."


class Narrator:
    """Narrates events in order; it remembers since when the job waited, was on hold or held GPUs."""

    def __init__(self, submitted_at: datetime) -> None:
        self._submitted_at = submitted_at
        self._since = submitted_at
        self._held_at: datetime | None = None
        self._told: dict[str, Callable[[EventRow], str]] = {
            "submitted": self._submitted,
            "starting": self._starting,
            "running": lambda event: f"Its processes run, {self._after(event)} later.",
            "preempting": lambda event: f"Asked to stop after {self._after(event)}. {_told(event)}",
            "queued": self._queued,
            "in_cell": lambda event: f"Placed in cell {event.data.get('cell')}. {_detail(event)}",
            "at_home": lambda event: f"Placed here. {_detail(event)}",
            "held": self._held,
            "hold_requested": lambda _: "A hold was asked for.",
            "hold_withdrawn": lambda _: "The hold was withdrawn.",
            "cancel_requested": lambda _: "Its cancellation was asked for.",
            "set": self._set,
            "profiling": lambda _: "Its speed and power are measured at several power limits or clocks.",
            "succeeded": lambda event: f"Succeeded, {self._in_all(event)} after its submission.",
            "failed": self._failed,
            "cancelled": lambda event: f"Cancelled, {self._in_all(event)} after its submission. {_detail(event)}",
        }

    def line(self, event: EventRow) -> StoryLine:
        """Return an event as a sentence; one whose type is unknown here, by its type and its reason."""
        kind = event.type.removeprefix("job.")
        code = _code(event)
        tell = self._told.get(kind)
        text = tell(event) if tell else f"{kind.replace('_', ' ').replace('.', ' ').capitalize()}. {sentence(code)}"
        if kind in ("starting", "queued", "held"):
            self._since = event.at
        return StoryLine(at=event.at, text=text.strip(), reason=code)

    def _after(self, event: EventRow) -> str:
        return duration((event.at - self._since).total_seconds())

    def _in_all(self, event: EventRow) -> str:
        return duration((event.at - self._submitted_at).total_seconds())

    def _starting(self, event: EventRow) -> str:
        gpus = event.data.get("gpus")
        got = f"Got {counted(gpus, 'GPU')}" if isinstance(gpus, int) else "Got its GPUs"
        return f"{got} after waiting {self._after(event)}. {sentence(_code(event))}"

    def _submitted(self, event: EventRow) -> str:
        if event.data.get("state") != "held":
            return "Submitted."
        self._held_at = event.at
        return "Submitted, on hold."

    def _held(self, event: EventRow) -> str:
        self._held_at = event.at
        return f"On hold. {_told(event)}"

    def _queued(self, event: EventRow) -> str:
        since, self._held_at = self._held_at, None
        if since is None:
            return f"Waits again. {_told(event)}"
        held = duration((event.at - since).total_seconds())
        return f"Released after {held} on hold; it waits for GPUs. {sentence(_code(event))}"

    def _set(self, event: EventRow) -> str:
        limit_w, clock_mhz = event.data.get("power_limit_w"), event.data.get("clock_mhz")
        values = [f"power limit {limit_w:g} W"] if limit_w is not None else []
        values += [f"clock {clock_mhz} MHz"] if clock_mhz is not None else []
        words = " and ".join(values) or "default power limit and clock"
        return f"Set to {words}. {sentence(_code(event))}"

    def _failed(self, event: EventRow) -> str:
        status = event.data.get("exit_code")
        how = "Failed" if status is None else f"Failed with exit status {status}"
        return f"{how}, {self._in_all(event)} after its submission. {_told(event)}"


def story_of(events: Sequence[EventRow], submitted_at: datetime) -> tuple[list[StoryLine], int]:
    """Return a job's events as sentences, oldest first, and how many of a long story are left out."""
    narrator = Narrator(submitted_at)
    lines = [narrator.line(event) for event in events]
    return lines, events[-1].of - len(events) if events else 0


def _detail(event: EventRow) -> str:
    detail: Any = event.data.get("detail")
    return detail if isinstance(detail, str) else ""


def _told(event: EventRow) -> str:
    return _detail(event) or sentence(_code(event))


def _code(event: EventRow) -> str | None:
    reason: Any = event.data.get("reason")
    return reason if isinstance(reason, str) else None
