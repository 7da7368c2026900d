"""Placement groups that are noted in a folder; while its file ``full`` is there, none becomes ready."""

import json
import time
from typing import Any

from ray import FOLDER  # pyright: ignore[reportAttributeAccessIssue]


class PlacementGroup:
    """A group of bundles."""

    def __init__(self, name: str, bundles: list[dict[str, float]]) -> None:
        self.name, self.bundles = name, bundles
        self.id = name.encode()
        self.path = FOLDER / f"{name}.group"

    def wait(self, timeout_seconds: float) -> bool:
        """Return whether it is ready."""
        if (FOLDER / "full").exists():
            time.sleep(timeout_seconds)
            return False
        return True


def placement_group(bundles: list[dict[str, float]], strategy: str, name: str) -> PlacementGroup:
    """Make a group."""
    made = PlacementGroup(name, bundles)
    made.path.write_text(json.dumps({"bundles": bundles, "strategy": strategy}))
    return made


def remove_placement_group(group: PlacementGroup) -> None:
    """Remove a group."""
    group.path.unlink()


def placement_group_table(group: PlacementGroup) -> dict[str, Any]:
    """Return where its bundles are: on node ``n1`` all of them."""
    return {"bundles_to_node_id": dict.fromkeys(range(len(group.bundles)), "n1")}
