"""The bridge to Kueue, by the official client, against a stand-in that checks its objects by Kueue's schemas."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.engines import (
    EngineAction,
    EngineDecision,
    EngineJob,
    EngineJobState,
    EngineMode,
    EngineReply,
    EngineReport,
)
from services.engines.kueue.bridge import Bridge
from services.engines.kueue.cluster import Cluster
from services.engines.kueue.reading import DEADLINE, Flavored, Queues, Workload, workload_of
from services.engines.kueue.settings import KueueSettings
from services.engines.kueue.steering import STOPS, _boosts, nodes_of
from services.kit.bridges.talk import Talk
from services.kit.ids import utc_now
from services.kit.problems import ProblemError
from services.telemetry.repository.credentials import sha256
from services.telemetry.repository.engines import mirror
from tests.engines.kueue_cluster import CHECK, REPLACES, KueueCluster, a_workload, condition, furnish
from tests.engines.plane import Plane
from tests.scheduler.world import World

HELD_FOR = timedelta(hours=3)


class Site:
    """Kueue, the bridge, and what the control plane wants."""

    def __init__(self, kueue: KueueCluster, bridge: Bridge, plane: Any) -> None:
        self.kueue, self.bridge, self.plane = kueue, bridge, plane

    async def settle(self, is_so: Callable[[], bool]) -> None:
        """Let everybody do their part until it is so."""
        async with asyncio.timeout(30):
            while not is_so():
                await self.kueue.step()
                with contextlib.suppress(ProblemError):
                    await self.bridge.look()
                await asyncio.sleep(0.02)

    def check(self, name: str) -> dict[str, Any]:
        found = self.kueue.at("workloads", f"team/{name}").get("status", {}).get("admissionChecks")
        return found[0] if found else {}

    def state(self, name: str) -> str | None:
        return self.check(name).get("state")

    def runs(self, name: str) -> bool:
        conditions = self.kueue.at("workloads", f"team/{name}").get("status", {}).get("conditions", [])
        return {"Admitted"} <= {each["type"] for each in conditions}


def kubeconfig(folder: Path, url: str) -> Path:
    path = folder / "kubeconfig"
    document = {
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(yaml.safe_dump(document))
    return path


@contextlib.asynccontextmanager
async def a_site(folder: Path, plane: Any, **options: Any) -> AsyncIterator[Site]:
    kueue = KueueCluster(options.pop("version", "v1beta2"))
    await furnish(kueue)
    async with kueue.listening() as url:
        settings = KueueSettings(
            kubeconfig=kubeconfig(folder, url),
            state_dir=folder,
            mode=options.pop("mode", EngineMode.CONTROL),
            **options,
        )
        async with Cluster.connected(settings) as cluster:
            bridge = Bridge(settings, cluster, plane)
            watching = asyncio.create_task(bridge._watch())
            yield Site(kueue, bridge, plane)
            watching.cancel()
            await asyncio.wait([watching])


async def test_a_workload_that_wants_notice_is_told_before_it_is_evicted(tmp_path: Path) -> None:
    async with a_site(tmp_path, Plane()) as site:
        notice = {"wattshift.io/stoppable": "true", "wattshift.io/notice-s": "600"}
        await site.kueue.put("workloads", a_workload("train", 4, **notice))
        site.plane.decide("team/train", EngineAction.RELEASE, note="released")
        await site.settle(lambda: site.runs("train"))

        def told() -> str | None:
            return site.kueue.at("workloads", "team/train")["metadata"].get("annotations", {}).get(STOPS)

        site.plane.decide("team/train", EngineAction.REQUEUE, note="stopped:greener_hours")
        await site.settle(lambda: told() is not None)
        stops_at = told()
        assert stops_at is not None
        assert timedelta(seconds=500) < datetime.fromisoformat(stops_at) - utc_now() <= timedelta(seconds=600)
        for _ in range(3):
            await site.bridge.look()
        assert (site.runs("train"), site.state("train"), told()) == (True, "Ready", stops_at), "it is not put off"

        site.plane.decide("team/train", EngineAction.RELEASE, note="released")
        await site.settle(lambda: told() is None)
        assert site.runs("train")
        site.plane.decide("team/train", EngineAction.REQUEUE, note="stopped:greener_hours")
        await site.settle(lambda: told() is not None)
        for written in ("2999-01-01T00:00:00Z", "soon", "2026-01-01T00:00:00"):
            await site.kueue.merge("workloads", "team/train", {"metadata": {"annotations": {STOPS: written}}}, None)
            await site.settle(lambda: told() not in (None, written))  # noqa: B023
            assert site.runs("train"), "whoever writes over it neither puts it off nor ends it"
        past = f"{utc_now() - timedelta(seconds=1):%Y-%m-%dT%H:%M:%SZ}"
        await site.kueue.merge("workloads", "team/train", {"metadata": {"annotations": {STOPS: past}}}, None)
        await site.settle(lambda: not site.runs("train"))
        await site.settle(lambda: told() is None)


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
async def test_a_workload_waits_for_its_hour_runs_is_evicted_and_ends(tmp_path: Path, version: str) -> None:
    async with a_site(tmp_path, Plane(), version=version) as site:
        await site.kueue.put("workloads", a_workload("train", 4))
        until = utc_now() + HELD_FOR
        site.plane.decide("team/train", EngineAction.HOLD, note="waits:greener_hours", until=until, gco2=61.4)
        await site.settle(lambda: site.check("train").get("message") == "waits:greener_hours")
        annotations = site.kueue.at("workloads", "team/train")["metadata"]["annotations"]
        assert site.state("train") == "Pending"
        assert annotations["wattshift.io/expected-start"] == f"{until:%Y-%m-%dT%H:%M:%SZ}"
        assert annotations["wattshift.io/expected-gco2"] == "61"

        site.plane.decide("team/train", EngineAction.RELEASE, note="released")
        await site.settle(lambda: site.runs("train") and site.plane.last("team/train").state == "running")
        (share,) = site.plane.last("team/train").shares
        assert (share.node, len(share.devices)) == ("research.h100", 4)

        site.plane.decide("team/train", EngineAction.REQUEUE, note="stopped:greener_hours", until=until)
        await site.settle(lambda: not site.runs("train") and site.plane.last("team/train").state == "pending")
        site.plane.decide("team/train", EngineAction.RELEASE, note="released")
        site.kueue.ahead_s = 600.0
        await site.settle(lambda: site.runs("train"))
        await site.kueue.finish("team/train")
        await site.settle(lambda: site.plane.last("team/train").state == "succeeded")
        (active,) = site.kueue.at("admissionchecks", CHECK)["status"]["conditions"]
        assert (active["type"], active["status"]) == ("Active", "True")


async def test_what_is_held_gives_its_quota_to_what_is_released(tmp_path: Path) -> None:
    async with a_site(tmp_path, Plane()) as site:
        await site.kueue.put("workloads", a_workload("a-first", 8))
        site.plane.decide("team/a-first", EngineAction.HOLD, note="waits:greener_hours", until=utc_now() + HELD_FOR)
        await site.settle(lambda: site.check("a-first").get("message") == "waits:greener_hours")
        await site.kueue.put("workloads", a_workload("b-second", 8))
        site.plane.decide("team/b-second", EngineAction.RELEASE, note="released")
        await site.settle(lambda: site.runs("b-second"))
        assert not site.runs("a-first")
        asked = [
            check.get("requeueAfterSeconds", 0)
            for _, _, plural, document in site.kueue.events
            if plural == "workloads" and document["metadata"]["name"] == "a-first"
            for check in document.get("status", {}).get("admissionChecks", ())
        ]
        assert max(asked) == 600, "Kueue does not try it again at once, nor so late that a new plan would not matter"


@pytest.mark.parametrize("why", ["dry_run", "opted_out", "silent"])
async def test_whom_nobody_steers_is_admitted(tmp_path: Path, why: str) -> None:
    options: dict[str, Any] = {"mode": EngineMode.DRY_RUN} if why == "dry_run" else {"silence_s": 0.2}
    async with a_site(tmp_path, Plane(), **options) as site:
        site.plane.silent = why == "silent"
        annotations = {"wattshift.io/steer": "off"} if why == "opted_out" else {}
        site.plane.decide("team/train", EngineAction.HOLD, note="waits:greener_hours", until=utc_now() + HELD_FOR)
        await site.kueue.put("workloads", a_workload("train", 2, **annotations))
        await site.settle(lambda: site.runs("train"))


async def test_answers_to_another_version_are_refused_and_given_again(tmp_path: Path) -> None:
    async with a_site(tmp_path, Plane()) as site:
        await site.kueue.put("workloads", a_workload("train", 2))
        await site.settle(lambda: site.state("train") == "Pending" and bool(site.plane.reports))
        uid = site.kueue.at("workloads", "team/train")["metadata"]["uid"]
        seen = site.bridge._workloads[uid]
        await site.kueue.merge("workloads", "team/train", {"metadata": {"labels": {"touched": "yes"}}}, None)
        site.bridge._workloads[uid] = seen
        site.bridge.take([EngineDecision(external_id=uid, revision=1, action=EngineAction.RELEASE, note="released")])
        await site.bridge.look()
        assert (site.kueue.conflicts, site.state("train")) == (1, "Pending")
        site.plane.decide("team/train", EngineAction.RELEASE, note="released")
        await site.settle(lambda: site.runs("train"))


async def test_a_cancelled_job_leaves_its_queue_and_a_deleted_one_is_over(tmp_path: Path) -> None:
    async with a_site(tmp_path, Plane()) as site:
        for name in ("one", "two"):
            await site.kueue.put("workloads", a_workload(name, 2))
            site.plane.decide(f"team/{name}", EngineAction.RELEASE, note="released")
        await site.settle(lambda: site.runs("one") and site.runs("two"))
        site.plane.decide("team/one", EngineAction.CANCEL)
        await site.settle(lambda: site.plane.last("team/one").state == "cancelled")
        assert site.kueue.at("workloads", "team/one")["spec"]["active"] is False
        await site.kueue.delete("workloads", "team/two")
        await site.settle(lambda: site.plane.last("team/two").state == "cancelled")
        assert site.plane.last("team/two").detail == "Its workload was deleted."


async def test_an_api_server_that_forgets_or_is_away_is_listed_anew(tmp_path: Path) -> None:
    async with a_site(tmp_path, Plane()) as site:
        await site.kueue.put("workloads", a_workload("train", 2))
        await site.settle(lambda: bool(site.plane.reports) and site.plane.last("team/train").state == "pending")
        site.kueue.down = True
        await asyncio.sleep(0.5)
        site.kueue.oldest = 10**9
        site.kueue.events.clear()
        site.kueue.down = False
        await site.kueue.put("workloads", a_workload("later", 2))
        await asyncio.sleep(0.1)
        site.kueue.oldest = 0
        site.plane.decide("team/later", EngineAction.RELEASE, note="released")
        await site.settle(lambda: site.runs("later"))


async def test_garbage_in_workloads_is_left_alone(tmp_path: Path) -> None:
    async with a_site(tmp_path, Plane()) as site:
        site.kueue.objects["workloads"]["team/odd"] = {
            "metadata": {"namespace": "team", "name": "odd", "uid": 3, "resourceVersion": "1"},
            "spec": {"podSets": [None, {"count": "x"}], "queueName": 7},
            "status": {"conditions": "none", "admissionChecks": [4]},
        }
        site.plane.decide("team/train", EngineAction.RELEASE, note="released")
        del site.kueue.objects["workloads"]["team/odd"]["spec"]["queueName"]
        await site.kueue.put("workloads", a_workload("train", 2))
        odd = site.kueue.objects["workloads"].pop("team/odd")
        site.bridge._take_event("ADDED", odd)
        await site.settle(lambda: site.runs("train"))


BOOST, BOOSTED = "kueue.x-k8s.io/priority-boost", "wattshift.io/priority-boost"


def notes_of(site: Site, name: str) -> dict[str, str]:
    return site.kueue.at("workloads", f"team/{name}")["metadata"].get("annotations", {})


async def test_workloads_get_their_quota_in_the_order_of_the_plan_and_preempt_nothing(tmp_path: Path) -> None:
    async with a_site(tmp_path, Plane(), order=True) as site:
        names = ["a", "b", "c", "d"]
        for name in ("first", *names):
            await site.kueue.put("workloads", a_workload(name, 8))
            site.plane.decide(f"team/{name}", EngineAction.RELEASE, note="released")
            if name == "first":
                await site.settle(lambda: site.runs("first"))
        site.plane.order = [f"team/{name}" for name in reversed(names)]
        await site.kueue.merge("workloads", "team/b", {"metadata": {"annotations": {BOOST: "-9"}}}, None)  # an admin's
        for running, wanted, behind in (("first", "d", "cba"), ("d", "c", "ba"), ("c", "a", "b"), ("a", "b", "")):
            await site.settle(
                lambda wanted=wanted, behind=behind: (
                    all(BOOST in notes_of(site, each) for each in behind)
                    and (wanted == "b" or BOOST not in notes_of(site, wanted))
                )
            )
            await site.kueue.finish(f"team/{running}")
            await site.settle(lambda wanted=wanted: site.runs(wanted))
        await site.settle(lambda: BOOSTED not in notes_of(site, "b"))
        assert notes_of(site, "b")[BOOST] == "-9", "what an admin has set stays"
        assert not any(BOOST in notes_of(site, name) for name in ("a", "c", "d")), "what runs has its own priority"
        assert site.kueue.preempted == []


async def test_the_order_is_given_back_when_nobody_says_it_any_more(tmp_path: Path) -> None:
    async with a_site(tmp_path, Plane(), order=True, silence_s=0.2) as site:
        for name in ("a", "b"):
            await site.kueue.put("workloads", a_workload(name, 9))  # more than there is
            site.plane.decide(f"team/{name}", EngineAction.RELEASE, note="released")
        site.plane.order = ["team/b", "team/a"]
        await site.settle(lambda: notes_of(site, "a").get(BOOST) == "-1")
        assert BOOST not in notes_of(site, "b")
        site.plane.silent = True
        await site.settle(lambda: not {BOOST, BOOSTED} & notes_of(site, "a").keys())


@given(
    priorities=st.lists(st.sampled_from([0, 1, 5, 100]), min_size=1, max_size=12),
    reserved=st.sets(st.integers(0, 11)),
    data=st.data(),
)
def test_an_order_never_passes_a_higher_priority_nor_what_has_its_quota(
    priorities: list[int], reserved: set[int], data: st.DataObject
) -> None:
    workloads: list[Workload] = []
    for number, priority in enumerate(priorities):
        document = a_workload(f"w{number}", 2)
        document["metadata"] |= {
            "uid": f"u{number}",
            "resourceVersion": "1",
            "creationTimestamp": "2026-11-28T00:00:00Z",
        }
        document["spec"]["priority"] = priority
        if number in reserved:
            document["status"] = {"conditions": [condition("QuotaReserved", "True", "")]}
        read = workload_of(document, "nvidia.com/gpu")
        assert read is not None
        workloads.append(read)
    order = data.draw(st.permutations([each.uid for each in workloads]))
    queues = Queues(clusters={("team", "gpus"): "research"}, checked={"research": frozenset({CHECK})})
    found = _boosts(workloads, queues, order)
    effective = {each.uid: each.priority + found.get(each.uid, 0) for each in workloads}
    waiting = [each for each in workloads if not each.reserved]
    assert found.keys() == {each.uid for each in waiting}
    for one in waiting:
        assert effective[one.uid] <= one.priority, "what has its quota is preempted by none of its own priority"
        for other in waiting:
            if one.priority < other.priority:
                assert effective[one.uid] < effective[other.uid]
            elif one.priority == other.priority and order.index(one.uid) < order.index(other.uid):
                assert effective[one.uid] >= effective[other.uid]
    if len(set(priorities)) == 1:
        ranked = sorted(waiting, key=lambda each: -effective[each.uid])
        assert [each.uid for each in ranked] == [uid for uid in order if uid in found], "no two are alike"


async def test_an_elastic_job_grows_at_once_and_is_never_held_while_it_runs(tmp_path: Path) -> None:
    async with a_site(tmp_path, Plane()) as site:
        await site.kueue.put("workloads", a_workload("small", 4))
        site.plane.decide("team/small", EngineAction.RELEASE, note="released")
        await site.settle(lambda: site.runs("small"))
        site.plane.decide("team/large", EngineAction.HOLD, note="waits:greener_hours", until=utc_now() + HELD_FOR)
        larger = a_workload("large", 8)
        larger["metadata"]["annotations"] = {REPLACES: "team/small", "kueue.x-k8s.io/workload-slice-name": "small"}
        await site.kueue.put("workloads", larger)
        await site.settle(lambda: site.runs("large") and site.plane.last("team/small").state == "succeeded")
        now = site.plane.last("team/large")
        assert (now.steered, now.why_not) == (False, "it changes the size of a job that runs")
        await site.settle(lambda: sum(len(share.devices) for share in site.plane.last("team/large").shares) == 8)


class Scheduling:
    """The real control plane: reports are mirrored, the scheduler turns, and its commands reach the bridge."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.bridge: Bridge | None = None
        self._read = 0

    async def call(self, what: str, report: EngineReport, answer: type[EngineReply], timeout_s: float) -> EngineReply:
        found = await mirror(self.world.database, "kueue", "token", report, 60, "Z")
        assert found is not None
        await self.world.scheduler.turn()
        rows = await self.world.fetch(
            "SELECT id, payload FROM outbox WHERE payload ->> 'type' = 'direct' AND id > $1 ORDER BY id", self._read
        )
        for row in rows:
            self._read = row["id"]
            assert self.bridge is not None
            self.bridge.take([EngineDecision.model_validate(each) for each in row["payload"]["decisions"]])
        return found[0]


async def test_a_policy_admits_workloads_as_it_would_start_jobs(world: World, tmp_path: Path) -> None:
    await world.fetch(
        "INSERT INTO nodes (id, token_sha256, address, agent_url, zone, driver, containers, host_power, devices) "
        "VALUES ('kueue', $1, '', '', 'Z', 'engine', false, 'modelled', '[]')",
        sha256("token"),
    )
    plane = Scheduling(world)
    async with a_site(tmp_path, plane) as site:
        plane.bridge = site.bridge
        await site.kueue.put("workloads", a_workload("train", 4))
        await site.settle(lambda: site.runs("train"))
        await site.bridge.look()
        (job,) = await world.fetch("SELECT state, engine, spec FROM jobs")
        assert (job["state"], job["engine"], job["spec"]["gpus"]["min"]) == ("running", "kueue", 4)
        claims = await world.fetch("SELECT node_id, device FROM device_claims ORDER BY device")
        assert [tuple(row) for row in claims] == [("kueue.research.h100", device) for device in range(4)]
        await site.kueue.finish("team/train")
        await asyncio.sleep(0.2)
        await site.bridge.look()
        assert [row["state"] for row in await world.fetch("SELECT state FROM jobs")] == ["succeeded"]
        assert not await world.fetch("SELECT FROM device_claims")


async def test_terms_that_no_report_can_have_cost_no_other_workload_its_own(tmp_path: Path) -> None:
    """Kueue takes limits of up to 68 years, and annotations are any text."""
    async with a_site(tmp_path, Plane()) as site:
        endless = a_workload("endless", 2)
        endless["spec"]["maximumExecutionTimeSeconds"] = 2**31 - 1
        endless["metadata"]["annotations"] = {DEADLINE: "9999-12-31T23:59:59+00:00"}
        await site.kueue.put("workloads", endless)
        await site.kueue.put("workloads", a_workload("train", 2))

        await site.settle(lambda: bool(site.plane.reports))

    said = {each.number: each for report in site.plane.reports for each in report.jobs}
    assert sorted(said) == ["team/endless", "team/train"]
    assert (said["team/endless"].time_limit_s, said["team/endless"].deadline) == (1e9, None)


async def test_a_workload_that_may_not_be_changed_costs_no_other_its_answer(tmp_path: Path) -> None:
    """A webhook of the site guards it."""
    async with a_site(tmp_path, Plane()) as site:
        for name in ("a-guarded", "train"):
            site.plane.decide(f"team/{name}", EngineAction.RELEASE, note="released")
            await site.kueue.put("workloads", a_workload(name, 2))
        site.kueue.guarded.add("team/a-guarded")
        await site.settle(lambda: site.runs("train") and bool(site.plane.last("team/a-guarded").refused))
        assert site.plane.last("team/a-guarded").refused.endswith("403: the webhook of policies denies it")
        assert all(report.problem is None for report in site.plane.reports)
        tries = site.kueue.refusals
        for _ in range(3):
            await site.bridge.look()
        assert site.kueue.refusals == tries, "it is not asked again at once"


async def test_a_zone_that_is_no_name_and_a_quota_without_limit_stop_no_report(tmp_path: Path) -> None:
    async with a_site(tmp_path, Plane(), queues_interval_s=0.01) as site:
        await site.kueue.merge(
            "resourceflavors", "h100", {"metadata": {"annotations": {"wattshift.io/zone": "the far north"}}}, None
        )
        (group,) = site.kueue.at("clusterqueues", "research")["spec"]["resourceGroups"]
        group["flavors"][0]["resources"][0]["nominalQuota"] = "100G"
        await site.kueue.merge("clusterqueues", "research", {"spec": {"resourceGroups": [group]}}, None)
        await site.kueue.put("workloads", a_workload("train", 2))
        await site.settle(lambda: any(report.nodes for report in site.plane.reports))
        nodes = next(report.nodes for report in reversed(site.plane.reports) if report.nodes)
        assert {node.zone for node in nodes} == {None}
        assert sum(node.gpus for node in nodes) == 65_536


def test_what_cannot_be_reported_is_as_it_was_last_reported(tmp_path: Path) -> None:
    talk = Talk("kueue", KueueSettings(state_dir=tmp_path), None)

    def broken() -> EngineJob:
        raise ValueError("no job has this")

    assert talk.said("1", broken) is None
    talk.sent["1"] = known = talk.ended("1", EngineJobState.PENDING, number="1")
    assert talk.said("1", broken) == known


def test_quotas_whose_names_begin_alike_are_nodes_of_their_own() -> None:
    queue = "research-of-large-language-models-and-others"
    flavored = [Flavored(queue, flavor, 2, "H100", None) for flavor in ("a", "b")]
    flavored += [Flavored("x.y", "z", 2, "H100", None), Flavored("x", "y.z", 2, "H100", None)]
    flavored += [Flavored("team", "h100", 2_000, "H100", None)]
    queues = Queues(flavored=tuple(flavored))

    names = [node.name for node in nodes_of(queues, KueueSettings())]

    assert len(set(names)) == 6
    assert names[-2:] == ["team.h100", "team.h100-2"]
