"""The controls of a gang's devices: a power limit or a locked clock."""

from enum import StrEnum

from services.core.domain.plain_members import plain_members


@plain_members
class ControlKind(StrEnum):
    """The two controls of a device. Values are watts and MHz."""

    POWER_LIMIT = "power_limit"
    CLOCK = "clock"
