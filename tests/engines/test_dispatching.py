"""Worker clusters of MultiKueue, picked by carbon: the rules, and the bridge against the stand-in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from services.contracts.engines import EngineAction, EngineMode, EngineReply, EngineReport, ZoneOutlook, ZoneStep
from services.core.domain.signal import Signal
from services.engines.kueue.dispatching import Nominee, WorkerCluster, loads_of, nomination_of, ranking
from services.engines.kueue.settings import KueueSettings
from services.kit.ids import utc_now
from tests.engines.kueue_cluster import REMOTE, a_workload, furnish_workers, state
from tests.engines.test_kueue import Plane, Site, a_site

ZONES = {"east": "US-EAST", "north": "SE", "west": "US-WEST"}
GRIDS = {"US-EAST": 600.0, "SE": 30.0, "US-WEST": 250.0}
NOW = datetime(2026, 11, 24, 12, tzinfo=UTC)


def an_outlook(zone: str, *steps: float, signal: Signal = Signal.AVERAGE_DIRECT, since: datetime = NOW) -> ZoneOutlook:
    """Return an outlook with a step an hour."""
    points = [ZoneStep(start_at=since + timedelta(hours=at), gco2_per_kwh=value) for at, value in enumerate(steps)]
    return ZoneOutlook(zone=zone, signal=signal, steps=points)


OUTLOOKS = {zone: an_outlook(zone, value) for zone, value in GRIDS.items()}
CLUSTERS = [WorkerCluster(name, zone) for name, zone in ZONES.items()]


def a_nominee(**fields: Any) -> Nominee:
    document: dict[str, Any] = {
        **{"uid": "u", "namespace": "team", "name": "train", "version": "1", "check": REMOTE, "waits": True},
        **{"nominated": (), "cluster": "", "gpus": 8, "pods": 8, "length_s": 3_600.0, "left_alone": False},
        **{"own_annotations": {}, **fields},
    }
    return Nominee(**document)


def nominated(nominee: Nominee, **options: Any) -> tuple[str, ...] | None:
    given: dict[str, Any] = {"steers": True, "waited": False, "load": {}, "outlooks": OUTLOOKS, **options}
    load, outlooks = given.pop("load"), given.pop("outlooks")
    clusters = given.pop("clusters", CLUSTERS)
    found = nomination_of(
        nominee, ranking(nominee, clusters, outlooks, load, KueueSettings(), NOW.timestamp()), **given
    )
    return found and found.clusters


def order(nominee: Nominee, outlooks: dict[str, ZoneOutlook], clusters: Any = None, **load: int) -> list[str]:
    given = CLUSTERS if clusters is None else clusters
    return [each.name for each, _ in ranking(nominee, given, outlooks, load, KueueSettings(), NOW.timestamp())]


def test_the_greenest_is_first_and_the_next_is_added_when_it_has_had_its_time() -> None:
    assert nominated(a_nominee()) == ("north",)
    assert nominated(a_nominee(nominated=("north",))) is None
    assert nominated(a_nominee(nominated=("north",)), waited=True) == ("north", "west")
    assert nominated(a_nominee(nominated=("north", "west")), waited=True) == ("north", "west", "east")
    assert nominated(a_nominee(nominated=("north", "west", "east")), waited=True) is None
    assert nominated(a_nominee(nominated=("gone",))) == ("north",), "a cluster that is no more is left out"


def test_without_a_cluster_to_go_to_a_workload_is_left_as_it_is() -> None:
    assert nominated(a_nominee(), clusters=[]) is None


def test_what_is_over_or_has_lost_its_quota_is_no_load_of_the_clusters_it_was_nominated_for() -> None:
    waits, over = a_nominee(nominated=("north",)), a_nominee(uid="v", nominated=("north", "west"), waits=False)
    assert loads_of([waits, over, a_nominee(uid="w", cluster="west", waits=False)]) == {"north": 8, "west": 8}


async def test_a_cluster_whose_zone_is_no_name_stops_no_report(tmp_path: Path) -> None:
    plane = Grids()
    async with a_site(tmp_path, plane, dispatch=True) as site:
        await furnish_workers(site.kueue, ZONES | {"north": "the far north"}, {"east": 8, "north": 8, "west": 8})
        release(site, "train")
        await site.kueue.put("workloads", a_workload("train", 4))
        await site.settle(lambda: site.runs("train"))
        assert status(site, "train")["clusterName"] == "west", "what is in no zone comes last"


def test_what_is_not_ours_to_steer_is_nominated_for_all() -> None:
    assert nominated(a_nominee(), steers=False) == ("north", "west", "east")
    assert nominated(a_nominee(left_alone=True)) == ("north", "west", "east")
    assert nominated(a_nominee(nominated=("east", "north", "west")), steers=False) is None


def test_the_forecast_over_its_run_counts_and_not_the_present() -> None:
    outlooks = {
        "US-EAST": an_outlook("US-EAST", 100, 900, 900),
        "SE": an_outlook("SE", 300, 300, 300),
        "US-WEST": an_outlook("US-WEST", 800, 50, 50),
    }
    assert order(a_nominee(length_s=1_800.0), outlooks) == ["east", "north", "west"]
    assert order(a_nominee(length_s=4 * 3_600.0), outlooks) == ["west", "north", "east"], "the last step holds on"
    assert order(a_nominee(length_s=None), outlooks)[0] == "east", "an hour, by default"


def test_grams_are_those_of_the_gpus_the_overhead_and_the_grid() -> None:
    ((first, grams), *_) = ranking(
        a_nominee(gpus=8, length_s=7_200.0),
        [WorkerCluster("north", "SE", "H100-SXM5-80GB", 1.5)],
        OUTLOOKS,
        {},
        KueueSettings(),
        NOW.timestamp(),
    )
    assert first.name == "north"
    assert grams is not None
    gpu_w = grams / (8 * 2 * 1.5 * 30 / 1_000)
    assert 300 < gpu_w < 700, "between idle and peak of an H100"


def test_equals_are_ranked_by_their_queues_and_unknown_zones_come_last() -> None:
    same = {zone: an_outlook(zone, 100) for zone in GRIDS} | {"SE": an_outlook("SE", 100.4)}
    assert order(a_nominee(), same, east=16, north=4, west=8) == ["north", "west", "east"]
    unknown = [*CLUSTERS, WorkerCluster("moon", "")]
    assert order(a_nominee(), OUTLOOKS, unknown)[-1] == "moon"
    mixed = OUTLOOKS | {"SE": an_outlook("SE", -900, signal=Signal.MARGINAL)}
    assert order(a_nominee(), mixed, east=1, north=9, west=5) == ["east", "west", "north"], "signals are never mixed"


class Grids(Plane):
    """A control plane that knows what zones emit, and releases everything."""

    def __init__(self) -> None:
        super().__init__()
        self.grids = dict(GRIDS)

    async def call(self, what: str, report: EngineReport, answer: type[EngineReply], timeout_s: float) -> EngineReply:
        reply = await super().call(what, report, answer, timeout_s)
        now = utc_now()
        known = [an_outlook(zone, self.grids[zone], since=now) for zone in report.wants_outlooks if zone in self.grids]
        return reply.model_copy(update={"outlooks": known})


@contextlib.asynccontextmanager
async def managing(folder: Path, rooms: dict[str, int], **options: Any) -> AsyncIterator[Site]:
    """Yield a manager cluster with three workers."""
    plane = Grids()
    async with a_site(folder, plane, dispatch=True, **options) as site:
        await furnish_workers(site.kueue, ZONES, rooms)
        yield site


def status(site: Site, name: str) -> dict[str, Any]:
    return site.kueue.at("workloads", f"team/{name}").get("status", {})


def release(site: Site, name: str) -> None:
    site.plane.decide(f"team/{name}", EngineAction.RELEASE, note="released")


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
async def test_a_workload_runs_where_the_grid_is_greenest(tmp_path: Path, version: str) -> None:
    async with managing(tmp_path, {"east": 8, "north": 8, "west": 8}, version=version) as site:
        release(site, "train")
        await site.kueue.put("workloads", a_workload("train", 4))
        await site.settle(lambda: site.runs("train"))
        assert status(site, "train")["clusterName"] == "north"
        assert not status(site, "train")["nominatedClusterNames"]
        note = site.kueue.at("workloads", "team/train")["metadata"]["annotations"]["wattshift.io/clusters"]
        assert [words.split()[0] for words in note.split(", ")] == ["north", "west", "east"]


async def test_a_full_cluster_is_followed_by_the_next_one_in_time(tmp_path: Path) -> None:
    async with managing(tmp_path, {"east": 8, "north": 0, "west": 8}, dispatch_wait_s=0.3) as site:
        release(site, "train")
        await site.kueue.put("workloads", a_workload("train", 4))
        await site.settle(lambda: bool(status(site, "train").get("nominatedClusterNames")))
        assert status(site, "train")["nominatedClusterNames"] == ["north"]
        await site.settle(lambda: site.runs("train"))
        assert status(site, "train")["clusterName"] == "west"
        nominations = [
            tuple(document["status"].get("nominatedClusterNames", ()))
            for _, _, plural, document in site.kueue.events
            if plural == "workloads" and document.get("status")
        ]
        assert ("north", "west") in nominations
        assert ("north", "west", "east") not in nominations


async def test_it_is_nominated_only_when_the_carbon_check_lets_it_start(tmp_path: Path) -> None:
    async with managing(tmp_path, {"east": 8, "north": 8, "west": 8}) as site:
        until = utc_now() + timedelta(hours=3)
        site.plane.decide("team/train", EngineAction.HOLD, note="waits:greener_hours", until=until)
        await site.kueue.put("workloads", a_workload("train", 4))
        await site.settle(lambda: site.check("train").get("message") == "waits:greener_hours")
        for _ in range(5):
            await site.bridge.look()
        assert "nominatedClusterNames" not in status(site, "train")
        release(site, "train")
        await site.settle(lambda: site.runs("train"))


@pytest.mark.parametrize("why", ["dry_run", "opted_out", "silent"])
async def test_without_us_a_workload_goes_wherever_there_is_room(tmp_path: Path, why: str) -> None:
    options: dict[str, Any] = {"mode": EngineMode.DRY_RUN} if why == "dry_run" else {"silence_s": 0.2}
    async with managing(tmp_path, {"east": 8, "north": 0, "west": 0}, **options) as site:
        site.plane.silent = why == "silent"
        release(site, "train")
        annotations = {"wattshift.io/steer": "off"} if why == "opted_out" else {}
        await site.kueue.put("workloads", a_workload("train", 4, **annotations))
        await site.settle(lambda: site.runs("train"))
        assert status(site, "train")["clusterName"] == "east"


async def test_pods_without_gpus_are_nominated_too(tmp_path: Path) -> None:
    async with managing(tmp_path, {"east": 8, "north": 8, "west": 8}) as site:
        workload = a_workload("cpu", 1)
        del workload["spec"]["podSets"][0]["template"]["spec"]["containers"][0]["resources"]
        await site.kueue.put("workloads", workload)
        await site.settle(lambda: bool(status(site, "cpu")))
        ready = [state("Ready") if each["name"] != REMOTE else each for each in status(site, "cpu")["admissionChecks"]]
        await site.kueue.merge("workloads", "team/cpu", {"status": {"admissionChecks": ready}}, "status")
        await site.settle(lambda: status(site, "cpu").get("clusterName") == "north")


async def test_a_workload_that_was_taken_meanwhile_is_not_nominated_again(tmp_path: Path) -> None:
    async with managing(tmp_path, {"east": 8, "north": 8, "west": 8}, outlook_interval_s=0.1) as site:
        release(site, "train")
        await site.kueue.put("workloads", a_workload("train", 4))
        await site.settle(lambda: site.runs("train"))
        site.plane.grids = {"SE": 900.0, "US-WEST": 10.0, "US-EAST": 500.0}
        for _ in range(5):
            await site.bridge.look()
            await asyncio.sleep(0.05)
        assert status(site, "train")["clusterName"] == "north"
        assert not status(site, "train")["nominatedClusterNames"]


async def test_a_workload_that_another_wrote_meanwhile_is_read_anew(tmp_path: Path) -> None:
    async with managing(tmp_path, {"east": 8, "north": 0, "west": 0}) as site:
        release(site, "train")
        await site.kueue.put("workloads", a_workload("train", 4))
        await site.settle(lambda: site.state("train") == "Ready")
        dispatcher = site.bridge._dispatcher
        assert dispatcher is not None
        await site.settle(lambda: bool(status(site, "train").get("nominatedClusterNames")))
        document = dict(site.kueue.at("workloads", "team/train"))
        document["metadata"] = document["metadata"] | {"resourceVersion": "1"}
        document["status"] = document["status"] | {"nominatedClusterNames": []}
        dispatcher.take_event("MODIFIED", document)
        before = site.kueue.conflicts
        assert await dispatcher.look(heard=True) == 0
        assert site.kueue.conflicts == before + 1
