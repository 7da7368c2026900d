"""A random walk over the services together: what users, admins and nodes do in any order, and what holds at each step.

Nothing that was accepted is lost, and no end is undone; all sums of the ledger agree; a key that has ended does
nothing more; nobody sees what is another tenant's; pages lose and repeat nothing while rows come and go; messages of
webhooks are signed as was promised, and none is sent again that was accepted; and no step is answered with a 5xx.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import csv
import hmac
import json
import random
import re
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from gateway.routes import read_routes
from services.contracts.identity import Role
from services.contracts.nodes import RankState, WantedPartition
from services.core.domain.mig import gpu_of
from tests.admission.webhook_receiver import Receiver, receiving
from tests.fuzz import rules
from tests.fuzz.asking import DESCRIBED, MOST, WITHIN_S, bearer
from tests.fuzz.world import MIN_RUN_S, World, enrolled
from tests.support.api_examples import EXAMPLES
from tests.support.control_plane import FakeAgent, usage

TENANTS = ("wa", "wb", "wc")
PROJECTS = ("default", "p1", "p2")
FINAL = ("succeeded", "failed", "cancelled")
KEY_AGE_S = 3.5  #: Longer than gateways use what they know of keys
AMOUNTS = ("energy_j", "gpu_energy_j", "carbon_gco2", "gpu_s", "estimated_energy_j")
LISTS = tuple(
    path
    for path, methods in DESCRIBED["paths"].items()
    if any(each["name"] == "cursor" for each in methods.get("get", {}).get("parameters", ()))
)
"""Whatever has pages."""
VARIANTS = ("/v1/reports/footprint?group_by=job", "/v1/reports/footprint?group_by=tenant&then_by=project")
ROLE_OF = {route.path: route.role for route in read_routes() if route.method == "GET"}
MOST_W = 300.0  #: What a GPU and its host draw at most, on nodes that are believed no more
NAMES = ("id", "job_id", "name", "number", "round", "at", "start_at")  #: What identifies the rows of a list


def rows_of(page: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a page, which may be of lists in several forms."""
    name = next(name for name in ("items", "lines", "intervals", "points") if name in page)
    return page[name]


def now_s() -> float:
    return time.time()


def signed(secret: str, text: bytes) -> str:
    key = base64.b64decode(secret.removeprefix("whsec_"))
    return "v1," + base64.b64encode(hmac.digest(key, text, "sha256")).decode()


class Key:
    """A key that the walk made."""

    def __init__(self, made: dict[str, Any]) -> None:
        self.id, self.tenant, self.project = made["id"], made["tenant_id"], made["project"]
        self.role, self.headers, self.ends_s = made["role"], bearer(made["secret"]), float("inf")


class Walk:
    """What anybody does to one installation, at random, and what is checked beside it."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        agents: httpx.AsyncClient,
        telemetry_url: str,
        admin: dict[str, str],
        receiver: Receiver,
        draw: random.Random,
    ) -> None:
        self.http, self.agents_http, self.telemetry_url, self.admin = http, agents, telemetry_url, admin
        self.receiver, self.draw, self.tag = receiver, draw, f"{time.time_ns():x}"
        self.did = list[str]()
        self.keys = list[Key]()
        self.jobs = dict[str, tuple[str, str]]()  #: Tenant and project by id
        self.known = dict[str, dict[str, Any]]()  #: As last read
        self.arrays = list[str]()
        self.nodes = dict[str, FakeAgent]()
        self.gone = list[tuple[FakeAgent, str]]()
        self.sent = list[tuple[FakeAgent, list[dict[str, Any]]]]()
        self.hooks = dict[str, dict[str, Any]]()
        self.budgets = list[str]()
        self.upto = dict[str, float]()
        self.held = set[str]()  #: By their users
        self.statuses = Counter[int]()
        self.ids = {"tenant_id": "wa", "zone": "", "pool": "walk", "fleet": "walk", "app": "walk"}
        self.most_w = dict[str, float]()  #: Of whole nodes
        self.checked_messages = 0
        self.credentials = dict[str, str]()  #: Of nodes
        self.placed = dict[str, dict[str, list[int]]]()  #: Devices by node, of gangs by name
        self.claims = dict[tuple[str, str, int], rules.Claims]()  #: What nodes have told of gangs' time, by interval

    async def ask(
        self, method: str, path: str, who: dict[str, str] | None = None, *, ok: bool = False, **options: Any
    ) -> httpx.Response:
        headers = self.admin if who is None else who
        answer = await self.http.request(method, path, headers=headers, **options)
        self.statuses[answer.status_code] += 1
        assert answer.status_code < 500, (method, path, options, answer.text)
        if answer.status_code >= 400:
            assert answer.json()["detail"], answer.text
        assert not ok or answer.is_success, (method, path, options, answer.text)
        return answer

    def live_keys(self, *roles: str) -> list[Key]:
        return [key for key in self.keys if key.ends_s == float("inf") and (not roles or key.role in roles)]

    # What admins do.

    async def begin(self) -> None:
        for tenant in TENANTS:
            answer = await self.ask("POST", "/v1/tenants", json={"id": tenant})
            assert answer.status_code in (201, 409)
            await self.ask("PATCH", f"/v1/tenants/{tenant}", ok=True, json={"limits": {"max_active_jobs": 40}})
            await self.new_key(tenant, "user", None)
        for _ in range(2):
            await self.new_node()
        self.ids["zone"] = (await self.ask("GET", "/v1/carbon/zones", ok=True)).json()["items"][0]["zone"]
        pool, app = copy.deepcopy(EXAMPLES["PoolSpec"]), EXAMPLES["AppSpec"] | {"fleet": "walk"}
        for place in pool["places"]:
            place["zone"] = self.ids["zone"]
        fleet = {"gpus": 1, "gpu_model": "H100", "zone": self.ids["zone"]}
        for what, spec in (("pools", pool), ("fleets", fleet), ("apps", app)):
            await self.ask("PUT", f"/v1/{what}/walk", ok=True, json=spec)
        self.specs = {"pools": pool, "apps": app}

    def filled(self, path: str) -> str:
        job = self.draw.choice(list(self.jobs) or ["none"])
        return re.sub(r"\{(\w+)\}", lambda found: {**self.ids, "job_id": job}[found[1]], path)

    async def adds(self) -> None:
        """Add a row to a list of what others do."""
        name = f"w{self.draw.randint(0, 40)}"
        what = self.draw.choice(("pools", "apps", "endpoints", "pools/walk/plans"))
        if what == "endpoints":
            where = {"url": "http://127.0.0.1:9", "models": [name], "location": "here"}
            await self.ask("PUT", f"/v1/endpoints/{name}", self.draw.choice(self.live_keys()).headers, json=where)
        elif what in self.specs:
            await self.ask("PUT", f"/v1/{what}/{name}", json=self.specs[what])
        else:
            await self.ask("POST", f"/v1/{what}", json={})

    async def new_key(self, tenant: str, role: str, project: str | None) -> None:
        made = await self.ask(
            "POST", "/v1/keys", ok=True, json={"tenant_id": tenant, "role": role, "project": project, "label": self.tag}
        )
        self.keys.append(Key(made.json()))

    async def key(self) -> None:
        if len(self.live_keys()) < 12:
            role = self.draw.choice(("user", "user", "read_only", "operator"))
            project = self.draw.choice((None, *PROJECTS)) if role != "operator" else None
            await self.new_key(self.draw.choice(TENANTS), role, project)

    async def ends_key(self) -> None:
        key = self.draw.choice(self.live_keys())
        if len([each for each in self.live_keys("user") if each.tenant == key.tenant and not each.project]) < 2:
            return
        match self.draw.choice(("revoke", "rotate", "expire")):
            case "revoke":
                await self.ask("DELETE", f"/v1/keys/{key.id}", ok=True)
            case "rotate":
                made = await self.ask("POST", f"/v1/keys/{key.id}/rotate", ok=True, json={})
                self.keys.append(Key(made.json()))
            case _:
                at = datetime.now(UTC) - timedelta(seconds=1)
                await self.ask("PATCH", f"/v1/keys/{key.id}", ok=True, json={"expires_at": at.isoformat()})
        key.ends_s = now_s()

    async def user(self) -> None:
        await self.ask("POST", "/v1/tenants/wa/users", json={"name": f"u{self.draw.randint(0, 60)}"})

    async def limits(self) -> None:
        limits = {
            "max_active_jobs": self.draw.choice((5, 40, 200)),
            "max_gpus": self.draw.choice((None, 2, 6)),
            "guaranteed_gpus": self.draw.choice((0, 2)),
            "share_weight": self.draw.choice((1, 3)),
        }
        await self.ask("PATCH", f"/v1/tenants/{self.draw.choice(TENANTS)}", ok=True, json={"limits": limits})

    async def budget(self) -> None:
        if self.budgets and self.draw.random() < 0.4:
            await self.ask("DELETE", f"/v1/budgets/{self.budgets.pop()}")
            return
        spec = {
            "tenant_id": self.draw.choice(TENANTS),
            "project": self.draw.choice((None, *PROJECTS)),
            "quantity": self.draw.choice(("gpu_h", "kwh", "gco2")),
            "amount": self.draw.choice((0, 0.001, 1, 1e6)),
            "action": self.draw.choice(("hold", "warn")),
        }
        made = (await self.ask("PUT", "/v1/budgets", ok=True, json=spec)).json()
        if made["id"] not in self.budgets:
            self.budgets.append(made["id"])

    # What users do.

    def spec(self, key: Key) -> dict[str, Any]:
        low = self.draw.choice((1, 1, 1, 2))
        spec: dict[str, Any] = {
            "name": self.draw.choice("abc"),
            "command": ["true"],
            "gpus": {"min": low, "max": self.draw.choice((low, low, low + 1))},
            "project": key.project or self.draw.choice(PROJECTS),
            "hold": self.draw.random() < 0.1,
            "max_restarts": self.draw.choice((0, 0, 1)),
            "grace_s": 1,
            "preemptible": self.draw.random() < 0.7,
            "priority": self.draw.choice((0, 0, 0, 5)),
            "labels": {"walk": self.tag},
        }
        if self.draw.random() < 0.2:
            spec["gpus"] = {"slice": self.draw.choice(("1g", "2g", "3g", "7g"))}
        if self.draw.random() < 0.2 and self.jobs:
            mine = [
                job
                for job, (tenant, project) in self.jobs.items()
                if (tenant, project) == (key.tenant, spec["project"])
            ]
            if mine:
                spec["after"] = {self.draw.choice(("ok", "any")): [self.draw.choice(mine)]}
        if self.draw.random() < 0.2:
            spec["array"] = self.draw.choice(("0-2", "1,3", "0-4%2"))
        if self.draw.random() < 0.2:
            spec["time_limit_s"] = 3_600
        if self.draw.random() < 0.2:
            spec["deadline"] = (datetime.now(UTC) + timedelta(hours=self.draw.choice((1, 30)))).isoformat()
        return spec

    async def submit(self) -> None:
        key = self.draw.choice(self.live_keys())
        body = self.spec(key)
        idempotency = {"idempotency-key": f"{self.tag}-{len(self.did)}"}
        answer = await self.ask("POST", "/v1/jobs", key.headers | idempotency, json=body)
        if key.role == "read_only":
            assert answer.status_code == 403, answer.text
            return
        if answer.status_code == 201:
            self.took(key, body, answer.json())
            again = await self.ask("POST", "/v1/jobs", key.headers | idempotency, json=body)
            assert again.is_success, again.text
            assert again.json()["id"] == answer.json()["id"]
        else:
            assert answer.status_code in (403, 422), answer.text

    def took(self, key: Key, spec: dict[str, Any], made: dict[str, Any]) -> None:
        if made["id"].startswith("array_"):
            self.arrays.append(made["id"])
        else:
            self.jobs[made["id"]] = (key.tenant, spec["project"])

    async def batch(self) -> None:
        key = self.draw.choice(self.live_keys("user", "operator"))
        specs = [self.spec(key) for _ in range(self.draw.randint(1, 5))]
        for each in specs:
            each.pop("array", None)
        answer = await self.ask("POST", "/v1/jobs:batch", key.headers, json={"jobs": specs})
        if answer.status_code == 201:
            for spec, made in zip(specs, answer.json()["jobs"], strict=True):
                self.took(key, spec, made)

    async def steer(self) -> None:
        if not self.jobs:
            return
        job = self.draw.choice(list(self.jobs))
        key = self.draw.choice(self.live_keys())
        what = self.draw.choice(("cancel", "hold", "release", "release", "withdraw", "give-back", "forget-checkpoint"))
        answer = await self.ask("POST", f"/v1/jobs/{job}/{what}", key.headers)
        tenant, project = self.jobs[job]
        if key.role == "read_only":
            assert answer.status_code == 403, answer.text
        elif key.role != "operator" and (tenant != key.tenant or key.project not in (None, project)):
            assert answer.status_code == 404, answer.text
        else:
            assert answer.status_code in (200, 202, 409), (what, answer.text)
            if what == "hold" and answer.is_success and answer.json()["state"] == "held":
                self.held.add(job)
            elif what == "release":
                self.held.discard(job)

    async def steers_array(self) -> None:
        if self.arrays:
            array = self.draw.choice(self.arrays)
            what = self.draw.choice(("cancel", "hold", "release"))
            answer = await self.ask("POST", f"/v1/arrays/{array}/{what}")
            assert answer.status_code in (200, 202, 409), answer.text

    async def reserve(self) -> None:
        key = self.draw.choice(self.live_keys("user", "operator"))
        found = (await self.ask("GET", "/v1/reservations", ok=True)).json()["items"]
        live = [each for each in found if each["state"] in ("ahead", "in_force")]
        if len(live) > 3:
            await self.ask("DELETE", f"/v1/reservations/{live[0]['id']}", ok=True)
        spec: dict[str, Any] = {"gpus": self.draw.randint(1, 3), "duration_s": self.draw.choice((5, 3_600))}
        if self.draw.random() < 0.5:
            spec["start_at"] = (datetime.now(UTC) + timedelta(seconds=self.draw.choice((2, 60, 7_200)))).isoformat()
        if self.draw.random() < 0.2 and self.nodes:
            spec = {"maintenance": True, "nodes": [self.draw.choice(list(self.nodes))], "duration_s": 5}
        await self.ask("POST", "/v1/reservations", key.headers, json=spec)

    async def order(self) -> None:
        found = (await self.ask("GET", "/v1/grid/orders", ok=True)).json()["items"]
        for each in found:
            if each["state"] not in ("ended", "withdrawn"):
                await self.ask("DELETE", f"/v1/grid/orders/{each['id']}")
        spec = {"duration_s": 30, "steps": [{"of_baseline": 0.9}]}
        await self.ask("POST", "/v1/grid/orders", json=spec)

    async def policy(self) -> None:
        name = self.draw.choice(("fifo", "las", "joint", "powerflow", "fair+joint", "green", "asrpt"))
        await self.ask("PUT", "/v1/policies/active", json={"name": name})

    async def estimate(self) -> None:
        key = self.draw.choice(self.live_keys())
        body = self.spec(key)
        body.pop("array", None)
        await self.ask("POST", "/v1/jobs:estimate", key.headers, json=body)
        if self.jobs:
            await self.ask("GET", f"/v1/jobs/{self.draw.choice(list(self.jobs))}/explain", ok=True)

    # Webhooks.

    async def hook(self) -> None:
        key = self.draw.choice(self.live_keys("user"))
        if key.project:
            return
        mine = [name for name, hook in self.hooks.items() if hook["tenant"] == key.tenant]
        what = self.draw.choice(("add", "rotate", "rotate", "remove", "toggle"))
        if what == "add" and len(mine) < 3:
            events = self.draw.choice((["job.ended"], ["job.started", "job.ended"], ["job.ended", "budget.exceeded"]))
            project = self.draw.choice((None, None, *PROJECTS))
            body = {"url": f"{self.receiver.url}/{self.tag}/{len(self.hooks)}", "events": events, "project": project}
            made = (await self.ask("POST", "/v1/webhooks", key.headers, ok=True, json=body)).json()
            self.hooks[made["id"]] = {
                "tenant": key.tenant, "path": f"/{self.tag}/{len(self.hooks)}", "project": project, "is_live": True,
                "secrets": [(made["secret"], now_s(), float("inf"))], "gone_s": float("inf"), "is_on": True,
            }  # fmt: skip
        elif mine:
            name = self.draw.choice(mine)
            hook = self.hooks[name]
            if hook["gone_s"] < now_s():
                answer = await self.ask("GET", f"/v1/webhooks/{name}", key.headers)
                assert answer.status_code == 404
            elif what == "rotate":
                overlap_s = self.draw.choice((0, 0, 3, 3_600))
                asked_s = now_s()
                made = await self.ask(
                    "POST", f"/v1/webhooks/{name}/rotate", key.headers, ok=True, json={"overlap_s": overlap_s}
                )
                for at, (secret, since_s, until_s) in enumerate(hook["secrets"][:-1]):
                    hook["secrets"][at] = (secret, since_s, min(until_s, asked_s))
                secret, since_s, _ = hook["secrets"][-1]
                hook["secrets"][-1] = (secret, since_s, now_s() + overlap_s)
                hook["secrets"].append((made.json()["secret"], asked_s, float("inf")))
            elif what == "remove":
                await self.ask("DELETE", f"/v1/webhooks/{name}", key.headers, ok=True)
                hook["gone_s"] = now_s()
            elif what == "toggle":
                hook["is_on"] = not hook["is_on"]
                await self.ask("PATCH", f"/v1/webhooks/{name}", key.headers, ok=True, json={"enabled": hook["is_on"]})

    def check_messages(self) -> None:
        accepted = Counter[str]()
        for each in self.receiver.received[self.checked_messages :]:
            hook = next(hook for hook in self.hooks.values() if hook["path"] == each.path)
            sent_s = int(each.headers["webhook-timestamp"])
            assert sent_s < hook["gone_s"] + 2, "a message to a webhook that was removed"
            text = f"{each.headers['webhook-id']}.{sent_s}.".encode() + each.body
            signatures = each.headers["webhook-signature"].split()
            made = [(signed(secret, text), since_s, until_s) for secret, since_s, until_s in hook["secrets"]]
            for signature in signatures:
                assert any(
                    signature == each and since_s - 2 <= sent_s <= until_s + 2 for each, since_s, until_s in made
                ), ("a signature by no secret of the time", each.headers, hook, sent_s)
            valid = [each for each, since_s, until_s in made if since_s + 2 < sent_s < until_s - 2]
            assert set(valid) <= set(signatures), ("a secret that holds does not sign", each.headers, hook, sent_s)
            data = each.message["data"]
            if "job_id" in data and data["job_id"] in self.jobs:
                assert self.jobs[data["job_id"]][0] == hook["tenant"], "a message of another tenant's job"
                assert hook["project"] in (None, self.jobs[data["job_id"]][1])
        self.checked_messages = len(self.receiver.received)
        for each in self.receiver.received:
            accepted[each.headers["webhook-id"]] += 1
        assert all(count == 1 for count in accepted.values()), "accepted, and sent again"

    # What nodes do.

    async def new_node(self) -> None:
        name = f"walk-{self.tag}-{len(self.nodes) + len(self.gone)}"
        gpus = self.draw.choice((2, 4))
        agent = FakeAgent(self.agents_http, name, gpus, base_url=self.telemetry_url)
        if self.draw.random() < 0.5:
            self.bound(agent)
        if self.draw.random() < 0.6:
            agent.can_partition()
        allowed = (await self.ask("POST", f"/v1/nodes/{name}/enrollments", ok=True, json={})).json()
        self.credentials[name] = await enrolled(agent, allowed)
        self.nodes[name] = agent
        await agent.beat()

    def bound(self, agent: FakeAgent) -> None:
        """Have a node say what its hardware draws at most, beyond which nothing is believed."""
        agent.registration["most_host_w"] = MOST_W
        for device in agent.registration["devices"]:
            device["power_limit_w"] = device["highest_limit_w"] = MOST_W
        self.most_w[agent.node_id] = MOST_W * (len(agent.registration["devices"]) + 1)

    async def revoke(self) -> None:
        if len(self.nodes) > 1 and self.draw.random() < 0.5:
            name = self.draw.choice(list(self.nodes))
            agent = self.nodes.pop(name)
            await self.ask("POST", f"/v1/nodes/{name}/revoke", ok=True)
            answer = await agent.post(f"/v1/nodes/{name}/heartbeat", agent.heartbeat())
            assert answer.status_code in (401, 403, 404), answer.text
            answer = await agent.report(agent.interval(now_s() - 2, now_s() - 1, usage(None, 10)))
            assert answer.status_code in (401, 403, 404), answer.text
            self.gone.append((agent, name))
        elif len(self.nodes) < 4:
            if self.gone and self.draw.random() < 0.6:
                agent, name = self.gone.pop()
                allowed = (await self.ask("POST", f"/v1/nodes/{name}/enrollments", ok=True, json={})).json()
                agent.boot_id += "x"
                self.credentials[name] = await enrolled(agent, allowed)
                self.nodes[name] = agent
                agent.ranks.clear()
                await agent.beat()
            else:
                await self.new_node()

    async def beats(self) -> None:
        for name, agent in self.nodes.items():
            if self.draw.random() < 0.95:
                reply = await agent.beat()
                begun = [each for each in reply.allocations if each not in agent.ranks]
                for allocation in begun:
                    await self.look_at(allocation)
                    agent.say(allocation, RankState.RUNNING, started_at=f"{datetime.now(UTC)}")
                if begun:  # told at once, before any energy is
                    reply = await agent.beat()
                for wanted in reply.partitions if self.draw.random() < 0.7 else ():
                    await self.cut_as_wanted(name, agent, wanted)

    async def look_at(self, allocation: str) -> None:
        """Note where a gang is, as the commands to its nodes say."""
        job, _, generation = allocation.rpartition(".")
        found = (await self.ask("GET", f"/v1/jobs/{job}", ok=True)).json()
        if found["generation"] == int(generation) and found["placement"]:
            self.placed[allocation] = {each["node_id"]: each["devices"] for each in found["placement"]}

    async def cut_as_wanted(self, name: str, agent: FakeAgent, wanted: WantedPartition) -> None:
        """Have a node do as agents do: cut a GPU once nothing holds it, register, and say so; or say why not."""
        said = (agent.partitions or {})[wanted.gpu]
        if (said["revision"], said["state"]) in ((wanted.revision, "applied"), (wanted.revision, "failed")):
            return
        live = {*agent.reply.allocations, *(each for each, rank in agent.ranks.items() if rank["state"] == "running")}
        if any(each not in self.placed for each in live):
            return
        if wanted.gpu in {gpu_of(device) for each in live for device in self.placed[each].get(name, ())}:
            agent.said_of(wanted.gpu, wanted.revision, "pending", said["sizes"], "still used")
        elif (fails := self.draw.random()) < 0.2:
            agent.said_of(wanted.gpu, wanted.revision, "busy" if fails < 0.1 else "failed", said["sizes"], "no")
        else:
            agent.cut(wanted.gpu, wanted.sizes)
            answer = await agent.post("/v1/nodes/register", agent.registration, token=self.credentials[name])
            assert answer.status_code == 200, answer.text
            agent.token = answer.json()["token"]
            agent.said_of(wanted.gpu, wanted.revision, "applied", wanted.sizes)

    async def cuts(self) -> None:
        name = self.draw.choice(list(self.nodes))
        agent = self.nodes[name]
        sizes = self.draw.choice(([], [3, 3], [2, 2, 3], [7], [1] * 7))
        gpu = self.draw.randrange(2)
        answer = await self.ask("PUT", f"/v1/nodes/{name}/gpus/{gpu}/partition", json={"sizes": sizes})
        may = agent.partitions is not None or not sizes
        assert answer.status_code == (200 if may else 409), answer.text

    async def ends(self) -> None:
        for agent in self.nodes.values():
            for allocation, rank in list(agent.ranks.items()):
                if rank["state"] == "running" and (
                    allocation not in agent.reply.allocations or self.draw.random() < 0.3
                ):
                    since, until = rank["started_at"], f"{datetime.now(UTC)}"
                    code = self.draw.choice((0, 0, 0, 1))
                    agent.say(allocation, RankState.EXITED, code=code, started_at=since, ended_at=until)

    async def energy(self) -> None:
        for name, agent in self.nodes.items():
            since_s = self.upto.get(name, now_s() - 1)
            until_s = now_s() - self.draw.choice((0, 0, 0.5))
            if until_s <= since_s:
                continue
            live = [each for each, rank in agent.ranks.items() if rank["state"] == "running" and each in self.placed]
            usages = [
                usage(
                    each,
                    self.draw.uniform(1, 3e5),
                    devices=self.placed[each][name],
                    cpu_energy_j=self.draw.uniform(0, 500),
                )
                for each in live
            ]
            interval = agent.interval(since_s, until_s, *usages, usage(None, 40.0, devices=[]))
            self.upto[name] = until_s
            self.sent.append((agent, [interval]))
        late = [each for each in self.sent if self.draw.random() < 0.7]
        self.draw.shuffle(late)
        for each in late:
            agent, intervals = each
            if agent.node_id not in self.nodes:
                self.sent.remove(each)
                continue
            answer = await agent.report(*intervals)
            assert answer.status_code == 200, answer.text
            for told in intervals:
                between = rules.at_s(told["start_at"]), rules.at_s(told["end_at"])
                self.claims[agent.node_id, told["boot_id"], told["sequence"]] = [
                    (use["allocation_id"], *between, len(use["devices"]))
                    for use in told["usages"]
                    if use["allocation_id"]
                ]
            if self.draw.random() < 0.6:  # or again, later
                self.sent.remove(each)

    # What holds.

    async def check_jobs(self) -> None:
        for job in self.draw.sample(list(self.jobs), min(len(self.jobs), 12)):
            tenant, _ = self.jobs[job]
            found = (await self.ask("GET", f"/v1/jobs/{job}", ok=True)).json()
            assert found["tenant_id"] == tenant
            before = self.known.get(job)
            if before:
                assert before["state"] not in FINAL or found["state"] == before["state"], (before, found)
                assert found["generation"] >= before["generation"]
                assert found["submitted_at"] == before["submitted_at"]
            assert job not in self.held or found["state"] in ("held", "cancelled"), ("held, and goes on", found)
            self.known[job] = found

    async def check_keys(self) -> None:
        for key in self.keys:
            if key.ends_s + KEY_AGE_S < now_s() and self.draw.random() < 0.2:
                for method, path in (("GET", "/v1/jobs"), ("POST", "/v1/jobs"), ("GET", "/v1/reports/footprint"),
                                     ("GET", "/v1/policies"), ("GET", "/v1/carbon/zones")):  # fmt: skip
                    body = {"name": "x", "command": ["true"]} if method == "POST" else None
                    answer = await self.ask(method, path, key.headers, json=body)
                    assert answer.status_code == 401, (method, path, answer.text)

    async def check_sight(self) -> None:
        key = self.draw.choice(self.live_keys("user", "read_only"))
        for path in (*LISTS, *VARIANTS):
            where = self.filled(path)
            answer = await self.ask("GET", where, key.headers)
            if not Role(key.role).may("GET", ROLE_OF[path.partition("?")[0]]):
                assert answer.status_code == 403, (path, answer.text)
            if answer.status_code in (403, 404):
                continue
            for each in rows_of(answer.json()):
                tenant = each.get("tenant_id") or each.get("tenant")
                if path.startswith("/v1/reports/footprint?group_by=tenant"):
                    tenant = each["group"]
                if each.get("maintenance") or path.startswith(("/v1/fleets", "/v1/pools")):  # the cluster's
                    continue
                assert tenant in (None, key.tenant), (path, each, key.tenant)
                if key.project and "{" not in path:
                    assert each.get("project") in (None, key.project), (path, each)
        answer = await self.ask("GET", "/v1/budgets", key.headers, ok=True)
        assert all(each["tenant_id"] == key.tenant for each in answer.json()["items"])
        for line in csv.DictReader((await self.lines(key.headers)).splitlines()):
            assert line["tenant"] == key.tenant
            assert key.project in (None, line["project"])

    async def lines(self, who: dict[str, str], query: str = "") -> str:
        return (await self.ask("GET", f"/v1/reports/lines{query}", who, ok=True)).text

    async def check_sums(self) -> None:
        whose = [self.admin, *(key.headers for key in self.live_keys("user") if not key.project)]
        who = self.draw.choice(whose)
        for _ in range(8):  # until nobody else has sent energy meanwhile
            sums = dict[str, dict[str, float]]()
            totals = list[Any]()
            for by in ("job", "project", "tenant", "day", "node", "zone", "user", "month"):
                lines, cursor = list[dict[str, Any]](), None
                while True:
                    more = {"cursor": cursor} if cursor else {}
                    asked = {"group_by": by, "limit": "7" if by == "job" else "1000", **more}
                    report = (await self.ask("GET", "/v1/reports/footprint", who, ok=True, params=asked)).json()
                    lines += report["lines"]
                    totals.append(report["total"])
                    if not (cursor := report["next_cursor"]):
                        break
                names = [(each["group"], each["then_group"]) for each in lines]
                assert len(names) == len(set(names)), (by, names)
                sums[by] = {name: sum(each["footprint"][name] for each in lines) for name in AMOUNTS}
            text = await self.lines(who)
            rows = [row for row in csv.DictReader(text.splitlines()) if row["job_id"]]
            sums["lines"] = {name: sum(float(row[name] or 0) for row in rows) for name in AMOUNTS}
            again = (await self.ask("GET", "/v1/reports/footprint", who, ok=True)).json()["total"]
            if all(each == again for each in totals):
                break
        else:
            return
        for name in AMOUNTS:
            total = report["total"][name] - report["idle"][name]
            for by, each in sums.items():
                assert each[name] == pytest.approx(total, rel=1e-3, abs=1e-3), (by, name, each[name], total)
        for job in self.draw.sample(list(self.jobs), min(len(self.jobs), 5)):
            lines = csv.DictReader((await self.lines(self.admin, f"?job={job}")).splitlines())
            told = (await self.ask("GET", f"/v1/jobs/{job}/footprint?limit=1000", ok=True)).json()
            shown = (await self.ask("GET", f"/v1/jobs/{job}", ok=True)).json()["footprint"]
            assert shown == told["footprint"]
            assert sum(float(row["energy_j"]) for row in lines) == pytest.approx(shown["energy_j"], rel=1e-3, abs=1e-2)
            assert sum(each["energy_j"] for each in told["intervals"]) == pytest.approx(
                shown["energy_j"], rel=1e-3, abs=1e-2
            )
        found = (await self.ask("GET", "/v1/invariants", ok=True)).json()
        assert found["holds"], [each for each in found["items"] if not each["holds"]]

    async def check_pages(self) -> None:
        path = self.filled(self.draw.choice((*LISTS, *VARIANTS)))
        key = self.draw.choice((None, *(each.headers for each in self.live_keys("operator"))))
        if path == "/v1/keys":
            key = None
        if (await self.ask("GET", path, key)).status_code == 404:  # of a job, where there is none
            return
        before = await self.all_of(path, key, 500)
        size = max(self.draw.choice((1, 2, 3, 7)), len(before) // 20)
        paged = await self.all_of(path, key, size, disturbed=True)
        after = await self.all_of(path, key, 500)
        still = set(after)
        there = [each for each in before if each in still]
        counted, known = Counter(paged), set(there)
        wrong = [(each, counted[each]) for each in there if counted[each] != 1]
        assert not wrong, (path, size, len(before), wrong[:3])
        assert all(count == 1 for count in counted.values()), (path, counted.most_common(3))
        if "footprint" not in path:  # whose order is that of amounts, which grow
            assert [each for each in paged if each in known] == there, (path, size)

    async def all_of(self, path: str, who: dict[str, str] | None, limit: int, *, disturbed: bool = False) -> list[str]:
        found, cursor, pages = list[str](), None, 0
        here = path.partition("?")[0]
        while True:
            params = dict(httpx.URL(path).params) | {"limit": str(limit)} | ({"cursor": cursor} if cursor else {})
            page = (await self.ask("GET", here, who, ok=True, params=params)).json()
            rows = rows_of(page)
            assert len(rows) <= limit
            found += [self.identity(path, each) for each in rows]
            cursor, pages = page.get("next_cursor"), pages + 1
            if not cursor:
                return found
            if self.draw.random() < 0.1:
                other = self.draw.choice(
                    [each for each in LISTS if "{" not in each and each not in (here, "/v1/plans")]
                )
                refused = await self.ask("GET", other, who, params={"cursor": cursor})
                assert refused.status_code in (403, 422), (path, other, refused.text)
            if disturbed and pages < 6:
                steps = (self.submit, self.steer, self.user, self.budget, self.beats, self.adds, self.reserve)
                await self.draw.choice(steps)()

    @staticmethod
    def identity(path: str, row: dict[str, Any]) -> str:
        if "audit" in path:
            return repr(row)
        if "/v1/reports/footprint" in path:
            return f"{row['group']}/{row['then_group']}"
        return next(str(row[name]) for name in NAMES if name in row)

    # What adds up.

    async def every(self, path: str, who: dict[str, str] | None = None, **query: Any) -> list[dict[str, Any]]:
        found, cursor = list[dict[str, Any]](), {}
        while True:
            page = (await self.ask("GET", path, who, ok=True, params={**query, **cursor, "limit": 500})).json()
            found += rows_of(page)
            if not page["next_cursor"]:
                return found
            cursor = {"cursor": page["next_cursor"]}

    async def check_holders(self) -> None:
        states = ["starting", "running", "preempting"]
        page = (await self.ask("GET", "/v1/jobs", ok=True, params={"state": states, "limit": 500})).json()
        if page["next_cursor"] is None:  # one statement's rows
            rules.one_holder(page["items"])
            there = {name: agent.registration["devices"] for name, agent in self.nodes.items()}
            rules.holds_what_is_there(page["items"], there)
        for job in page["items"]:
            for name in {each for names in (job["spec"].get("after") or {}).values() for each in names or []}:
                self.known[name] = (await self.ask("GET", f"/v1/jobs/{name}", ok=True)).json()
            rules.waited(job, self.known)
        windows = await self.every("/v1/reservations")
        rules.promised_once(
            windows,
            {
                name: sum("parent" not in one for one in each.registration["devices"])
                for name, each in self.nodes.items()
            },
        )
        if self.arrays:
            array = self.draw.choice(self.arrays)
            for _ in range(8):  # until nothing has changed meanwhile
                told = (await self.ask("GET", f"/v1/arrays/{array}", ok=True)).json()
                tasks = await self.every("/v1/jobs", array=array)
                if told == (await self.ask("GET", f"/v1/arrays/{array}", ok=True)).json():
                    rules.array_adds_up(told, tasks)
                    break

    async def check_accounts(self) -> None:
        for _ in range(8):  # until nobody else has sent energy meanwhile
            text = await self.lines(self.admin)
            days = (await self.ask("GET", "/v1/reports/footprint", ok=True, params={"group_by": "day"})).json()
            since = (datetime.now(UTC) - timedelta(days=99)).isoformat()
            hours = (await self.ask("GET", "/v1/reports/hours", ok=True, params={"start": since})).json()["items"]
            if text == await self.lines(self.admin):
                break
        else:
            return
        lines = list(csv.DictReader(text.splitlines()))
        rules.lines_add_up(lines, days["lines"], hours, days)
        rules.within_physics(lines, self.most_w)

    async def check_lives(self) -> None:
        """Hold that jobs' lives went as promised, and what each was charged is what its gangs held."""
        jobs = {each["id"]: each for each in await self.every("/v1/jobs", label=f"walk={self.tag}")}
        lives = {job: rules.Life(found, await self.events_of(job)) for job, found in jobs.items()}
        for life in lives.values():
            life.check(MIN_RUN_S)
        rules.given_back_to_who_waited(lives.values())
        rules.reserved_stays(lives.values(), await self.every("/v1/reservations"))
        lines = csv.DictReader((await self.lines(self.admin)).splitlines())
        lines = [each for each in lines if self.tag in each["node_id"]]  # not of the installation's own node
        claims = [each for told in self.claims.values() for each in told]
        rules.charged_as_held(lives, claims, lines)

    async def events_of(self, job: str) -> list[dict[str, Any]]:
        text = (await self.ask("GET", f"/v1/jobs/{job}/events?follow=false", ok=True)).text
        return [json.loads(line.removeprefix("data:")) for line in text.splitlines() if line.startswith("data:")]

    async def check_cuts(self) -> None:
        """Hold that what was wanted of GPUs that nobody holds comes to its end, and the API shows it."""
        until_s = now_s() + WITHIN_S
        while True:
            nodes = [each for each in await self.every("/v1/nodes") if each["id"] in self.nodes]
            cuts = [cut for each in nodes for cut in each["partitions"]]
            if all(each["state"] in ("applied", "failed") for each in cuts):
                break
            assert now_s() < until_s, ("cuts that do not end", cuts)
            await self.beats()
        for shown in nodes:
            assert shown["gpus_in_use"] == 0, shown
            devices = self.nodes[shown["id"]].registration["devices"]
            assert {each["uuid"] for each in shown["devices"]} == {each["uuid"] for each in devices}, shown

    async def check_budgets(self) -> None:
        """Hold that budgets come to what the ledger has, once it has grown no more for a while."""
        until_s = now_s() + WITHIN_S
        while True:
            lines = list(csv.DictReader((await self.lines(self.admin)).splitlines()))
            rows = (await self.ask("GET", "/v1/budgets", ok=True)).json()["items"]
            wrong = rules.budgets(rows, lines, f"{datetime.now(UTC):%Y-%m}")
            if not wrong:
                return
            assert now_s() < until_s, wrong[:3]
            await asyncio.sleep(0.5)

    ACTIONS = (
        *("submit",) * 10, *("batch",) * 5, *("steer",) * 6, *("steers_array",) * 2, *("beats",) * 12, *("ends",) * 5,
        *("energy",) * 8, "key", "key", "ends_key", "user", "limits", "limits", "cuts", "cuts", "cuts",
        "budget", "budget", "budget", "reserve", "order",
        "policy", "policy", "estimate", "adds", "hook", "hook", "hook", "revoke", "revoke",
    )  # fmt: skip

    async def step(self) -> None:
        name = self.draw.choice(self.ACTIONS)
        self.did.append(name)
        await getattr(self, name)()

    async def check(self, at: int) -> None:
        self.check_messages()
        await self.check_keys()
        if at % 5 == 0:
            await self.check_jobs()
        if at % 10 == 0:
            await self.check_sight()
        if at % 10 == 5:
            await self.check_pages()
        if at % 5 == 3:
            await self.check_holders()
        if at % 25 == 24:
            await self.check_sums()
            await self.check_accounts()

    async def end(self) -> None:
        """Let everything come to its end."""
        for job, (tenant, _) in list(self.jobs.items()):
            found = (await self.ask("GET", f"/v1/jobs/{job}", ok=True)).json()
            assert found["tenant_id"] == tenant
            if found["state"] not in FINAL:
                await self.ask("POST", f"/v1/jobs/{job}/cancel")
        for array in self.arrays:
            await self.ask("POST", f"/v1/arrays/{array}/cancel")
        until_s, label = now_s() + WITHIN_S, f"walk={self.tag}"
        live = {"state": ["queued", "held", "starting", "running", "preempting"]}
        for each in await self.every("/v1/jobs", **live):  # those of other tests may begin on nodes of this walk
            await self.ask("POST", f"/v1/jobs/{each['id']}/cancel")

        async def left() -> list[dict[str, Any]]:
            own, known = await self.every("/v1/jobs", label=label, **live), await self.every("/v1/jobs", **live)
            return own + [each for each in known if {share["node_id"] for share in each["placement"]} & {*self.nodes}]

        while found := await left():
            assert now_s() < until_s, ("jobs that do not end", found[:2])
            await self.beats()
            await self.ends()
        await self.check_jobs()
        await self.check_sums()
        await self.check_accounts()
        await self.check_budgets()
        await self.check_lives()
        await self.check_cuts()


async def walked(
    gateway_url: str, agents: httpx.AsyncClient, telemetry_url: str, admin: dict[str, str], seed: int, steps: int
) -> Walk:
    """Walk, and say where a walk failed."""
    async with receiving() as receiver, httpx.AsyncClient(base_url=gateway_url, timeout=WITHIN_S) as http:
        walk = Walk(http, agents, telemetry_url, admin, receiver, random.Random(seed))
        await walk.begin()
        at = 0
        try:
            for at in range(steps):
                await walk.step()
                await walk.check(at)
            await walk.end()
        except BaseException as error:
            error.add_note(f"seed {seed}, step {at}: {walk.did[-8:]}")
            raise
        finally:
            for name in [*walk.nodes]:
                await walk.ask("POST", f"/v1/nodes/{name}/revoke")
            for budget in walk.budgets:
                await walk.ask("DELETE", f"/v1/budgets/{budget}")
            for hook in walk.hooks:
                await walk.ask("DELETE", f"/v1/webhooks/{hook}")
        return walk


async def test_what_each_service_promises_holds_whatever_is_done(world: World) -> None:
    """A key that has ended is tried once gateways must know it."""
    async with httpx.AsyncClient(timeout=WITHIN_S) as agents:
        await walked(world.stack.gateway_url, agents, world.urls["telemetry"], world.admin, 4, 15 * MOST)
