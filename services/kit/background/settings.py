"""Settings of every service with background work."""

from __future__ import annotations

from pydantic import Field

from services.kit.settings import SharedSettings


class WorkSettings(SharedSettings):
    """How work is claimed, given up and deleted; each process adds a class with its own prefix."""

    lease_s: float = Field(
        default=15, gt=0, description="A worker that has not renewed its claim for this long counts as dead."
    )
    max_attempts: int = Field(default=3, ge=1, description="Attempts after which work whose workers died is given up.")
    sweep_s: float = Field(default=5, gt=0, description="How often work that a crash left behind is looked for.")
    resend_s: float = Field(default=5, gt=0, description="A message sent more recently than this is not sent again.")
    keep_days: float = Field(default=30, gt=0, description="How long ended work is kept.")
