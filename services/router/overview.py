"""What a router process knows of its servers, lanes and applications, for ``/status`` and ``/metrics``."""

import time
from collections import Counter
from dataclasses import dataclass

from services.router.apps.coordination import Coordinator
from services.router.apps.queue import Assigner
from services.router.breaker import BreakerState
from services.router.fleet import Fleet
from services.router.gate import Gate
from services.router.lanes import Lanes
from services.router.metrics import Gauge
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
        servers = list(self.fleet.every_server())
        lanes = self.lanes.all()
        return [
            Gauge(
                "wattshift_router_held",
                "Requests held at a server.",
                ("server", "location"),
                {(each.id, each.location): float(each.held) for each in servers},
            ),
            Gauge(
                "wattshift_router_server_up",
                "1 for a server that is given requests.",
                ("server", "location"),
                {
                    (each.id, each.location): float(each.is_ready and each.breaker.state(now_s) is BreakerState.CLOSED)
                    for each in servers
                },
                is_summed=False,
            ),
            Gauge(
                "wattshift_router_waiting",
                "Requests that wait in a lane.",
                ("pool", "request_class"),
                {tuple(lane.name.split("\n")): float(len(lane.queue)) for lane in lanes},
            ),
            Gauge(
                "wattshift_router_app_waiting",
                "Requests that wait in an application's queue, of all processes for which this one assigns instances.",
                ("app",),
                {(name,): float(queue.waiting) for name, queue in self.assigner.queues.items()},
            ),
            Gauge(
                "wattshift_router_app_instances",
                "Instances that are ready.",
                ("app", "variant"),
                {
                    (app, variant): float(count)
                    for (app, variant), count in Counter(
                        (each.instance.app, each.instance.variant)
                        for each in self.fleet.instances.values()
                        if each.instance is not None and each.is_ready
                    ).items()
                },
                is_summed=False,
            ),
            Gauge(
                "wattshift_router_in_flight",
                "Requests that are not answered yet.",
                (),
                {(): float(self.gate.in_flight)},
            ),
            Gauge(
                "wattshift_router_processes",
                "Router processes alive.",
                (),
                {(): float(self.peers.processes)},
                is_summed=False,
            ),
        ]
