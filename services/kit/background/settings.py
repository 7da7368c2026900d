"""Settings that every service with background work has."""

from __future__ import annotations

from pydantic import Field

from services.kit.settings import SharedSettings


class WorkSettings(SharedSettings):
    """How work is kept, claimed and given up; a process's own class adds its prefix."""

    lease_s: float = Field(
        default=15, gt=0, description="A worker that has not renewed its claim for so long is taken to be dead."
    )
    max_attempts: int = Field(default=3, ge=1, description="Workers a piece of work may cost before it is given up.")
    sweep_s: float = Field(default=5, gt=0, description="How often what a crash left behind is looked for.")
    resend_s: float = Field(
        default=5, gt=0, description="A message sent more recently may be between the broker and a worker's claim."
    )
    keep_days: float = Field(default=30, gt=0, description="How long ended work is kept.")
