"""Features together, as rows: whatever users, operators and nodes do in what order, no round of any policy fails."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from services.contracts.jobs import JobSpec
from services.core.cycle.snapshot import Trigger
from services.core.policies.registry import FAIR, POLICIES
from services.db.gpu_partitions import want
from tests.scheduler import test_dry_run, test_explanations
from tests.scheduler.test_api import client
from tests.scheduler.test_grid_orders import grid
from tests.scheduler.test_reservations import at, reserving
from tests.scheduler.test_slices import devices_of
from tests.scheduler.world import World

TENANTS = ("blue", "default", "red")


def a_spec(draw: random.Random) -> dict[str, Any]:
    """Return what a user might ask for: features in any combination that a submission may have."""
    slice_of = draw.choice((None, None, "1g", "3g"))
    low = 1 if slice_of else draw.choice((1, 1, 2, 4))
    high = low if slice_of else draw.choice((low, low, low + 2))
    gpus = {
        "min": low,
        "max": high,
        "step": draw.choice((1, high - low or 1)),
        "model": draw.choice((None, None, "A100", "H100")),
        "zone": draw.choice((None, None, None, "Z", "Y")),
        "within": draw.choice((None, None, "node", "rack", "gone")),
        "near": draw.choice((None, None, "rack")),
        "memory_gib": draw.choice((None, None, 4.0)),
        "slice": slice_of,
    }
    spec = {
        "gpus": gpus,
        "preemptible": draw.random() < 0.7,
        "priority": draw.choice((0, 0, 1, -1)),
        "deadline": draw.choice((None, None, at(-60), at(4_000))),
        "time_limit_s": draw.choice((None, None, 60, 4_000)),
        "grace_s": draw.choice((5, 120, 900)),
        "checkpoint_dir": draw.choice((None, None, "/data/saved")),
        "may_share_gpu": draw.random() < 0.2,
        "flex": draw.choice((None, None, 0, 25)),
        "work": draw.choice((None, {"total": 100.0, "unit": "steps"}, {"total": 100.0, "unit": "samples"})),
        "batch": draw.choice((None, None, None, {"min": 32, "max": 512})),
        "labels": draw.choice(({}, {"kind": "resnet"})),
    }
    if not slice_of and low == high and draw.random() < 0.3:
        spec["service"] = {"zone": draw.choice((None, "Z")), "node_labels": draw.choice(({}, {"rack": "r1"}))}
        gpus |= {"within": None, "near": None}
    spec = {"name": "a", "command": ["true"]} | {key: value for key, value in spec.items() if value is not None}
    try:
        return JobSpec.model_validate(spec).model_dump(mode="json", exclude_none=True)
    except ValueError:
        return a_spec(draw)


class Walk:
    """What users, operators and nodes do to one world, at random."""

    def __init__(self, world: World, draw: random.Random) -> None:
        self.world, self.draw, self.did = world, draw, list[str]()

    async def node(self) -> None:
        name = f"n{self.draw.randint(0, 4)}"
        gpus = self.draw.choice((1, 2, 4))
        cuts: dict[int, Sequence[int]] = {
            gpu: self.draw.choice(((3, 3), (1, 1, 1))) for gpu in range(gpus) if self.draw.random() < 0.2
        }
        if not await self.world.fetch("SELECT 1 FROM nodes WHERE id = $1", name):
            await self.world.node(name, gpus, zone=self.draw.choice(("Z", "Z", "Y")), lease_s=600)
        devices = [
            each | {"can_set_power_limit": True, "power_limit_w": 400, "lowest_limit_w": 100}
            for each in devices_of(gpus, cuts, self.draw.choice("ab"))
        ]
        readings = [{"index": each["index"], "power_w": 200.0, "utilization": 1.0} for each in devices]
        await self.world.fetch(
            "UPDATE nodes SET devices = $2, readings = $3, registered_at = now(), labels = $4, checkpoints = $5, "
            "lease_until = now() + make_interval(secs => 600) WHERE id = $1 RETURNING 1",
            name,
            devices,
            readings,
            self.draw.choice(({}, {"rack": "r1"}, {"rack": "r2"})),
            self.draw.choice(("shared", "local")),
        )

    async def leaves(self) -> None:
        what = self.draw.choice(("draining = NOT draining", "lease_until = now() - interval '1 hour'"))
        await self.world.fetch(f"UPDATE nodes SET {what} WHERE id = $1 RETURNING 1", f"n{self.draw.randint(0, 4)}")

    async def sick(self) -> None:
        await self.world.fetch(
            "INSERT INTO gpu_health (node_id, gpu, uuid, drained) SELECT id, $2, 'GPU-' || $2::int, true FROM nodes "
            "WHERE id = $1 ON CONFLICT (node_id, gpu) DO UPDATE SET drained = NOT gpu_health.drained",
            f"n{self.draw.randint(0, 4)}",
            self.draw.randint(0, 3),
        )

    async def cut(self) -> None:
        node, gpu = f"n{self.draw.randint(0, 4)}", self.draw.randint(0, 1)
        async with self.world.database.transaction() as connection:
            if await connection.fetchval("SELECT 1 FROM nodes WHERE id = $1", node):
                await want(connection, node, gpu, self.draw.choice(([3, 3], [])), self.draw.choice((None, "fleet")))
            state = self.draw.choice(("pending", "applied", "failed"))
            await connection.execute("UPDATE gpu_partitions SET state = $1 WHERE gpu = $2", state, gpu)

    async def submit(self) -> None:
        job_id = await self.world.job(**a_spec(self.draw))
        tenant = self.draw.choice(TENANTS)
        await self.world.fetch("UPDATE jobs SET tenant_id = $2 WHERE id = $1 RETURNING 1", job_id, tenant)
        if self.draw.random() < 0.2:
            needed = (await self.world.fetch("SELECT id FROM jobs ORDER BY id LIMIT 1"))[0]["id"]
            await self.world.after(job_id, needed, self.draw.choice(("ok", "any", "not_ok")))

    async def array(self) -> None:
        await self.world.array(3, self.draw.choice((None, 1)), **a_spec(self.draw))

    async def asks(self) -> None:
        wish = self.draw.choice(("cancel", "hold"))
        if job_id := await self.any_job("state IN ('queued', 'starting', 'running')"):
            await self.world.fetch(f"UPDATE jobs SET {wish}_requested = true WHERE id = $1 RETURNING 1", job_id)

    async def reports(self) -> None:
        for row in await self.world.fetch("SELECT id FROM allocations WHERE state <> 'ended' ORDER BY id"):
            if self.draw.random() < 0.6:
                said = self.draw.choice(("running", "running", "exited"))
                code = self.draw.choice((0, 1)) if said == "exited" else None
                await self.world.report(
                    row["id"], said, exit_code=code, ended_by="itself" if code is not None else None
                )

    async def reserves(self) -> None:
        when = self.draw.choice(({}, {"start_at": at(self.draw.choice((60, 900)))}, {"before": at(90_000)}))
        what = {"gpus": self.draw.randint(1, 4), "tenant_id": self.draw.choice(TENANTS), **when}
        if self.draw.random() < 0.4:
            when.pop("before", None)
            what = {"maintenance": True, "nodes": [f"n{self.draw.randint(0, 4)}"], **when}
        async with reserving(self.world) as api:
            answer = await api.post("/v1/reservations", json={"duration_s": self.draw.choice((60, 7_200)), **what})
            assert answer.status_code < 500, answer.text

    async def orders(self) -> None:
        start = self.draw.choice(({}, {"start_at": at(self.draw.choice((60, 900)))}))
        spec = {"zone": self.draw.choice((None, "Z", "Y")), "duration_s": 3_600, "notice_s": self.draw.choice((0, 600))}
        step = self.draw.choice(({"limit_w": self.draw.choice((0, 500, 5_000))}, {"of_baseline": 0.5}))
        async with grid(self.world) as api:
            answer = await api.post("/v1/grid/orders", json={**spec, **start, "steps": [step]})
            assert answer.status_code < 500, answer.text
            for order in (await api.get("/v1/grid/orders")).json()["items"][self.draw.randint(1, 3) :]:
                await api.delete(f"/v1/grid/orders/{order['id']}")

    async def topology(self) -> None:
        file = self.draw.choice(("", "rack r1: n[0-1]\nrack r2: n[2-4]\n", "pod p: n[0-4]\n"))
        async with client(self.world) as api:
            assert (await api.put("/v1/topology", json={"file": file})).status_code == 200

    async def limits(self) -> None:
        tenant = self.draw.choice(TENANTS)
        limits = {
            "max_gpus": self.draw.choice((0, 2, 8)),
            "guaranteed_gpus": self.draw.choice((0, 2)),
            "share_weight": self.draw.choice((0.5, 2.0)),
        }
        limits = {key: value for key, value in limits.items() if self.draw.random() < 0.5}
        await self.world.fetch(
            "INSERT INTO tenants (id, limits) VALUES ($1, $2) ON CONFLICT (id) DO UPDATE SET limits = $2 RETURNING 1",
            tenant,
            limits,
        )

    async def policy(self) -> None:
        name = self.draw.choice((*POLICIES, f"{FAIR}joint", f"{FAIR}las"))
        async with client(self.world) as api:
            assert (await api.put("/v1/policies/active", json={"name": name})).status_code == 200

    async def asked(self) -> None:
        if job_id := await self.any_job("true"):
            (row,) = await self.world.fetch("SELECT tenant_id FROM jobs WHERE id = $1", job_id)
            answer = await test_explanations.answer(self.world, job_id, tenant=row["tenant_id"])
            assert answer.status_code == 200, answer.text
        spec = a_spec(self.draw)
        spec.pop("service", None)
        answer = await test_dry_run.answer(self.world, **spec)
        assert answer.status_code < 500, answer.text

    async def any_job(self, which: str) -> str | None:
        rows = await self.world.fetch(f"SELECT id FROM jobs WHERE {which} ORDER BY id")
        return self.draw.choice(rows)["id"] if rows else None

    async def step(self) -> None:
        names = ("node", "leaves", "sick", "cut", "submit", "submit", "submit", "array", "asks", "reports", "reports",
                 "reserves", "orders", "topology", "limits", "policy", "asked")  # fmt: skip
        name = self.draw.choice(names)
        self.did.append(name)
        do: Callable[[], Awaitable[None]] = getattr(self, name)
        await do()


async def walks(world: World, seed: int, steps: int) -> None:
    walk = Walk(world, random.Random(seed))
    await world.scheduler.turn()
    test_dry_run.set_grid(world)
    for first in (walk.node, walk.node, walk.submit, walk.submit):
        await first()
    for at_step in range(steps):
        try:
            await walk.step()
            await world.scheduler.turn()
            held = await world.scheduler.hold(walk.draw.choice(list(Trigger)))
            assert held is not None, "a plan that is stale whenever it is made"
        except Exception as error:
            error.add_note(f"seed {seed}, step {at_step}: {walk.did[-5:]}")
            raise
        unexplained = await world.fetch("SELECT * FROM jobs WHERE state = 'queued' AND reason IS NULL")
        assert not unexplained, (dict(unexplained[0]), seed, at_step, walk.did[-3:])


@pytest.mark.parametrize("seed", [int(x) for x in __import__("os").environ.get("SEEDS", "0 1 2 3").split()])
async def test_no_round_fails_whatever_is_done(world: World, seed: int) -> None:
    await walks(world, seed, 40)
