"""Kueue's API server, through the official client; every call may raise ``EngineSilentError``."""

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from datetime import datetime
from typing import Any, Self, TypeVar

import aiohttp
import orjson
from kubernetes.aio import client, config, watch
from kubernetes.aio.client.exceptions import ApiException

from services.contracts.clusters import WorkloadName
from services.engines.kueue.dispatching import CLUSTERS, Nomination, Nominee
from services.engines.kueue.inference import selector_of
from services.engines.kueue.reading import Json, Workload
from services.engines.kueue.settings import KueueSettings
from services.engines.kueue.steering import Change
from services.kit.bridges.silent import EngineSilentError
from services.kit.ids import utc_now
from services.kit.logging import Log

log = Log(__name__)

T = TypeVar("T")
GROUP = "kueue.x-k8s.io"
INFERENCE = (("inference.networking.k8s.io", "v1"), ("inference.networking.x-k8s.io", "v1alpha2"))
SCALED = {
    "Deployment": ("apps", "v1", "deployments"),
    "LeaderWorkerSet": ("leaderworkerset.x-k8s.io", "v1", "leaderworkersets"),
}
LEASES = ("coordination.k8s.io", "v1")
VERSIONS = ("v1beta2", "v1beta1")
"""Those that the bridge reads, the preferred one first."""
_CONFLICT, _GONE, _NOT_FOUND = 409, 410, 404
_REFUSED = (400, 403, 422)  #: By which the API server, or a webhook there, refuses a change of one object
_AGAIN_S = 60.0  #: So long after a refusal the same workload is left as it is
_TIMEOUT_S = 30
_WATCH_S = 300


class Cluster:
    """One cluster with Kueue."""

    def __init__(self, settings: KueueSettings, api: Any) -> None:
        self._settings = settings
        self._api = api
        self._objects: Any = client.CustomObjectsApi(api)
        self.version = ""
        self._refused: dict[str, tuple[str, float]] = {}  #: By workload: why it could not be changed, and when that was

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, settings: KueueSettings) -> AsyncIterator[Self]:
        """Connect with the pod's service account, or with a kubeconfig; ``EngineSilentError`` if there is neither."""
        configuration: Any = client.Configuration()
        try:
            if settings.kubeconfig is None:
                with contextlib.suppress(config.ConfigException):
                    config.load_incluster_config(client_configuration=configuration)
            if not configuration.api_key:
                path = str(settings.kubeconfig) if settings.kubeconfig else None
                await config.load_kube_config(config_file=path, client_configuration=configuration)
        except (config.ConfigException, OSError) as error:
            raise EngineSilentError(f"There is no configuration to reach the cluster by: {error}") from error
        async with client.ApiClient(configuration) as api:
            yield cls(settings, api)

    async def greet(self) -> None:
        """Find out which version of Kueue's resources the server has."""
        if self.version:
            return
        found: Any = await _asked(
            self._objects.get_api_resources(GROUP, VERSIONS[0], _request_timeout=_TIMEOUT_S), None
        )
        self.version = VERSIONS[0] if found is not None else VERSIONS[1]

    async def listed(self, plural: str) -> list[Json]:
        """Return all objects of a kind; empty if the server does not know the kind."""
        await self.greet()
        with contextlib.suppress(_OtherByNowError):
            return (await self._list(plural))["items"]
        return []

    async def watched(self, plural: str) -> AsyncIterator[tuple[str, Json | list[Json]]]:
        """Yield ``("ALL", objects)`` first, and then each change; end when it is time to list again."""
        await self.greet()
        listing = await self._list(plural)
        yield "ALL", listing["items"]
        watching: Any = watch.Watch()
        since = listing["metadata"]["resourceVersion"]
        listed = self._objects.list_cluster_custom_object
        arguments = (GROUP, self.version, plural)
        try:
            async for event in watching.stream(
                listed, *arguments, resource_version=since, timeout_seconds=_WATCH_S, allow_watch_bookmarks=True
            ):
                if event["type"] in ("ADDED", "MODIFIED", "DELETED"):
                    yield event["type"], event["raw_object"]
        except ApiException as error:
            if error.status != _GONE:  # else it is listed anew
                raise EngineSilentError(_words(error)) from error
        except (aiohttp.ClientError, TimeoutError, OSError, KeyError, TypeError) as error:
            raise EngineSilentError(f"The watch ended: {error!r}") from error
        finally:
            await watching.close()

    async def inference(self, namespace: str) -> list[tuple[Json, list[Json]]]:
        """Return a namespace's pools of Gateway API's inference extension, each with the pods that it selects."""
        found: Any = None
        for group, version in INFERENCE:
            listed = self._objects.list_namespaced_custom_object(
                group, version, namespace, "inferencepools", _request_timeout=_TIMEOUT_S
            )
            if (found := await _asked(listed, None)) is not None:
                break
        items = (found or {"items": []})["items"]
        return [(pool, await self._pods(namespace, selector_of(pool))) for pool in items]

    async def _pods(self, namespace: str, selector: str) -> list[Json]:
        """Return the pods with some labels; none without labels, which would select all pods that there are."""
        if not selector:
            return []
        asked: Any = client.CoreV1Api(self._api).list_namespaced_pod(
            namespace, label_selector=selector, _request_timeout=_TIMEOUT_S
        )
        return self._api.sanitize_for_serialization(await _asked(asked))["items"]

    async def workload(self, namespace: str, of: WorkloadName) -> tuple[Json | None, list[Json]]:
        """Return a workload, None if there is none, and the pods that its scale names."""
        place = (*SCALED[of.kind][:2], namespace, SCALED[of.kind][2], of.name)
        found: Any = await _asked(self._objects.get_namespaced_custom_object(*place, _request_timeout=_TIMEOUT_S), None)
        if found is None:
            return None, []
        scale: Any = await _asked(
            self._objects.get_namespaced_custom_object_scale(*place, _request_timeout=_TIMEOUT_S), {}
        )
        return found, await self._pods(namespace, (scale.get("status") or {}).get("selector") or "")

    async def autoscalers(self, namespace: str) -> list[Json]:
        """Return a namespace's HorizontalPodAutoscalers; KEDA makes one for each of its own."""
        listed = self._objects.list_namespaced_custom_object
        asked = listed("autoscaling", "v2", namespace, "horizontalpodautoscalers", _request_timeout=_TIMEOUT_S)
        return (await _asked(asked))["items"]

    async def change_workload(self, namespace: str, of: WorkloadName, patch: Json) -> bool:
        """Patch a workload, unless it has changed since it was read; return whether it was patched."""
        place = (*SCALED[of.kind][:2], namespace, SCALED[of.kind][2], of.name)
        try:
            await _asked(self._patch(self._objects.patch_namespaced_custom_object, place, patch))
        except _OtherByNowError:
            return False
        return True

    async def annotate_pod(self, namespace: str, pod: str, notes: Mapping[str, str | None]) -> None:
        """Annotate a pod; one that is gone is passed over."""
        body: Json = {"metadata": {"annotations": dict(notes)}}
        with contextlib.suppress(_OtherByNowError):
            await _asked(self._patch(client.CoreV1Api(self._api).patch_namespaced_pod, (pod, namespace), body))

    async def write(self, change: Change) -> bool:
        """Write a change, unless the workload has changed since it was read; return whether it was written."""
        if change.deactivate:
            return await self._written(change.workload, {"spec": {"active": False}}, {})
        status = {} if change.checks is None else {"status": {"admissionChecks": list(change.checks)}}
        return await self._written(change.workload, status, change.annotations)

    async def nominate(self, nomination: Nomination) -> bool:
        """Nominate clusters for a workload, unless it has changed since it was read; return whether it was written."""
        nominee, note = nomination.nominee, nomination.note
        status = {"status": {"nominatedClusterNames": list(nomination.clusters)}}
        is_new = note and nominee.own_annotations.get(CLUSTERS) != note
        return await self._written(nominee, status, {CLUSTERS: note} if is_new else {})

    async def _written(self, of: Workload | Nominee, part: Json, annotations: Mapping[str, str | None]) -> bool:
        place = (GROUP, self.version, of.namespace, "workloads", of.name)
        patch = self._objects.patch_namespaced_custom_object
        now_s = time.monotonic()
        was, since_s = self._refused.get(of.uid, ("", -_AGAIN_S))
        if now_s < since_s + _AGAIN_S:
            return False
        try:
            if part:
                body: Json = {"metadata": {"resourceVersion": of.version}, **part}
                its_own = self._objects.patch_namespaced_custom_object_status if "status" in part else patch
                await _asked(self._patch(its_own, place, body))
            if annotations:
                await _asked(self._patch(patch, place, {"metadata": {"annotations": dict(annotations)}}))
        except _OtherByNowError:
            return False
        except RefusedError as error:  # by what guards this one workload, which is no reason to leave all others
            if str(error) != was:
                log.error("kueue.refused", workload=f"{of.namespace}/{of.name}", why=str(error))
            known = {uid: each for uid, each in self._refused.items() if now_s < each[1] + 2 * _AGAIN_S}
            self._refused = {**known, of.uid: (str(error), now_s)}
            return False
        self._refused.pop(of.uid, None)
        return True

    def refusal(self, uid: str) -> str:
        """Return why a workload could not be changed; empty if it could."""
        return self._refused.get(uid, ("", 0.0))[0]

    async def acknowledge(self, check: Json) -> None:
        """Mark an AdmissionCheck as active; otherwise, Kueue closes its queues."""
        name = check["metadata"]["name"]
        known = [each for each in check.get("status", {}).get("conditions", []) if each.get("type") == "Active"]
        if known and known[0].get("status") == "True":
            return
        active = {
            "type": "Active",
            "status": "True",
            "reason": "Active",
            "message": "Wattshift answers this check.",
            "lastTransitionTime": f"{utc_now():%Y-%m-%dT%H:%M:%SZ}",
        }
        place = (GROUP, self.version, "admissionchecks", name)
        with contextlib.suppress(_OtherByNowError):
            body = {"status": {"conditions": [active]}}
            await _asked(self._patch(self._objects.patch_cluster_custom_object_status, place, body))

    async def renew_lease(self) -> None:
        """Renew the Lease that shows that the bridge is alive."""
        place = (*LEASES, self._settings.lease_namespace, "leases", self._settings.node_id)
        spec = {"renewTime": f"{utc_now():%Y-%m-%dT%H:%M:%S.%fZ}", "holderIdentity": self._settings.node_id}
        try:
            await _asked(self._patch(self._objects.patch_namespaced_custom_object, place, {"spec": spec}))
        except _OtherByNowError:
            body = {
                "apiVersion": "/".join(LEASES),
                "kind": "Lease",
                "metadata": {"name": place[-1], "namespace": self._settings.lease_namespace},
                "spec": spec,
            }
            with contextlib.suppress(_OtherByNowError):
                await _asked(self._objects.create_namespaced_custom_object(*place[:-1], body))

    async def lease_renewed_at(self) -> datetime | None:
        """Return when the bridge last renewed its Lease; None if it never did."""
        place = (*LEASES, self._settings.lease_namespace, "leases", self._settings.node_id)
        found: Any = await _asked(self._objects.get_namespaced_custom_object(*place), None)
        try:
            return None if found is None else datetime.fromisoformat(found["spec"]["renewTime"])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineSilentError(f"The bridge's Lease cannot be read: {error!r}") from error

    async def _list(self, plural: str) -> Json:
        found = await _asked(
            self._objects.list_cluster_custom_object(GROUP, self.version, plural, _request_timeout=_TIMEOUT_S)
        )
        if not isinstance(found, dict) or not isinstance(found.get("items"), list):  # pyright: ignore[reportUnknownMemberType]
            raise EngineSilentError(f"The list of {plural} is none.")
        return found  # pyright: ignore[reportUnknownVariableType]

    async def _patch(self, patch: Any, place: tuple[str, ...], body: Json) -> Any:
        return await patch(*place, body, _content_type="application/merge-patch+json", _request_timeout=_TIMEOUT_S)


class _OtherByNowError(Exception):
    """The object has changed since it was read, or is gone."""


class RefusedError(EngineSilentError):
    """The request is refused, for a reason that may concern this object alone."""


_RAISE: Any = object()


async def _asked(answer: Awaitable[T], otherwise: T = _RAISE) -> T:
    """Return an answer; if there is no such object, return ``otherwise`` where it is given."""
    try:
        return await answer
    except ApiException as error:
        if error.status == _NOT_FOUND and otherwise is not _RAISE:
            return otherwise
        if error.status in (_CONFLICT, _NOT_FOUND):
            raise _OtherByNowError from error
        kind = RefusedError if error.status in _REFUSED else EngineSilentError
        raise kind(_words(error)) from error
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
        raise EngineSilentError(f"The API server does not answer: {error!r}") from error


def _words(error: ApiException) -> str:
    try:
        said = orjson.loads(error.body or "")["message"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        said = error.reason
    return f"The API server answered {error.status}: {str(said)[:300]}"
