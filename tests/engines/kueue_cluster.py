"""A stand-in for an API server with Kueue: its resources by the published schemas, watches, versions and conflicts.

Of Kueue itself it does what the bridge depends on: ``step`` reserves quota by effective priority and then in order of
submission, preempts what has a lower one than what waits, admits what all checks are ready for, and evicts what one of
them wants to be tried again. A slice of an elastic job needs the quota that the one before it does not have.

Of Deployments and LeaderWorkerSets it has what ``run_pods`` does: pods until there are as many as replicas, and of too
many the ones less that Kubernetes would take: those that are not ready, then by the cost of their deletion and the
youngest, or of groups those with the highest numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import json
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jsonschema_rs
from aiohttp import web
from aiohttp.test_utils import TestServer

Json = dict[str, Any]
SCHEMAS: dict[str, Json] = json.loads(gzip.decompress(Path(__file__).with_name("kueue-crds.json.gz").read_bytes()))
CHECK, RESOURCE = "carbon", "nvidia.com/gpu"
REPLACES = "kueue.x-k8s.io/workload-slice-replacement-for"
SCALED = {"deployments": ("apps", "v1"), "leaderworkersets": ("leaderworkerset.x-k8s.io", "v1")}
COST = "controller.kubernetes.io/pod-deletion-cost"
GROUP = "leaderworkerset.sigs.k8s.io/group-index"
REMOTE = "multikueue"
"""The name of MultiKueue's check, where a cluster manages others."""


def now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


def plain(schema: Any) -> Any:
    """Return a schema of a resource as JSON Schema has it: Kubernetes' own words are left out, and unknown fields."""
    if isinstance(schema, list):
        return [plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    kept = {
        key: plain(value)
        for key, value in schema.items()
        if not key.startswith("x-kubernetes") and not (key in ("pattern", "default") and not isinstance(value, dict))
    }
    if isinstance(kept.get("properties"), dict) and "type" in kept:
        return kept | {"additionalProperties": False}
    return kept


def validator(plural: str, version: str) -> Any:
    """Return what checks objects of a kind."""
    versions = {each["name"]: each["schema"]["openAPIV3Schema"] for each in SCHEMAS[plural]["spec"]["versions"]}
    schema = plain(versions[version])
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema_rs.validator_for(schema)


class KueueCluster:
    """The objects, by kind and ``NAMESPACE/NAME``, and what has happened to them."""

    def __init__(self, version: str = "v1beta2") -> None:
        self.version = version
        plain_kinds = ("leases", "horizontalpodautoscalers", "pods", "inferencepools", *SCALED)
        self.objects: dict[str, dict[str, Json]] = {plural: {} for plural in (*SCHEMAS, *plain_kinds)}
        self.scalings: list[tuple[str, Json, Json]] = []  #: Who was scaled by a patch, as it was and as it is
        self.events: list[tuple[int, str, str, Json]] = []
        self.oldest = 0
        self.down = False
        self.conflicts = 0
        self.guarded = set[str]()  #: Workloads that nobody may change
        self.refusals = 0
        self.ahead_s = 0.0
        self.preempted: list[str] = []
        self.rooms: dict[str, int] = {}
        """GPUs that are free in each worker cluster; none: it manages no others."""
        self._requeue_at_s: dict[str, float] = {}
        self._versions = itertools.count(1)
        self._changed = asyncio.Condition()
        self._validators = {plural: validator(plural, version) for plural in SCHEMAS}

    def at(self, plural: str, key: str) -> Json:
        return self.objects[plural][key]

    async def put(self, plural: str, document: Json) -> Json:
        """Store an object, as an apiserver does that has checked it."""
        meta = document["metadata"]
        key = f"{meta['namespace']}/{meta['name']}" if "namespace" in meta else meta["name"]
        known = self.objects[plural].get(key)
        meta |= {"uid": known["metadata"]["uid"] if known else f"uid-{key}-{next(self._versions)}"}
        meta |= {"creationTimestamp": known["metadata"]["creationTimestamp"] if known else now()}
        meta["resourceVersion"] = str(next(self._versions))
        if plural in self._validators:
            self._validators[plural].validate(document)
        status = document.get("status", {})
        if plural == "workloads" and status.get("clusterName") and status.get("nominatedClusterNames"):
            raise web.HTTPUnprocessableEntity(text=json.dumps({"reason": "Invalid", "code": 422}))
        self.objects[plural][key] = document
        await self._tell("MODIFIED" if known else "ADDED", plural, document)
        return document

    async def delete(self, plural: str, key: str) -> None:
        document = self.objects[plural].pop(key)
        document["metadata"]["resourceVersion"] = str(next(self._versions))
        await self._tell("DELETED", plural, document)

    async def _tell(self, kind: str, plural: str, document: Json) -> None:
        async with self._changed:
            version = int(document["metadata"]["resourceVersion"])
            self.events.append((version, kind, plural, json.loads(json.dumps(document))))
            self._changed.notify_all()

    async def merge(self, plural: str, key: str, patch: Json, part: str | None) -> Json:
        """Merge a patch into an object; into its status alone by the status' own path, and never there otherwise."""
        known = json.loads(json.dumps(self.objects[plural][key]))
        seen = patch.get("metadata", {}).pop("resourceVersion", None)
        if seen is not None and seen != known["metadata"]["resourceVersion"]:
            self.conflicts += 1
            raise web.HTTPConflict(text=json.dumps({"reason": "Conflict", "code": 409}))
        wanted = {name: value for name, value in patch.items() if (name == "status") == (part == "status")}
        result = merged(known, wanted)
        if plural in SCALED:
            replicas = result["spec"]["replicas"]
            assert isinstance(replicas, int), "or it is no count"
            assert replicas >= 0
            assert all(isinstance(each, str) for each in result["metadata"].get("annotations", {}).values())
            self.scalings.append((key, known, result))
        return await self.put(plural, result)

    # What Kubernetes' own controllers do.

    def pods_of(self, plural: str, key: str) -> list[Json]:
        owner = f"{plural}/{key}"
        return [each for each in self.objects["pods"].values() if each["metadata"]["labels"]["owner"] == owner]

    async def run_pods(self, address: str = "10.8.0.{}") -> list[str]:
        """Make and take away pods once, and have those that were there be ready; return the uids of those taken."""
        taken: list[str] = []
        for plural in SCALED:
            for key, each in list(self.objects[plural].items()):
                replicas, pods = each["spec"].get("replicas", 1), self.pods_of(plural, key)
                for pod in pods:
                    if not is_pod_ready(pod):
                        ready = [{"type": "Ready", "status": "True"}]
                        pod["status"] |= {"phase": "Running", "conditions": ready}
                        await self.put("pods", pod)
                pods.sort(key=_first_to_go)
                for pod in pods[: max(len(pods) - replicas, 0)]:
                    taken.append(pod["metadata"]["uid"])
                    await self.delete("pods", f"{pod['metadata']['namespace']}/{pod['metadata']['name']}")
                groups = {int(pod["metadata"]["labels"][GROUP]) for pod in pods}
                for number in sorted(set(range(replicas)) - groups) if plural == "leaderworkersets" else ():
                    await self._add_pod(plural, key, number, address)
                for _ in range(replicas - len(pods) if plural == "deployments" else 0):
                    await self._add_pod(plural, key, 0, address)
        return taken

    async def _add_pod(self, plural: str, key: str, number: int, address: str) -> None:
        namespace, _, name = key.partition("/")
        made = next(self._versions)
        own = number if plural == "leaderworkersets" else made
        labels = {"owner": f"{plural}/{key}", "app": name, GROUP: str(number)}
        status = {"phase": "Pending", "podIP": address.format(made % 250 + 1)}
        meta = {"name": f"{name}-{own}", "namespace": namespace, "labels": labels}
        await self.put("pods", {"metadata": meta, "status": status})

    # What Kueue does.

    async def step(self) -> None:
        """Reserve, admit and evict once."""
        free = {"h100": sum(8 for _ in self.objects["clusterqueues"])}
        for each in self.objects["workloads"].values():
            if holds(each):
                free["h100"] -= each["spec"]["podSets"][0]["count"]
        await self._preempt(free["h100"])
        for key in self._in_order():
            each = json.loads(json.dumps(self.at("workloads", key)))
            checks = each.get("status", {}).get("admissionChecks", [])
            gpus = size = each["spec"]["podSets"][0]["count"]
            replaced = each["metadata"].get("annotations", {}).get(REPLACES)
            if replaced and holds(self.at("workloads", replaced)):
                gpus -= self.at("workloads", replaced)["spec"]["podSets"][0]["count"]
            if "Finished" in true_conditions(each):
                continue
            if any(check["state"] == "Retry" for check in checks) or each["spec"].get("active") is False:
                if holds(each):
                    wait_s = max(check.get("requeueAfterSeconds", 0) for check in checks)
                    self._requeue_at_s[key] = time.time() + self.ahead_s + wait_s
                    each["status"] |= {"conditions": [condition("Evicted", "True", "AdmissionCheck")]}
                    each["status"].pop("admission", None)
                    each["status"]["admissionChecks"] = self._pending()
                    await self.put("workloads", each)
            elif not holds(each):
                if gpus <= free["h100"] and self._requeue_at_s.get(key, 0.0) <= time.time() + self.ahead_s:
                    free["h100"] -= gpus
                    await self.put("workloads", reserved(each, size, self._pending()))
            elif self.rooms and await self._dispatched(each, gpus):
                continue
            elif "Admitted" not in true_conditions(each) and {check["state"] for check in checks} == {"Ready"}:
                each["status"]["conditions"].append(condition("Admitted", "True", "Admitted"))
                await self.put("workloads", each)
                if replaced:
                    await self.finish(replaced, "WorkloadSliceReplaced")

    def _in_order(self) -> list[str]:
        """Return the keys of all workloads, those that are served first first."""
        known = self.objects["workloads"]
        return sorted(known, key=lambda key: (-effective_priority(known[key]), known[key]["metadata"]["uid"]))

    async def _preempt(self, free: int) -> None:
        """Evict what has a lower priority than the first that waits, if that has no room (`LowerPriority`)."""
        waiting = [
            self.at("workloads", key)
            for key in self._in_order()
            if not holds(self.at("workloads", key))
            and "Finished" not in true_conditions(self.at("workloads", key))
            and self._requeue_at_s.get(key, 0.0) <= time.time() + self.ahead_s
        ]
        if not waiting or waiting[0]["spec"]["podSets"][0]["count"] <= free:
            return
        for key in reversed(self._in_order()):
            each = json.loads(json.dumps(self.at("workloads", key)))
            if holds(each) and effective_priority(each) < effective_priority(waiting[0]):
                self.preempted.append(key)
                each["status"] = {"conditions": [condition("Evicted", "True", "Preempted")]}
                await self.put("workloads", each)
                return

    def _pending(self) -> list[Json]:
        return [state("Pending"), *([state("Pending", REMOTE)] if self.rooms else [])]

    async def _dispatched(self, each: Json, gpus: int) -> bool:
        """Let a worker cluster that is nominated, and has room, take a workload; return whether one did."""
        status = each["status"]
        if any(check["state"] != "Ready" for check in status["admissionChecks"] if check["name"] != REMOTE):
            return False
        for name in status.get("nominatedClusterNames", ()):
            if not status.get("clusterName") and self.rooms.get(name, 0) >= gpus:
                self.rooms[name] -= gpus
                status |= {"clusterName": name, "nominatedClusterNames": []}
                status["admissionChecks"] = [state("Ready", check["name"]) for check in status["admissionChecks"]]
                await self.put("workloads", each)
                return True
        return False

    async def finish(self, key: str, reason: str = "Succeeded") -> None:
        each = json.loads(json.dumps(self.at("workloads", key)))
        each["status"]["conditions"].append(condition("Finished", "True", reason))
        await self.put("workloads", each)

    # What clients see.

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        app = web.Application()
        base = "/apis/{group}/{version}"
        app.router.add_get(base, self._resources)
        for space in ("", "/namespaces/{namespace}"):
            app.router.add_get(base + space + "/{plural}", self._list)
            app.router.add_post(base + space + "/{plural}", self._create)
            app.router.add_get(base + space + "/{plural}/{name}", self._get)
            app.router.add_patch(base + space + "/{plural}/{name}", self._patch)
            app.router.add_patch(base + space + "/{plural}/{name}/{part}", self._patch)
            app.router.add_get(base + space + "/{plural}/{name}/scale", self._scale)
        app.router.add_get("/api/v1/namespaces/{namespace}/{plural}", self._labelled)
        app.router.add_patch("/api/v1/namespaces/{namespace}/{plural}/{name}", self._patch)
        async with TestServer(app) as server:
            yield str(server.make_url("")).rstrip("/")

    def _check(self, request: web.Request) -> None:
        if self.down:
            raise web.HTTPServiceUnavailable
        if request.match_info.get("group") == "kueue.x-k8s.io" and request.match_info["version"] != self.version:
            raise web.HTTPNotFound

    def _key(self, request: web.Request) -> tuple[str, str]:
        self._check(request)
        info = request.match_info
        key = f"{info['namespace']}/{info['name']}" if "namespace" in info else info["name"]
        if key not in self.objects[info["plural"]]:
            raise web.HTTPNotFound(text=json.dumps({"reason": "NotFound", "code": 404}))
        return info["plural"], key

    async def _resources(self, request: web.Request) -> web.Response:
        self._check(request)
        names = {plural: document["spec"]["names"] for plural, document in SCHEMAS.items()}
        resources = [
            {
                "name": plural,
                "singularName": each["singular"],
                "kind": each["kind"],
                "namespaced": True,
                "verbs": ["get"],
            }
            for plural, each in names.items()
        ]
        served = f"{request.match_info['group']}/{self.version}"
        return web.json_response(
            {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": served, "resources": resources}
        )

    async def _get(self, request: web.Request) -> web.Response:
        plural, key = self._key(request)
        return web.json_response(self.at(plural, key))

    async def _scale(self, request: web.Request) -> web.Response:
        plural, key = self._key(request)
        assert SCALED[plural] == (request.match_info["group"], request.match_info["version"])
        known = self.at(plural, key)
        return web.json_response(
            {
                "kind": "Scale",
                "apiVersion": "autoscaling/v1",
                "metadata": known["metadata"],
                "spec": {"replicas": known["spec"].get("replicas", 1)},
                "status": {"replicas": len(self.pods_of(plural, key)), "selector": f"owner={plural}/{key}"},
            }
        )

    async def _labelled(self, request: web.Request) -> web.Response:
        self._check(request)
        wanted = dict(each.split("=", 1) for each in request.query["labelSelector"].split(","))
        found = self.objects[request.match_info["plural"]].values()
        items = [each for each in found if wanted.items() <= each["metadata"]["labels"].items()]
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items})

    async def _create(self, request: web.Request) -> web.Response:
        self._check(request)
        return web.json_response(await self.put(request.match_info["plural"], await request.json()), status=201)

    async def _patch(self, request: web.Request) -> web.Response:
        plural, key = self._key(request)
        if key in self.guarded:
            said = {
                "kind": "Status",
                "code": 403,
                "reason": "Forbidden",
                "message": "the webhook of policies denies it",
            }
            self.refusals += 1
            raise web.HTTPForbidden(text=json.dumps(said), content_type="application/json")
        assert request.content_type == "application/merge-patch+json"
        part = request.match_info.get("part")
        return web.json_response(await self.merge(plural, key, await request.json(), part))

    async def _list(self, request: web.Request) -> web.StreamResponse:
        self._check(request)
        plural = request.match_info["plural"]
        if request.query.get("watch", "").lower() == "true":
            return await self._watch(request, plural)
        version = str(max([0, *(at for at, *_ in self.events)]))
        items = list(self.objects[plural].values())
        return web.json_response({"kind": "List", "metadata": {"resourceVersion": version}, "items": items})

    async def _watch(self, request: web.Request, plural: str) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        stream = web.StreamResponse(headers={"content-type": "application/json"})
        await stream.prepare(request)
        if since < self.oldest:
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            await stream.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            return stream
        while not self.down:
            for version, kind, name, document in self.events:
                if version > since and name == plural:
                    await stream.write(json.dumps({"type": kind, "object": document}).encode() + b"\n")
                    since = version
            async with self._changed:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await self._changed.wait()
        return stream


def is_pod_ready(pod: Json) -> bool:
    return {"type": "Ready", "status": "True"} in pod["status"].get("conditions", ())


def _first_to_go(pod: Json) -> tuple[int, bool, int, int]:
    """Return what decides which pods go first; of Deployments all have the same number of a group."""
    meta = pod["metadata"]
    cost = int(meta.get("annotations", {}).get(COST, "0"))
    return -int(meta["labels"][GROUP]), is_pod_ready(pod), cost, -int(meta["resourceVersion"])


def merged(known: Any, patch: Any) -> Any:
    """Return a document with a merge patch (RFC 7386) applied."""
    if not isinstance(patch, dict):
        return patch
    result = dict(known) if isinstance(known, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def condition(kind: str, status: str, reason: str) -> Json:
    return {"type": kind, "status": status, "reason": reason, "message": "", "lastTransitionTime": now()}


def state(value: str, name: str = CHECK) -> Json:
    return {"name": name, "state": value, "message": "", "lastTransitionTime": now()}


def true_conditions(workload: Json) -> set[str]:
    found = workload.get("status", {}).get("conditions", [])
    return {each["type"] for each in found if each["status"] == "True"}


def effective_priority(workload: Json) -> int:
    boost = workload["metadata"].get("annotations", {}).get("kueue.x-k8s.io/priority-boost", "0")
    return workload["spec"].get("priority", 0) + int(boost)


def holds(workload: Json) -> bool:
    return "QuotaReserved" in true_conditions(workload) and "Finished" not in true_conditions(workload)


def reserved(workload: Json, gpus: int, checks: list[Json]) -> Json:
    usage = {"name": "main", "count": gpus, "flavors": {RESOURCE: "h100"}, "resourceUsage": {RESOURCE: str(gpus)}}
    status = {
        "conditions": [condition("QuotaReserved", "True", "QuotaReserved")],
        "admission": {"clusterQueue": "research", "podSetAssignments": [usage]},
        "admissionChecks": checks,
    }
    return workload | {"status": status}


def a_workload(name: str, gpus: int, **annotations: str) -> Json:
    """Return a workload of so many pods with one GPU each."""
    container = {"name": "c", "image": "train", "resources": {"requests": {RESOURCE: "1"}}}
    template = {"metadata": {"annotations": annotations}, "spec": {"containers": [container]}}
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "Workload",
        "metadata": {"name": name, "namespace": "team"},
        "spec": {"queueName": "gpus", "podSets": [{"name": "main", "count": gpus, "template": template}]},
    }


async def furnish(cluster: KueueCluster) -> None:
    """Make a queue of eight H100s that has our check."""
    api = {"apiVersion": f"kueue.x-k8s.io/{cluster.version}"}
    check = {"kind": "AdmissionCheck", "metadata": {"name": CHECK}, "spec": {"controllerName": "wattshift.io/carbon"}}
    labels = {"nodeLabels": {"nvidia.com/gpu.product": "H100-SXM5-80GB"}}
    flavor = {"kind": "ResourceFlavor", "metadata": {"name": "h100"}, "spec": labels}
    quota = {"name": "h100", "resources": [{"name": RESOURCE, "nominalQuota": "8"}]}
    spec = {
        "resourceGroups": [{"coveredResources": [RESOURCE], "flavors": [quota]}],
        "admissionChecksStrategy": {"admissionChecks": [{"name": CHECK}]},
    }
    queue = {"kind": "ClusterQueue", "metadata": {"name": "research"}, "spec": spec}
    local = {
        "kind": "LocalQueue",
        "metadata": {"name": "gpus", "namespace": "team"},
        "spec": {"clusterQueue": "research"},
    }
    for plural, document in (
        ("admissionchecks", check),
        ("resourceflavors", flavor),
        ("clusterqueues", queue),
        ("localqueues", local),
    ):
        await cluster.put(plural, api | document)


async def furnish_workers(cluster: KueueCluster, zones: dict[str, str], rooms: dict[str, int]) -> None:
    """Make it a cluster that manages others, in these grid zones and with so much room."""
    api = {"apiVersion": f"kueue.x-k8s.io/{cluster.version}"}
    reference = {"apiGroup": "kueue.x-k8s.io", "kind": "MultiKueueConfig", "name": "all"}
    check = {"controllerName": "kueue.x-k8s.io/multikueue", "parameters": reference}
    source = {"kubeConfig": {"location": "secret", "locationType": "Secret"}}
    spec = source if cluster.version == "v1beta1" else {"clusterSource": source}
    await cluster.put("admissionchecks", api | {"kind": "AdmissionCheck", "metadata": {"name": REMOTE}, "spec": check})
    config = {"kind": "MultiKueueConfig", "metadata": {"name": "all"}, "spec": {"clusters": list(zones)}}
    await cluster.put("multikueueconfigs", api | config)
    for name, zone in zones.items():
        meta = {"name": name, "annotations": {"wattshift.io/zone": zone}}
        await cluster.put("multikueueclusters", api | {"kind": "MultiKueueCluster", "metadata": meta, "spec": spec})
    cluster.rooms = dict(rooms)
