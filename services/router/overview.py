"""What a router process knows of its servers, lanes and applications, for ``/status`` and ``/metrics``."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.router.apps.coordination import Coordinator
from services.router.apps.queue import Assigner
from services.router.breaker import BreakerState
from services.router.fleet import Fleet
from services.router.gate import Gate
from services.router.lanes import Lanes
from services.router.metrics import Gauge, Labels
from services.router.peers import Peers

SHOWN = {"id", "pool", "location", "request_class", "state", "power_w", "gco2_per_kwh", "pue"}
APP_SHOWN = {"id", "variant", "slice", "location", "state", "gco2_per_kwh"}
"""What the status repeats of a server's row of the routing table, and of an instance's."""


@dataclass(frozen=True)
class Overview:
    """The parts of one router process that the overview reads."""

    name: str
    peers: Peers
    fleet: Fleet
    lanes: Lanes
    assigner: Assigner
    coordinator: Coordinator
    gate: Gate

    def status(self) -> dict[str, object]:
        now_s = time.monotonic()
        return {
            "router": self.name,
            "processes": self.peers.processes,
            "table_made_at_s": self.fleet.made_at_s,
            "servers": [
                {
                    **each.spec.model_dump(include=SHOWN),
                    "breaker": each.breaker.state(now_s),
                    "held": each.held,
                    "limit": each.limit,
                    "ttft_s": each.costs.ttft_s,
                    "tbt_s": each.costs.tbt_s,
                    "network_s": each.origin.connect_s,
                    "slot_w": each.energy and each.energy.slot_w,
                }
                for each in self.fleet.every_server()
            ],
            "lanes": [
                {
                    "name": lane.name.replace("\n", "/"),
                    "waiting": len(lane.queue),
                    "late": lane.queue.late,
                    "in_service": sum(lane.in_service.values()),
                    "preempted": lane.preempted,
                }
                for lane in self.lanes.all()
            ],
            "apps": [
                {
                    "name": app.name,
                    "assigned_by": self.coordinator.assigned_by,
                    "waiting": 0 if queue is None else queue.waiting,
                    "instances": [
                        {
                            **each.instance.model_dump(include=APP_SHOWN),
                            "held": each.held,
                            "breaker": None if queue is None else queue.breaker_state(each.id, now_s),
                        }
                        for each in self.fleet.everyone()
                        if each.instance is not None and each.instance.app == app.name
                    ],
                }
                for app in self.fleet.apps.values()
                for queue in (self.assigner.queues.get(app.name),)
            ],
        }

    def gauges(self) -> list[Gauge]:
        now_s = time.monotonic()
        servers = {(each.id, each.location): each for each in self.fleet.every_server()}
        by_server, ready = ("server", "location"), Counter[Labels]()
        for each in self.fleet.instances.values():
            if each.instance is not None and each.is_ready:
                ready[each.instance.app, each.instance.variant] += 1
        is_up = {
            labels: float(each.is_ready and each.breaker.state(now_s) is BreakerState.CLOSED)
            for labels, each in servers.items()
        }
        held = {labels: float(each.held) for labels, each in servers.items()}
        drift = {
            (*labels, what): ratio
            for labels, each in servers.items()
            if each.spec.ttft_ms and each.spec.tbt_ms
            for what, ratio in zip(("prompt", "answer"), each.costs.drift, strict=True)
        }
        of_drift = "Time per token of prompts and answers, as learned from answers, as a share of the profile's."
        in_lanes = {tuple(lane.name.split("\n")): float(len(lane.queue)) for lane in self.lanes.all()}
        in_apps = {(name,): float(queue.waiting) for name, queue in self.assigner.queues.items()}
        of_apps = "Requests that wait in an application's queue, of all processes for which this one assigns instances."

        def gauge(name: str, help_text: str, labels: Labels, values: Mapping[Any, float], is_summed: bool) -> Gauge:
            return Gauge(f"wattshift_router_{name}", help_text, labels, values, is_summed)

        return [
            gauge("held", "Requests held at a server.", by_server, held, True),
            gauge("server_up", "1 for a server that is given requests.", by_server, is_up, False),
            gauge("profile_drift_ratio", of_drift, (*by_server, "tokens"), drift, False),
            gauge("waiting", "Requests that wait in a lane.", ("pool", "request_class"), in_lanes, True),
            gauge("app_waiting", of_apps, ("app",), in_apps, True),
            gauge("app_instances", "Instances that are ready.", ("app", "variant"), ready, False),
            gauge("in_flight", "Requests that are not answered yet.", (), {(): self.gate.in_flight}, True),
            gauge("processes", "Router processes alive.", (), {(): self.peers.processes}, False),
        ]
