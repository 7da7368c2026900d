"""What a stream of events says about things other than jobs: that they have changed."""

from enum import StrEnum

from services.contracts.schema import Message, said


class ChangeKind(StrEnum):
    """A kind of thing that clients read again once it has changed."""

    NODES = "nodes"
    POLICIES = "policies"
    POOLS = "pools"
    APPS = "apps"
    CARBON = "carbon"
    FOOTPRINTS = "footprints"


class Changed(Message):
    """The data of a `changed` event."""

    kinds: list[ChangeKind] = said("What to read again; of `nodes`, operators alone are told.")
