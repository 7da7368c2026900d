"""Settings of every service with background work."""

from services.contracts.schema import said
from services.kit.settings import SharedSettings


class WorkSettings(SharedSettings):
    """How work is claimed, given up and deleted; each process adds a class with its own prefix."""

    lease_s: float = said("A worker that has not renewed its claim for this long counts as dead.", default=15, gt=0)
    max_attempts: int = said("Attempts after which work whose workers died is given up.", default=3, ge=1)
    sweep_s: float = said("How often work that a crash left behind is looked for.", default=5, gt=0)
    resend_s: float = said("A message sent more recently than this is not sent again.", default=5, gt=0)
    keep_days: float = said("How long ended work is kept.", default=30, gt=0)
