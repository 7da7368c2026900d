"""A pool of model servers and an application on slices of GPUs: created, changed in storms, and settled after them."""

from __future__ import annotations

import asyncio
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.standalone.processes import DEFAULT_MODEL
from tests.chaos.client import Caller
from tests.chaos.visitors import APP, POOL
from tests.chaos.watch import Running, Watch

FLEET = "images"
FLEET_MODEL, FLEET_GPUS = "H200-SXM-141GB", 2
ZONE = "US-CAL-CISO"
LATE_MS = 60_000.0
"""A limit of latency that holds on a busy machine, so that the weight of carbon alone decides how GPUs are cut."""
TERMS = "CHAOS_TERMS"
"""Variable of model servers that says for which terms of their pool or application they were started."""
ASSUMED_QPS = 8.0
CAPACITIES_QPS = (3.0, 5.0, 20.0)
"""Of an instance: by these the same demand takes three instances, two or one."""
CHANGES_EVERY_S = (6.0, 14.0)
"""A change supersedes the plan that is being made: more often, and none would ever be carried out."""
LOOK_S = 0.5


@dataclass
class Models:
    """What is served; the terms are those that were accepted last."""

    caller: Caller
    program: Path
    notes: Path
    terms: int = 0
    capacity_qps: float = CAPACITIES_QPS[1]
    carbon_weight: int = 0

    async def create(self) -> None:
        """Create all of it."""
        fleet = {"gpus": FLEET_GPUS, "gpu_model": FLEET_MODEL, "zone": ZONE}
        await self.caller.ask("PUT", f"/v1/fleets/{FLEET}", json=fleet)
        await self.change_terms()

    async def change_terms(self) -> None:
        """Have every model server replaced by one with new terms."""
        self.terms += 1
        await self._put_pool()
        await self._put_app()

    async def change(self, dice: random.Random, until: asyncio.Event) -> None:
        """Change something every few seconds: how many servers are planned, their terms, how GPUs are cut."""
        while not until.is_set():
            await asyncio.sleep(dice.uniform(*CHANGES_EVERY_S))
            match dice.choice(("capacity", "terms", "weight", "weight", "plan")):
                case "capacity":
                    self.capacity_qps = dice.choice(CAPACITIES_QPS)
                    await self._put_pool()
                case "terms":
                    await self.change_terms()
                case "weight":
                    self.carbon_weight = 1 - self.carbon_weight
                    await self._put_app()
                case _:
                    await self.caller.ask("POST", f"/v1/pools/{POOL}/plans")

    async def settle(self, watch: Watch, within_s: float) -> list[str]:
        """Change the terms once more, and return what of pool and application is not as planned in time.

        A change ends the pauses after failures, which may have grown to minutes in a storm. From the kernel comes what
        runs: for each planned instance one server, with the last terms, and no other.
        """
        await self.change_terms()
        late = ["it was not asked"]
        try:
            async with asyncio.timeout(within_s):
                while late:
                    await asyncio.sleep(LOOK_S)
                    late = await self._unsettled(watch)
        except TimeoutError:
            return [f"after {within_s:.0f} s {each}" for each in late]
        return []

    async def _unsettled(self, watch: Watch) -> list[str]:
        servers = [each for each in watch.look() if each.terms]
        plan, instances = await self._plan_of_pool(), await self._instances(f"/v1/pools/{POOL}")
        found = unlike("pool", plan, instances, [each for each in servers if each.owner == POOL], self.terms)
        fleet = await self.caller.ask("GET", f"/v1/fleets/{FLEET}")
        if fleet["plan"] is None or fleet["plan"]["state"] != "applied":
            return [*found, f"the fleet's plan is {fleet['plan'] and fleet['plan']['state']}: {fleet['detail']}"]
        planned = [each for app in fleet["plan"]["applications"] for each in app["instances"]]
        wanted = {f"{each['variant']} on {each['slice']}": each["count"] for each in planned}
        instances = await self._instances(f"/v1/apps/{APP}")
        cut = [gpu for gpu in fleet["gpus"] if sorted(gpu["sizes"]) != sorted(gpu["wanted"])]
        found += [f"GPU {gpu['gpu']} of {gpu['node_id']} is not cut as planned ({gpu['state']})" for gpu in cut]
        own = [each for each in servers if each.owner == APP]
        return found + unlike("application", wanted, instances, own, self.terms)

    async def _plan_of_pool(self) -> dict[str, int]:
        pool = await self.caller.ask("GET", f"/v1/pools/{POOL}")
        if pool["plan_id"] is None:
            return {}
        plan = await self.caller.ask("GET", f"/v1/pools/{POOL}/plans/{pool['plan_id']}")
        if plan["revision"] != pool["revision"]:
            return {}  # the one for these terms is still being made
        counts: dict[str, int] = {}
        for each in plan["result"]["plan"]["instances"]:
            counts["one"] = counts.get("one", 0) + each["count"]
        return counts

    async def _instances(self, path: str) -> list[Any]:
        return (await self.caller.ask("GET", f"{path}/instances", params={"limit": 200}))["items"]

    async def _put_pool(self) -> None:
        profile = {"mode": "one", "max_qps": self.capacity_qps, "power_w": 300.0}
        classes = [{"name": "any", "profiles": [profile]}]
        mode = {"name": "one", "gpu_model": DEFAULT_MODEL, "gpus": 1, "start_wh": 0, "stop_wh": 0}
        spec = {
            "models": [POOL],
            "places": [{"name": "here", "zone": ZONE}],
            "modes": [mode | self._process(POOL)],
            "partitions": [{"name": "all", "classes": classes, "assumed_qps": {"any": ASSUMED_QPS}}],
            "probes": self._probes("/health"),
        }
        await self.caller.ask("PUT", f"/v1/pools/{POOL}", json=spec)

    async def _put_app(self) -> None:
        profiles = {"b7": ("7g", 60.7, 138.0, 84.6), "b1": ("1g", 25.2, 17.1, 78.4)}
        variants = [
            {
                "name": name,
                "accuracy_pct": accuracy,
                "profiles": [{"slice": size, "service_ms": service_ms, "busy_w": watts}],
            }
            | self._process(APP)
            for name, (size, service_ms, watts, accuracy) in profiles.items()
        ]
        spec = {
            "fleet": FLEET,
            "variants": variants,
            "sla_p95_ms": LATE_MS,
            "requests_per_s": 20,
            "carbon_weight": self.carbon_weight,
            "min_interval_s": 2,
            "repartition": "any_time",
            "probes": self._probes("/v2/health/ready"),
        }
        await self.caller.ask("PUT", f"/v1/apps/{APP}", json=spec)

    def _process(self, owner: str) -> dict[str, Any]:
        command = [sys.executable, "-I", "-S", str(self.program), str(self.notes)]
        return {"command": command, "environment": {TERMS: f"{owner} {self.terms}"}}

    def _probes(self, path: str) -> dict[str, Any]:
        return {"health_path": path, "drain_min_s": 1, "drain_timeout_s": 10, "grace_s": 2, "ready_timeout_s": 30}


def unlike(what: str, wanted: dict[str, int], instances: list[Any], servers: list[Running], terms: int) -> list[str]:
    """Return in what instances and servers differ from what a plan wants."""
    found: list[str] = []
    if not wanted:
        found.append(f"the {what} has no plan for its last terms")
    others = (each for each in instances if each["state"] != "ready")
    if strange := sorted({f"{each['state']} ({each['detail']})" for each in others}):
        found.append(f"the {what} has instances that are {', '.join(strange)}")
    if len(instances) != sum(wanted.values()):
        found.append(f"the {what} has {len(instances)} instances of planned {wanted}")
    if len(servers) != sum(wanted.values()):
        found.append(f"the {what} has {len(servers)} servers of planned {wanted}: {[str(each) for each in servers]}")
    if old := [str(each) for each in servers if each.terms != f"{terms}"]:
        found.append(f"the {what} has servers with earlier terms than {terms}: {old}")
    return found
