"""Ray's jobs, nodes and holders of GPUs, read from the documents of its dashboard. Pure.

Everything raises ``EngineSilentError`` for an answer that does not have Ray's format, or is incomplete. A list with one
unreadable item is rejected as a whole: a job that is left out would count as lost.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from services.contracts.engines import EngineJobState, closest_name
from services.contracts.schema import name_or_none
from services.kit.bridges.silent import EngineSilentError

ZONE, ACCELERATOR, OURS = "zone:", "accelerator_type:", "wattshift:"
"""How resources that name a zone or a GPU model begin, and the placement groups of ``wattshift.ray``."""
_STATES = {
    "PENDING": EngineJobState.PENDING,
    "RUNNING": EngineJobState.RUNNING,
    "SUCCEEDED": EngineJobState.SUCCEEDED,
    "FAILED": EngineJobState.FAILED,
    "STOPPED": EngineJobState.CANCELLED,
}


_MOST_NAME = 150


@dataclass(frozen=True, slots=True)
class RayJob:
    """A job of the Job API, or a driver that connected by itself."""

    submission: str  #: Its submission id; empty for a driver
    driver: str  #: Ray's id of its last driver; empty while there is none
    state: EngineJobState
    submitted_at: datetime
    ended_at: datetime | None
    exit_code: int | None
    message: str
    user: str

    @property
    def number(self) -> str:
        """The id by which Ray's users know it."""
        return self.submission or self.driver

    @property
    def external_id(self) -> str:
        """An id that no other job has, even once Ray has forgotten this one and reuses its name."""
        name = self.number if len(self.number) <= _MOST_NAME else sha256(self.number.encode()).hexdigest()
        return f"{name}@{int(self.submitted_at.timestamp() * 1000)}"


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node that is alive and has GPUs."""

    id: str
    name: str
    gpus: int
    accelerator: str
    zone: str | None


def read_jobs(document: Any) -> list[RayJob]:
    """Return the jobs of ``/api/jobs/``; an error if one of them cannot be read, or occurs twice."""
    try:
        found = [_job(each) for each in document]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise EngineSilentError(f"Its jobs cannot be read: {error!r}.") from error
    if len({each.external_id for each in found}) < len(found):
        raise EngineSilentError("It names a job twice.")
    return found


def read_nodes(document: Any) -> list[RayNode]:
    """Return the nodes of ``/api/v0/nodes`` that are alive and have GPUs; names that occur twice are made unique."""
    try:
        alive = [each for each in _listed(document) if each["state"] == "ALIVE"]
        names = Counter(_name(each["node_name"]) for each in alive)
        found = [_node(each, names) for each in alive if each["resources_total"].get("GPU", 0) >= 1]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineSilentError(f"Its nodes cannot be read: {error!r}.") from error
    return sorted(found, key=lambda node: node.name)


def read_holdings(groups: Any, actors: Any) -> Mapping[str, Mapping[str, float]]:
    """Return the GPUs that drivers hold through placement groups and actors outside of any, by driver and node."""
    held: dict[str, Counter[str]] = {}
    try:
        for group in _listed(groups):
            if group["state"] == "CREATED" and not str(group["name"]).startswith(OURS):
                for bundle in group["bundles"]:
                    gpus = float(bundle["unit_resources"].get("GPU", 0))
                    held.setdefault(group["creator_job_id"], Counter())[bundle["node_id"]] += gpus  # pyright: ignore[reportArgumentType]
        for actor in _listed(actors):
            gpus = float((actor["required_resources"] or {}).get("GPU", 0))
            if actor["state"] == "ALIVE" and gpus and not actor["placement_group_id"]:
                held.setdefault(actor["job_id"], Counter())[actor["node_id"]] += gpus  # pyright: ignore[reportArgumentType]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineSilentError(f"What holds its GPUs cannot be read: {error!r}.") from error
    return held


def _listed(document: Any) -> Iterable[Any]:
    """Return the items of an answer of Ray's state API."""
    found = document["data"]["result"]
    if found["partial_failure_warning"] or found["total"] > found["num_after_truncation"]:
        raise EngineSilentError("It answers half.")
    return found["result"]


def _job(document: Mapping[str, Any]) -> RayJob:
    ended_ms, code = document["end_time"], document["driver_exit_code"]
    return RayJob(
        submission=_text(document["submission_id"]),
        driver=_text(document["job_id"]),
        state=_STATES[document["status"]],
        submitted_at=datetime.fromtimestamp(document["start_time"] / 1000, UTC),
        ended_at=datetime.fromtimestamp(ended_ms / 1000, UTC) if ended_ms else None,
        exit_code=code if code is None else int(code),
        message=_text(document["message"])[-500:],
        user=_text((document["metadata"] or {}).get("user"))[:100],
    )


def _node(document: Mapping[str, Any], names: Mapping[str, int]) -> RayNode:
    resources: Mapping[str, float] = document["resources_total"]
    zones = [name.removeprefix(ZONE) for name in resources if name.startswith(ZONE)]
    models = [name.removeprefix(ACCELERATOR) for name in resources if name.startswith(ACCELERATOR)]
    node_id, name = str(document["node_id"]), _name(document["node_name"])
    return RayNode(
        id=node_id,
        name=name if names[name] == 1 else f"{name}-{node_id[:10]}",
        gpus=min(int(resources["GPU"]), 1_024),
        accelerator=models[0] if len(models) == 1 else "",
        zone=name_or_none(zones[0]) if len(zones) == 1 else None,
    )


def _name(value: object) -> str:
    """Return the valid name that is closest to Ray's."""
    return closest_name(str(value)).strip("-_.")[:50]


def _text(value: object) -> str:
    """Return a text without what no database or log can hold: zeros, and halves of characters."""
    return str(value or "").replace("\0", "").encode(errors="replace").decode()
