"""Cells: other installations that run jobs of this one, their home."""

from typing import Annotated

from pydantic import Field, StringConstraints, field_validator

from services.contracts.schema import Flag, Instant, Message, Name, Text, maybe, said

ANY, HOME = "any", "home"
"""Among a job's `cells`: any of them. Among places where a job may wait: the installation that it was submitted to."""

WITHDRAWN = "It was withdrawn before it had started."
GIVEN_BACK = "It was stopped, and given back to its home."
"""The details of jobs that were cancelled so: their home may place them anew."""

Url = Annotated[str, StringConstraints(pattern=r"^https?://[^\s/?#@]+(/[^\s?#@]*)?$", max_length=500)]


class CellSpec(Message):
    """Another installation, as it becomes a cell."""

    name: Name
    url: Url = said("Address of its gateway.")
    key: Text = said(
        "A key of the role user that was made there for this alone. Jobs run as its tenant, in its project.",
        min_length=1,
        max_length=500,
        repr=False,
    )

    @field_validator("name")
    @classmethod
    def _not_reserved(cls, value: str) -> str:
        if value in (ANY, HOME):
            raise ValueError(f"{value} is not the name of a cell")
        return value


class CellChange(Message):
    """What to change about a cell."""

    draining: Flag = said("Whether it gets no new jobs, and gives back those that have not started.")


class CellQuery(Message):
    """How to remove a cell."""

    lost: bool = said(
        "The cell is gone for good, and none of its jobs runs any more, which nobody but you can know: its jobs are "
        "placed anew, from the beginning.",
        default=False,
    )


class Cell(Message):
    """A cell, and how it stands with it."""

    name: str
    url: str
    draining: bool
    tenant_id: str = said("Whose jobs they are there.")
    project: str | None = maybe("The project that they are in there; null: that of each job.")
    added_at: Instant
    heard_at: Instant | None = maybe("When it last answered.")
    problem: str | None = maybe("Why it is not heard, or what it refused last; null: nothing.")
    waiting: int = said("Jobs of this installation that wait there.", default=0)
    running: int = said("Those that have GPUs there.", default=0)
    energy_j: float = said("What jobs of this installation have used there, without PUE.", default=0)
    carbon_gco2: float = said("What they have emitted there.", default=0)


class CellList(Message):
    """All cells, by name."""

    items: list[Cell] = Field(default_factory=list[Cell])
