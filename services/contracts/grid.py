"""Orders of the grid: less power, from when on, for how long, and where; and how far they may slow a job down."""

import math
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from services.contracts.schema import LEAST, Instant, Message, Name, Page, Real, Text, many, maybe, no_flag, said

LONGEST_S = 31 * 86_400.0
MOST_STEPS = 1_440  #: A day by the minute
NO_LIMIT_W = 1e12  #: A step of so much limits nothing

Title = Annotated[Text, StringConstraints(max_length=200)]


class GridStep(Message):
    """What may be drawn from a moment on: less than the baseline by a share of it, or a limit in watts."""

    offset_s: Real = said("Time since the order's start.", default=0.0, ge=0, le=LONGEST_S)
    cut: Real | None = maybe("Share of the baseline to leave out.", ge=LEAST, le=1)
    to_w: Real | None = maybe("The most that may be drawn, watts.", ge=0, le=NO_LIMIT_W)

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.cut is None) == (self.to_w is None):
            raise ValueError("give either cut or to_w")
        return self

    def limit_w(self, baseline_w: float) -> float:
        """Return what may be drawn, watts; inf where nothing is limited."""
        if self.to_w is not None:
            return self.to_w if self.to_w < NO_LIMIT_W else math.inf
        return baseline_w * (1 - (self.cut or 0.0))


def check_steps(steps: list[GridStep] | None, duration_s: float | None = None) -> None:
    """Check that steps follow one another and begin before the order is over, if that is known; else ``ValueError``."""
    if steps is None:
        return
    if duration_s is not None and steps[-1].offset_s >= duration_s:
        raise ValueError(f"a step begins after {steps[-1].offset_s:g} s, but the order is over after {duration_s:g} s")
    if steps[0].offset_s:
        raise ValueError("the first step begins with the order: its offset_s is 0")
    if any(later.offset_s <= sooner.offset_s for sooner, later in pairwise(steps)):
        raise ValueError("steps come in the order of their offset_s, each later than the one before")


class GridOrderSpec(Message):
    """A new order."""

    name: Title = ""
    zone: Name | None = maybe("The nodes of one grid zone; null: all nodes.")
    start_at: Instant | None = maybe("Null: now.")
    duration_s: Real = Field(ge=LEAST, le=LONGEST_S)
    steps: list[GridStep] = Field(min_length=1, max_length=MOST_STEPS)
    notice_s: Real = said(
        "How long before its start the cluster may prepare; the baseline is what was drawn before that.",
        default=0.0,
        ge=0,
        le=LONGEST_S,
    )

    @model_validator(mode="after")
    def _steps_ascend(self) -> Self:
        check_steps(self.steps, self.duration_s)
        return self


class GridOrderChange(Message):
    """What to change of an order; what is left out stays as it is."""

    start_at: Instant | None = maybe("Only of an order that has not begun.")
    duration_s: Real | None = Field(default=None, ge=LEAST, le=LONGEST_S)
    steps: list[GridStep] | None = Field(default=None, min_length=1, max_length=MOST_STEPS)

    @model_validator(mode="after")
    def _steps_ascend(self) -> Self:
        check_steps(self.steps, self.duration_s)
        if self.start_at is None and self.duration_s is None and self.steps is None:
            raise ValueError("give start_at, duration_s or steps")
        return self


class GridOrderState(StrEnum):
    """How far an order is."""

    ANNOUNCED = "announced"
    IN_FORCE = "in_force"
    ENDED = "ended"
    WITHDRAWN = "withdrawn"


class GridOrder(Message):
    """An order."""

    id: str
    name: str
    source: str = said("Who brought it: `api`, or the name of another door.")
    zone: str | None
    state: GridOrderState
    announced_at: Instant
    start_at: Instant
    end_at: Instant
    notice_s: float
    steps: list[GridStep]
    baseline_w: float | None = said("What its scope drew before it by the ledger, watts; null until it is known.")
    baseline_at: Instant | None = said("The baseline is the mean of the ten minutes before this time.")
    limit_w: float | None = said("What may be drawn now, watts; null: nothing limits it now.")
    drawn_w: float | None = maybe("What its scope draws now by the newest readings, watts; null once it is over.")
    least_w: float | None = maybe("What that can come down to now by all means that orders have, watts.")
    shortfall: str | None = maybe("Why it is not met, or cannot be; null: nothing is known against it.")
    withdrawn_at: Instant | None
    revision: int = said("1, and one more after each change.")


class GridOrderJob(Message):
    """What one job had in it."""

    job_id: str | None = said("Null: what no job drew.")
    before_w: float = said("Its mean draw in the ten minutes before `baseline_at`, watts.")
    during_w: float = said("Its mean draw while the order was in force, watts.")


class GridOrderTerms(Message):
    """What an order in force said until it was amended."""

    until: Instant
    steps: list[GridStep]


class GridOrderReport(Message):
    """What came of an order, by the ledger; `docs/grid.md` says how each figure is computed."""

    order: GridOrder
    nodes: list[str] = said("The nodes whose lines are counted.")
    since: Instant = said("Its start, or when it was given or amended to that start if that was later.")
    until: Instant = said("Its end, or `counted_until` if that is earlier.")
    counted_until: Instant | None = maybe(
        "Lines count up to this time: until when every node has some that had any in the two minutes before the "
        "newest, or the end of the time after the order."
    )
    baseline_w: float
    limit_w: float = said("The mean of its limits, watts; one above the baseline counts as the baseline.")
    mean_w: float = said("The mean draw, watts.")
    ordered_w: float = said("`baseline_w` less `limit_w`.")
    delivered_w: float = said("`baseline_w` less `mean_w`.")
    unheard: float = said(
        "Share of its nodes' time without a line, from the first line of each on: what they drew then is not counted.",
        default=0.0,
    )
    above_most: float | None = said(
        "Excess of the worst five minutes, as a share of their limit, or of the baseline if that limit is 0; null "
        "while nothing was limited for a minute."
    )
    rebound: float | None = said(
        "Excess of the worst five minutes in the time after it, as a share of the baseline; null in its first minute."
    )
    jobs: list[GridOrderJob] = said("Those that changed most first.")
    amended: list[GridOrderTerms] = many("What amendments replaced while it was in force, oldest first.")


class GridOrderList(Page[GridOrder]):
    """Orders, the newest first."""


Flex = Annotated[Literal[0, 10, 25, 50], BeforeValidator(no_flag)]
"""Percent: a job of class 0 is spared as long as anything else can meet an order."""
DEFAULT_FLEX: Flex = 25
