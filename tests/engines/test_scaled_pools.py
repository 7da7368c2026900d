"""Pools whose instances are pods: real serving and its controller, a real registrar, and a stand-in API server."""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from kubernetes.aio import client
from pydantic import ValidationError

from services.contracts.clusters import ClusterPod, ClusterReport, WorkloadReport
from services.contracts.codes import ProblemCode
from services.contracts.identity import Identity, Role
from services.contracts.pools import PlannedInstances, PoolsResult
from services.contracts.routing import EndpointList
from services.contracts.serving import InstancePod, InstanceState, PoolPlace, PoolSpec, ServerMode, ServerProbes
from services.core.domain.solving import Backend, SolveStatus
from services.db.database import prepare
from services.db.engine import create_engine
from services.engines.kueue.cluster import Cluster
from services.engines.kueue.scaling import BEFORE, SET
from services.engines.kueue.servers import Registrar, ServersSettings
from services.kit.bridges.silent import EngineSilentError
from services.kit.ids import utc_now
from services.kit.problems import ProblemError
from services.serving.clusters import Clusters
from services.serving.controller.controller import Controller
from services.serving.controller.pods import fitted
from services.serving.instances import Instance, InstanceTerms
from services.serving.planning.cluster import Node, gpus_by_place, misfits
from services.serving.repository import ServingRepository
from services.serving.routing import Routing
from services.serving.settings import ServingSettings
from tests.engines.kueue_cluster import KueueCluster
from tests.serving.world import Grid
from tests.support.controlled_pools import MODEL, Controlled
from tests.support.pools import a_partition, a_pool
from tests.support.servers import ROOT
from tests.support.services import TOKEN

LLAMA, BIG = "deployments", "leaderworkersets"
PLACES = [{"name": "here", "zone": "DE", "cluster": "eu", "gpus": {MODEL: 16}}]
MODES = [
    {"name": "one", "gpu_model": MODEL, "gpus": 1, "workload": {"name": "llama", "port": 9000, "min_replicas": 1}},
    {"name": "two", "gpu_model": MODEL, "gpus": 2, "workload": {"kind": "LeaderWorkerSet", "name": "llama-large"}},
]
PROBES = {"load_path": None, "drain_min_s": 0.0}
ONE, TWO = ("here", "one", "SS"), ("here", "two", "SS")
OPERATOR = Identity(tenant_id="acme", role=Role.OPERATOR, key_id="key")


def blocks(language: str) -> list[str]:
    """Return the examples of the documentation's section."""
    section = (ROOT / "docs/pools.md").read_text().partition("### On Kubernetes\n")[2].partition("\n### ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


class Plane:
    """The control plane as the registrar reaches it; it may be away, or its answers may be lost."""

    def __init__(self, clusters: Clusters) -> None:
        self.clusters, self.endpoints = clusters, dict[str, Any]()
        self.is_away = self.loses_answers = False

    async def call(self, method: str, path: str, kind: Any, *, body: Any = None, **_: Any) -> Any:
        if self.is_away:
            raise ProblemError(503, ProblemCode.UNAVAILABLE, "away")
        if kind is EndpointList:
            return EndpointList(items=[])
        assert (method, path) == ("POST", "/v1/clusters/eu/workloads")
        report = ClusterReport.model_validate_json(body.model_dump_json())
        orders = await self.clusters.report("eu", report, OPERATOR)
        if self.loses_answers:
            raise ProblemError(504, ProblemCode.UNAVAILABLE, "lost")
        return kind.model_validate_json(orders.model_dump_json())

    async def request(self, method: str, path: str, *, body: Any = None, **_: Any) -> None:
        name = path.removeprefix("/v1/endpoints/")
        if method == "PUT":
            self.endpoints[name] = body
        else:
            del self.endpoints[name]


class Site:
    """A cluster, its registrar and the control plane."""

    def __init__(self, api: KueueCluster, house: Controlled, plane: Plane, registrar: Registrar) -> None:
        self.api, self.house, self.plane, self.registrar = api, house, plane, registrar
        self.pool = ""

    def another_registrar(self) -> None:
        """Kill the registrar and start another one."""
        self.registrar = Registrar(self.registrar._settings, self.registrar._cluster, self.registrar._session)
        self.registrar._gateway = self.plane  # type: ignore[assignment]

    async def workload(self, plural: str, name: str, replicas: int) -> None:
        kind = {LLAMA: "Deployment", BIG: "LeaderWorkerSet"}[plural]
        meta = {"name": name, "namespace": "models"}
        await self.api.put(plural, {"kind": kind, "metadata": meta, "spec": {"replicas": replicas}})

    async def scale(self, plural: str, name: str, replicas: int) -> None:
        """Scale a workload as an admin does."""
        await self.api.put(plural, self.at(plural, name) | {"spec": {"replicas": replicas}})

    async def annotate(self, plural: str, name: str, **notes: str | None) -> None:
        patch = {"metadata": {"annotations": {f"wattshift.io/{key}": value for key, value in notes.items()}}}
        await self.api.merge(plural, f"models/{name}", patch, None)
        self.api.scalings.pop()

    def at(self, plural: str, name: str) -> dict[str, Any]:
        return self.api.at(plural, f"models/{name}")

    def count(self, plural: str, name: str) -> int:
        return self.at(plural, name)["spec"]["replicas"]

    def notes(self, plural: str, name: str) -> dict[str, str]:
        return self.at(plural, name)["metadata"].get("annotations", {})

    async def serving(self) -> set[str]:
        """Return the uids of the pods that the routers may be sending requests to."""
        rows = await self.house.rows(self.pool, "ready", "draining")
        return {row["pod"]["uid"] for row in rows if row["url"] and row["pod"]}

    async def turn(self, times: int = 1) -> list[str]:
        """Let everybody do their part; return the pods that were taken away."""
        taken: list[str] = []
        for _ in range(times):
            with contextlib.suppress(ProblemError):
                await self.registrar.look()
            taken += await self.api.run_pods()
            await self.house.look()
        return taken


@pytest.fixture
async def site(database_url: str, tmp_path: Path) -> AsyncIterator[Site]:
    engine = create_engine(database_url)
    settings = ServingSettings.model_validate(
        {"service_token": TOKEN, "instance_look_s": 60, "endpoint_networks": "10.8.0.0/16"}
    )
    parts: dict[str, Any] = {"jobs": None, "prober": None, "settings": settings}
    repository = ServingRepository(engine)
    key = tmp_path / "key"
    key.write_text("k\n")
    api = KueueCluster()
    async with (
        api.listening() as url,
        aiohttp.ClientSession() as session,
        contextlib.AsyncExitStack() as servers,
        asyncpg.create_pool(database_url, min_size=1, max_size=2, init=prepare) as database,
    ):
        await database.execute("INSERT INTO tenants (id, limits) VALUES ('acme', '{}') ON CONFLICT DO NOTHING")
        await database.execute("TRUNCATE pools, pool_plans, pool_instances")
        house = Controlled(database, engine, Controller(repository, **parts), None, servers, parts)
        configuration: Any = client.Configuration()
        configuration.host = url
        its_own = ServersSettings.model_validate(
            {
                "key_file": key,
                "namespace": "models",
                "node_id": "eu",
                "own_zone": "DE",
                "state_dir": tmp_path,
                "scales": yaml.safe_load(blocks("yaml")[0])["picker"]["scale"],
            }
        )
        async with client.ApiClient(configuration) as connected:
            plane = Plane(Clusters(repository, settings))
            made = Site(api, house, plane, Registrar(its_own, Cluster(its_own, connected), session))
            made.another_registrar()
            await made.workload(LLAMA, "llama", 2)
            await made.workload(BIG, "llama-large", 0)
            yield made
    await engine.dispose()


async def pool(site: Site, counts: dict[tuple[str, str, str | None], int] | None, **more: Any) -> str:
    partition = a_partition()
    for each in partition["classes"]:
        each["profiles"].append({"mode": "two", "max_qps": 20.0, "power_w": 500.0})
    spec = {"places": PLACES, "modes": MODES, "probes": PROBES, "partitions": [partition]}
    site.pool = await site.house.pool(counts, **{**spec, **more})
    return site.pool


async def test_a_plan_sets_replicas_and_pods_become_its_instances(site: Site) -> None:
    name = await pool(site, None)
    await site.turn(2)
    assert site.api.scalings == [], "without a plan, nothing is touched"
    await site.house.plan(name, {ONE: 3, TWO: 2})
    await site.turn(5)
    assert (site.count(LLAMA, "llama"), site.count(BIG, "llama-large")) == (3, 2)
    rows = await site.house.rows(name)
    assert Counter((row["state"], row["mode"]) for row in rows) == {("ready", "one"): 3, ("ready", "two"): 2}
    assert {row["url"].rpartition(":")[2] for row in rows} == {"9000", "8000"}
    assert len({row["url"] for row in rows}) == len({row["pod"]["uid"] for row in rows}) == 5
    assert {row["sealed_key"] for row in rows} == {None}, "no pod has ever heard of a key of ours"
    assert site.notes(LLAMA, "llama") == {SET: "3", BEFORE: "2"}
    before = len(site.api.scalings)
    await site.turn(3)
    assert len(site.api.scalings) == before, "what is as it should be is not written again"

    serving = await site.serving()
    await site.house.plan(name, {ONE: 0, TWO: 1})
    taken = await site.turn(6)
    assert (site.count(LLAMA, "llama"), site.count(BIG, "llama-large")) == (1, 1), (
        "and one Deployment has a least number"
    )
    assert {row["mode"]: row["state"] for row in await site.house.rows(name)} == {"two": "ready"}
    assert len(serving & set(taken)) == 3
    await site.house.plan(name, {ONE: 1, TWO: 1})
    await site.turn(3)
    assert await site.house.states(name) == ["ready"] * 2, "the pod that was kept serves at once"


async def test_the_examples_of_the_documentation_do_what_it_says(site: Site) -> None:
    document = json.loads((ROOT / "examples/pools/on-kubernetes.json").read_text())
    (shown,) = [json.loads(each) for each in blocks("json")]
    for kind, items in shown.items():
        assert all(item in document[kind] for item in items)
    name = await pool(site, None, **document)
    await site.house.plan(name, {("frankfurt", "tp2", "any"): 3, ("california", "tp2", "any"): 5})
    await site.turn(5)
    assert (site.count(LLAMA, "llama"), site.count(BIG, "llama-large")) == (3, 0)
    assert site.notes(LLAMA, "llama") == {"wattshift.io/replicas": "3", "wattshift.io/replicas-before": "2"}
    states = Counter((row["place"], row["state"]) for row in await site.house.rows(name))
    assert states == {("frankfurt", "ready"): 3, ("california", "wanted"): 5}, "nobody in that cluster is here"
    await site.scale(LLAMA, "llama", 6)  # kubectl scale
    await site.turn(2)
    assert site.count(LLAMA, "llama") == 6
    await site.annotate(LLAMA, "llama", replicas=None)  # kubectl annotate deployment llama wattshift.io/replicas-
    await site.turn(2)
    assert site.count(LLAMA, "llama") == 3
    await site.house.database.execute("UPDATE pools SET deleted_at = now() WHERE name = $1", name)
    await site.turn(5)
    assert (site.count(LLAMA, "llama"), site.notes(LLAMA, "llama")) == (2, {})


async def test_a_pool_that_is_deleted_gives_back_the_counts(site: Site) -> None:
    name = await pool(site, {ONE: 4})
    await site.turn(4)
    assert site.count(LLAMA, "llama") == 4
    await site.house.database.execute("UPDATE pools SET deleted_at = now() WHERE name = $1", name)
    taken = await site.turn(5)
    assert await site.house.rows(name) == []
    assert site.count(LLAMA, "llama") == 2
    assert (len(taken), site.notes(LLAMA, "llama"), site.notes(BIG, "llama-large")) == (2, {}, {})


async def test_routers_send_requests_to_pods_as_to_the_pools_other_instances(site: Site) -> None:
    await pool(site, {ONE: 1}, models=["llama"])
    await site.turn(4)
    grid = Grid()
    grid.gco2_per_kwh = {"DE": 300.0}
    routing = Routing(ServingRepository(site.house.engine), grid, site.house.clients["settings"])
    (server,) = (await routing.table()).servers
    (row,) = await site.house.rows(site.pool)
    assert (server.id, server.url, server.location, server.request_class) == (row["id"], row["url"], "here", "SS")
    assert (server.gco2_per_kwh, server.power_w, server.is_power_measured) == (300.0, 300.0, False)
    assert (server.job_id, server.node_id, server.upstream_secret_set_at) == (None, None, None)


async def test_what_others_set_stays_and_is_shown(site: Site) -> None:
    name = await pool(site, {ONE: 3})
    await site.turn(4)
    await site.scale(LLAMA, "llama", 2)
    await site.turn(4)
    assert site.count(LLAMA, "llama") == 2
    (waits,) = await site.house.rows(name, "starting")
    assert (waits["reason"], "Somebody else set 2 replicas" in waits["detail"]) == ("scaled_by_others", True)
    await site.house.plan(name, {ONE: 1})
    await site.turn(4)
    assert site.count(LLAMA, "llama") == 2, "nor less"
    assert await site.house.states(name) == ["ready"]
    await site.annotate(LLAMA, "llama", replicas=None)
    await site.turn(4)
    assert site.count(LLAMA, "llama") == 1
    assert site.notes(LLAMA, "llama") == {SET: "1", BEFORE: "2"}


async def test_a_workload_with_an_autoscaler_is_left_to_it(site: Site) -> None:
    spec = {"scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "llama"}}
    await site.api.put("horizontalpodautoscalers", {"metadata": {"name": "keda", "namespace": "models"}, "spec": spec})
    name = await pool(site, {ONE: 3, TWO: 1})
    await site.turn(5)
    assert (site.count(LLAMA, "llama"), site.count(BIG, "llama-large")) == (2, 1)
    assert site.notes(LLAMA, "llama") == {}
    rows = await site.house.rows(name)
    assert sorted((row["state"], row["reason"]) for row in rows if row["mode"] == "one") == [
        ("ready", None),
        ("ready", None),
        ("starting", "scaled_by_others"),
    ]
    assert "HorizontalPodAutoscaler keda" in next(row["detail"] for row in rows if row["reason"])


async def test_a_pod_that_is_gone_is_replaced_by_another_and_none_is_drained_for_it(site: Site) -> None:
    name = await pool(site, {ONE: 2})
    await site.turn(4)
    ids = {row["id"] for row in await site.house.rows(name)}
    lost = site.api.pods_of(LLAMA, "models/llama")[0]["metadata"]
    await site.api.delete("pods", f"models/{lost['name']}")
    with contextlib.suppress(ProblemError):
        await site.registrar.look()
    await site.house.look()
    assert sorted(await site.house.states(name)) == ["ready", "starting"]
    await site.turn(4)
    assert await site.house.states(name) == ["ready", "ready"]
    assert {row["id"] for row in await site.house.rows(name)} == ids
    assert lost["uid"] not in await site.serving()


async def test_pods_that_are_instances_are_no_endpoints_and_others_still_are(site: Site) -> None:
    said = {"wattshift.io/models": "llama"}
    spec = {"selector": {"matchLabels": {"app": "llama"}}, "targetPorts": [{"number": 9000}]}
    meta = {"name": "llama", "namespace": "models", "annotations": said}
    await site.api.put("inferencepools", {"metadata": meta, "spec": spec})
    await site.turn(3)
    assert len(site.plane.endpoints) == 2
    await pool(site, {ONE: 2})
    await site.turn(3)
    assert site.plane.endpoints == {}
    await site.scale(LLAMA, "llama", 3)
    await site.turn(4)
    assert len(site.plane.endpoints) == 1, "an admin's third one serves as well"


async def test_without_the_control_plane_or_the_cluster_everything_stays(site: Site) -> None:
    name = await pool(site, {ONE: 3})
    await site.turn(4)
    rows = await site.house.rows(name)
    await site.house.plan(name, {ONE: 1})
    site.plane.is_away = True
    await site.turn(3)
    assert site.count(LLAMA, "llama") == 3
    assert len(await site.serving()) >= 1
    site.plane.is_away = False
    site.another_registrar()
    await site.turn(5)
    assert site.count(LLAMA, "llama") == 1
    (row,) = await site.house.rows(name)
    assert row["id"] in {each["id"] for each in rows}


async def test_a_cluster_that_nobody_has_heard_of_holds_up_no_deletion(site: Site) -> None:
    name = await pool(site, {("here", "one", "SS"): 2}, places=[PLACES[0] | {"cluster": "elsewhere"}])
    await site.turn(3)
    assert {(row["state"], row["reason"]) for row in await site.house.rows(name)} == {("wanted", "cluster_silent")}
    assert site.api.scalings == []
    await site.house.database.execute("UPDATE pools SET deleted_at = now() WHERE name = $1", name)
    await site.turn(3)
    assert await site.house.database.fetchval("SELECT count(*) FROM pools") == 0


async def test_a_cluster_that_is_gone_for_good_holds_up_no_deletion_for_ever(site: Site) -> None:
    name = await pool(site, {ONE: 1})
    await site.turn(4)
    site.plane.is_away = True
    await site.house.database.execute("UPDATE pools SET deleted_at = now() WHERE name = $1", name)
    await site.turn(3)
    (row,) = await site.house.rows(name, "stopping")
    await site.house.date_back(row["id"], "stopping_at", 601)
    await site.turn(2)
    assert await site.house.database.fetchval("SELECT count(*) FROM pools") == 0
    assert site.count(LLAMA, "llama") == 1, "nobody has told the cluster"


async def test_another_tenant_moves_nothing(site: Site) -> None:
    name = await pool(site, {ONE: 1})
    pod = ClusterPod(uid="u", name="p", address="10.8.0.66", ready=True)
    report = ClusterReport(workloads=[WorkloadReport(name="llama", replicas=1, pods=[pod])])
    stranger = Identity(tenant_id="other", role=Role.OPERATOR, key_id="key")
    await site.house.look()
    orders = await site.plane.clusters.report("eu", report, stranger)
    await site.house.look()
    assert [each.replicas for each in orders.workloads] == [None], "no pool of that tenant names it"
    assert {row["pod"] for row in await site.house.rows(name)} == {None}


async def test_an_address_outside_the_networks_gets_no_requests(site: Site) -> None:
    name = await pool(site, {ONE: 1})
    await site.house.look()
    pod = ClusterPod(uid="u", name="p", address="169.254.169.254", ready=True)
    report = ClusterReport(workloads=[WorkloadReport(name="llama", replicas=1, pods=[pod])])
    await site.plane.clusters.report("eu", report, OPERATOR)
    await site.house.look(2)
    (row,) = await site.house.rows(name)
    assert (row["state"], row["reason"], row["url"]) == ("starting", "refused", None)


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_fails_on_the_way_counts_follow_plans_and_admins_win(site: Site, seed: int) -> None:
    """Plans, admins, kills, lost answers, lost pods, and either side that is away, in any order."""
    draw = random.Random(seed)
    name = await pool(site, {ONE: 2, TWO: 1})
    planned = {"one": 2, "two": 1}
    foreign = {LLAMA: False, BIG: False}
    names = {LLAMA: "llama", BIG: "llama-large"}
    for _ in range(40):
        match draw.randrange(10):
            case 0 | 1:
                planned = {"one": draw.randrange(5), "two": draw.randrange(4)}
                await site.house.plan(name, {ONE: planned["one"], TWO: planned["two"]})
            case 2:
                site.plane.is_away = not site.plane.is_away
            case 3:
                site.plane.loses_answers = not site.plane.loses_answers
            case 4:
                site.another_registrar()
            case 5:
                plural = draw.choice([LLAMA, BIG])
                if SET in site.notes(plural, names[plural]):
                    await site.scale(plural, names[plural], site.count(plural, names[plural]) + draw.choice([1, 2]))
                    foreign[plural] = True
            case 6:
                for plural, each in names.items():
                    await site.annotate(plural, each, replicas=None)
                    foreign[plural] = False
            case 7:
                pods = list(site.api.objects["pods"])
                if pods:
                    await site.api.delete("pods", draw.choice(pods))
            case 8:
                site.api.down = not site.api.down
            case _:
                pass
        serving = await site.serving()
        counts = {plural: site.count(plural, each) for plural, each in names.items()}
        with contextlib.suppress(ProblemError, EngineSilentError):
            await site.registrar.look()
        for plural, each in names.items():
            if foreign[plural]:
                assert site.count(plural, each) == counts[plural], "an admin's count stays"
        taken = set(await site.api.run_pods())
        assert not taken & serving & await site.serving(), "none is taken away that may have requests"
        await site.house.look()
        rows = await site.house.rows(name)
        uids = [row["pod"]["uid"] for row in rows if row["pod"] and row["pod"]["uid"]]
        assert len(uids) == len(set(uids)), "no pod is two instances"
    site.plane.is_away = site.plane.loses_answers = site.api.down = False
    for plural, each in names.items():
        await site.annotate(plural, each, replicas=None)
    await site.turn(12)
    assert site.count(LLAMA, "llama") == max(planned["one"], 1)
    assert site.count(BIG, "llama-large") == planned["two"]
    assert Counter(row["mode"] for row in await site.house.rows(name, "ready")) == +Counter(planned)
    assert set(await site.house.states(name)) <= {"ready"}
    for key, was, is_now in site.api.scalings:
        noted = was["metadata"].get("annotations", {}).get(SET)
        assert noted in (None, str(was["spec"]["replicas"])), f"{key} had another owner"
        assert is_now["spec"]["replicas"] >= (1 if key == "models/llama" else 0)


async def test_a_change_between_reading_and_writing_is_never_overwritten(site: Site) -> None:
    await pool(site, {ONE: 4})
    await site.house.look()
    read = site.registrar._cluster.workload

    async def changed(namespace: str, of: Any) -> Any:
        found = await read(namespace, of)
        if of.name == "llama":
            await site.scale(LLAMA, "llama", 7)
        return found

    site.registrar._cluster.workload = changed  # type: ignore[method-assign]
    await site.registrar.look()
    assert (site.count(LLAMA, "llama"), site.api.conflicts) == (7, 1)
    site.registrar._cluster.workload = read  # type: ignore[method-assign]
    await site.turn(3)
    assert site.notes(LLAMA, "llama") == {SET: "4", BEFORE: "7"}


async def test_a_workload_that_may_not_be_changed_keeps_no_other_back(site: Site) -> None:
    name = await pool(site, {ONE: 3, TWO: 2})
    site.api.guarded = {"models/llama"}
    await site.turn(5)
    assert (site.count(LLAMA, "llama"), site.count(BIG, "llama-large")) == (2, 2)
    assert Counter(row["state"] for row in await site.house.rows(name)) == {"ready": 4, "starting": 1}


TERMS = InstanceTerms(
    place=PoolPlace.model_validate(PLACES[0]), mode=ServerMode.model_validate(MODES[0]), probes=ServerProbes()
)
STATES = [state for state in InstanceState if state is not InstanceState.ENDED]


@given(
    states=st.lists(st.tuples(st.sampled_from(STATES), st.none() | st.integers(0, 6)), max_size=6),
    pods=st.sets(st.integers(0, 6)),
    are_groups=st.booleans(),
    planned=st.integers(0, 5),
    least=st.integers(0, 3),
)
@example(states=[(InstanceState.READY, 5)], pods={0, 5}, are_groups=True, planned=0, least=0)
def test_pods_fit_instances(
    states: list[tuple[InstanceState, int | None]], pods: set[int], are_groups: bool, planned: int, least: int
) -> None:
    held = set[int]()
    instances: list[Instance] = []
    for number, (state, pod) in enumerate(states):
        pod = None if pod in held else pod
        held |= set() if pod is None else {pod}
        known = None if pod is None else InstancePod(uid=f"u{pod}", name=f"p{pod}", since=utc_now())
        instances.append(Instance(f"i{number}", "chat", "acme", "here", "one", state, TERMS, utc_now(), pod=known))
    found = [
        ClusterPod(uid=f"u{each}", name=f"p{each}", ready=True, ordinal=each if are_groups else 0) for each in pods
    ]
    report = WorkloadReport(name="llama", replicas=len(found), pods=found)
    fit = fitted(report, instances, {"chat": planned}, least)
    assert fit.replicas is not None
    stay = [each for each in instances if each.state is not InstanceState.STOPPING]
    assert fit.replicas >= max(len(stay), planned, least)
    given_uids = [pod.uid for pod in fit.given.values() if pod]
    assert len(given_uids) == len(set(given_uids))
    for each in instances:
        if each.id in fit.gone:
            assert each.state is InstanceState.STOPPING
        elif each.pod and each.pod.uid in {pod.uid for pod in found}:
            given_pod = fit.given[each.id]
            assert given_pod is not None
            assert given_pod.uid == each.pod.uid, "none loses a pod that is there"
    for each in stay:
        pod = fit.given[each.id]
        assert pod is None or pod.name not in fit.leave
        had = each.pod is not None and each.pod.uid in {one.uid for one in found}
        assert not (are_groups and pod and had) or pod.ordinal < fit.replicas, "its group is not among those that go"
    if len(found) > fit.replicas:
        assert len(fit.leave) >= len(found) - fit.replicas, "there is somebody to go"
    others = fitted(report.model_copy(update={"left_alone": "x"}), instances, {"chat": planned}, least)
    assert others.replicas is None
    assert not any(each.state is InstanceState.STOPPING and each.id not in others.gone for each in instances)


def test_a_cluster_is_planned_with_what_its_pool_may_have_there() -> None:
    spec = PoolSpec.model_validate(a_pool(places=PLACES, modes=MODES))
    nodes = [Node("DE", {}, {MODEL: 8})] * 3  # with agents, in the same zone
    (here,) = gpus_by_place(spec, nodes).values()
    assert (here.models, here.fits, here.nodes) == ({MODEL: 16}, {"one": 16, "two": 8}, {MODEL: []})
    assert gpus_by_place(spec, nodes) == gpus_by_place(spec, [])
    assert not misfits(spec, _plan(16), nodes)
    assert misfits(spec, _plan(17), nodes) == ["here"]


def _plan(count: int) -> PoolsResult:
    planned = PlannedInstances(location="here", mode="one", request_class="SS", count=count, power_w=300)
    return PoolsResult(status=SolveStatus.OPTIMAL, solver=Backend.HIGHS, partition="halves", instances=[planned])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"places": [{"name": "here", "zone": "DE"}]}, "either all places have a cluster and all modes a workload"),
        ({"places": [PLACES[0] | {"gpus": None}]}, "say by `gpus` how many"),
        ({"places": [*PLACES, PLACES[0] | {"name": "there"}]}, "places name the cluster eu twice"),
        ({"modes": [MODES[0], MODES[0] | {"name": "two"}]}, "modes name the workload Deployment/llama twice"),
        ({"modes": [MODES[0] | {"command": ["serve"]}]}, "its workload says what it runs"),
        ({"modes": [MODES[0] | {"workload": {"name": "../secrets"}}]}, "String should match pattern"),
        ({"clocks": {"policy": "learned"}}, "nobody sets the clocks"),
    ],
)
def test_a_pool_on_clusters_that_cannot_be_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as refused:
        PoolSpec.model_validate(a_pool(**{"places": PLACES, "modes": MODES[:1], **change}))
    assert said in str(refused.value)
