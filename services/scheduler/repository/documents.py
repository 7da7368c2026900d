"""The content of the JSON columns that the scheduler reads."""

from typing import Any, NotRequired, TypedDict

Json = dict[str, Any]  #: A document that is passed on, or validated by a contract before anything in it is read


class StoredShare(TypedDict):
    """A gang's devices on one node: an element of ``allocations.shares``."""

    node_id: str
    devices: list[int]


class StoredDevice(TypedDict):
    """A GPU or a slice: an element of ``nodes.devices``. Agents of earlier releases leave out what they do not know."""

    index: int
    uuid: NotRequired[str]
    parent: NotRequired[int]
    start: NotRequired[int]
    sevenths: NotRequired[int]
    mig_enabled: NotRequired[bool]
    model: str
    memory_gib: float
    power_limit_w: NotRequired[float]
    lowest_limit_w: NotRequired[float | None]
    can_set_clock: NotRequired[bool]
    can_set_power_limit: NotRequired[bool]
    clocks_mhz: NotRequired[list[int]]


class StoredIdentity(TypedDict, total=False):
    """What tells a device from another one with the same number."""

    uuid: str | None
    parent: int | None
    profile: str | None


class StoredReading(TypedDict):
    """A GPU's newest reading: an element of ``nodes.readings``."""

    index: int
    power_w: float
    utilization: float


class StoredStepTimes(TypedDict):
    """Step times of a kind's gangs, in any unit, by size and total batch, samples: ``setting_profiles.by_batch``."""

    gpus: list[int]
    batch: list[float]
    step_s: list[list[float]]


class StoredServiceTerms(TypedDict, total=False):
    """Where a service instance may run: ``service`` in a job's specification."""

    zone: str | None
    node_labels: dict[str, str]
    fleet: str | None
