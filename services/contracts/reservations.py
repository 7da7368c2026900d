"""Times for which GPUs are reserved for a tenant, or nodes are in maintenance."""

from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from services.contracts.grid import LONGEST_S, Title
from services.contracts.parallel import MAX_GANG_GPUS
from services.contracts.schema import LEAST, Flag, Instant, Int, Message, Name, Page, Real, maybe, said


class ReservationSpec(Message):
    """What to reserve: GPUs for a tenant, or whole nodes for maintenance."""

    name: Title = ""
    gpus: Int | None = maybe("Of one model, in one zone.", ge=1, le=MAX_GANG_GPUS)
    gpu_model: Name | None = None
    zone: Name | None = maybe("Only nodes of this grid zone.")
    tenant_id: Name | None = maybe("Whose jobs get them; null: the caller's.")
    maintenance: Flag = said("Nothing runs on `nodes`, or on those of `zone`, in that time.", default=False)
    nodes: list[Name] | None = Field(default=None, min_length=1, max_length=10_000)
    start_at: Instant | None = maybe("Null: now, or with `before` the cleanest time.")
    before: Instant | None = maybe("Take the cleanest time that ends before this one.")
    duration_s: Real = Field(ge=LEAST, le=LONGEST_S)

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        if self.maintenance == (self.gpus is not None):
            raise ValueError("give either gpus or maintenance")
        if self.maintenance and (self.nodes is None) == (self.zone is None):
            raise ValueError("maintenance is of either nodes or a zone")
        if self.maintenance and (self.gpu_model or self.tenant_id or self.before):
            raise ValueError("maintenance has no gpu_model, tenant_id or before")
        if self.nodes and not self.maintenance:
            raise ValueError("nodes are for maintenance")
        if self.start_at and self.before:
            raise ValueError("give either start_at or before")
        return self


class Slot(Message):
    """A time at which the GPUs could be had."""

    start_at: Instant
    zone: str
    intensity_gco2_per_kwh: float
    carbon_gco2: float = said("What they emit in that time at the usual draw of their model, without PUE.")
    estimated: bool = said("Whether the forecast ends before: its last day then stands for later ones.")


class ReservationState(StrEnum):
    """How far a reservation is."""

    AHEAD = "ahead"
    IN_FORCE = "in_force"
    ENDED = "ended"
    CANCELLED = "cancelled"


class Reservation(Message):
    """A reservation, or a maintenance."""

    id: str
    name: str
    tenant_id: str | None = said("Whose jobs get the GPUs; null: it is a maintenance.")
    state: ReservationState
    made_at: Instant
    start_at: Instant
    end_at: Instant
    cancelled_at: Instant | None
    gpu_model: str | None
    gpus: dict[str, int] = said("How many GPUs of each node.")
    slots: list[Slot] = said("The chosen one, and others that were free then, the cleanest first.")
    stays: list[str] = said("Jobs on these nodes that may not be stopped, and may not end before.")


class ReservationList(Page[Reservation]):
    """Reservations, those made last first."""
