"""What Gateway API's inference pools say of the servers behind them, and as which endpoints those are registered."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from services.contracts.engines import node_name
from services.contracts.routing import EndpointSpec
from services.engines.kueue.reading import Json

PREFIX = "wattshift.io/"
"""Of the annotations of an inference pool that say what nobody else can: ``models``, ``zone``, ``location``,
``capacity``, ``power-w``, ``request-class``, ``weight``, ``tenants`` and ``accuracy-pct``, as those of an endpoint."""
_LISTS = ("models", "tenants")


@dataclass(frozen=True)
class PodServer:
    """A model server in a pod."""

    name: str  #: The endpoint's
    url: str
    is_ready: bool  #: Whether the pod takes requests; one that does not finishes those it has
    said: Mapping[str, Any]  #: What the pool's annotations say of it

    def spec(self, models: list[str], location: str, zone: str | None) -> EndpointSpec:
        """Return the endpoint; ``ValueError``: the pool's annotations are no endpoint's.

        Args:
            models: Models that the server says it has, unless the pool says others.
            location: Where it is, and ``zone`` its grid, unless the pool says so.
        """
        known = {"models": models, "location": location, "zone": zone, **self.said}
        return EndpointSpec.model_validate({**known, "url": self.url, "draining": not self.is_ready}, strict=False)


def selector_of(pool: Json) -> str:
    """Return the labels of a pool's pods, as a selector; empty for a pool that states none, and so has no pods."""
    given = (pool.get("spec") or {}).get("selector") or {}
    labels = given.get("matchLabels", given)
    return ",".join(f"{name}={value}" for name, value in sorted(labels.items()))


def servers_of(cluster: str, pool: Json, pods: Iterable[Json]) -> list[PodServer]:
    """Return the servers of a pool's pods that have an address, by the first port that the pool states."""
    spec = pool["spec"]
    ports = [each["number"] for each in spec.get("targetPorts", ())] or [spec["targetPortNumber"]]
    said = _said(pool["metadata"].get("annotations") or {})
    found: list[PodServer] = []
    for pod in pods:
        status = pod.get("status") or {}
        address = status.get("podIP")
        if not address or status.get("phase") in ("Succeeded", "Failed"):
            continue
        host = f"[{address}]" if ":" in address else address
        name = node_name(cluster, pod["metadata"]["name"])
        found.append(PodServer(name, f"http://{host}:{ports[0]}", is_ready(pod), said))
    return found


def is_ready(pod: Json) -> bool:
    """Return whether a pod takes requests."""
    conditions = {each["type"]: each["status"] for each in pod["status"].get("conditions") or ()}
    return conditions.get("Ready") == "True" and not pod["metadata"].get("deletionTimestamp")


def _said(annotations: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of an endpoint that annotations state."""
    found: dict[str, Any] = {}
    for name, value in annotations.items():
        if name.startswith(PREFIX):
            field = name.removeprefix(PREFIX).replace("-", "_")
            found[field] = [each for each in re.split(r"[,\s]+", value) if each] if field in _LISTS else value
    return found


def models_in(answer: object) -> list[str]:
    """Return the models in a server's answer to ``/v1/models``; none if it is no such answer."""
    data = cast("dict[str, Any]", answer).get("data") if isinstance(answer, dict) else None
    items = cast("list[Any]", data) if isinstance(data, list) else []
    return [name for each in items if isinstance(each, dict) and isinstance(name := cast("Json", each).get("id"), str)]
