"""Requests to an application that several router processes serve: one of them assigns the instances for all."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast

from services.contracts.routing import RoutedApp, RoutedAppServer, RouterState, RoutingTable
from services.kit.crowd import Crowd, Guest
from services.router.apps import remote
from services.router.apps.coordination import Coordinator
from services.router.apps.queue import AppQueue, Assigner, NotAssignedError, Outcome, Seat, Ticket
from services.router.apps.remote import AskingPeer, AssignerLink
from services.router.breaker import Breaker
from services.router.fleet import Fleet
from tests.simulation.kept import kept
from tests.simulation.loop import EPOCH_S, Simulation
from tests.simulation.router import ejected

PATIENCE_S, LOOK_S = 1.0, 0.25
CALM_S = 8.0
"""Within this time all processes find the one that assigns, if nothing fails."""

KEPT = frozenset({"Assigner.queues", "AppQueue.seats", "AppQueue._free", "Fleet.apps", "Fleet.instances"}) | {
    "Instance.headers",
    "Coordinator._others",
    "Coordinator._asking",
    "Coordinator._lost_at_s",
    "Coordinator._not_reached",
    "AskingPeer._peers",
    "AskingPeer._sent_rows",
}
"""What a process knows of its table and of the other processes, whether or not a request is there."""


ACCURACY_PCT = {"a": 80.0, "b": 60.0, "c": 90.0}
LEAST_PCT = 75.0
"""What instances are, and what some requests ask for."""


class _Process:
    """One router process: its queues, and its connections to the others.

    Attributes:
        has_lost_any: Whether any of them has ended connections.
        lost_app_s: When the application was gone last.
        had_instance_s: When its queue had an instance last, as far as tables say.
    """

    has_lost_any = False
    lost_app_s = -math.inf

    def __init__(self, name: str, token: str, most_waiting: int) -> None:
        self.most_waiting = most_waiting
        self.assigner = Assigner(most_waiting=most_waiting, patience_s=PATIENCE_S)
        self.fleet = Fleet()
        self.coordinator = Coordinator(name, token, self.assigner, self.fleet)
        self.is_alive = True
        self.had_instance_s = -math.inf

    def adopt(self, table: RoutingTable) -> None:
        """Take in a routing table."""
        self.fleet.adopt(table)
        self.assigner.adopt(table)
        if self.has_instances:
            self.had_instance_s = time.monotonic()

    @property
    def has_instances(self) -> bool:
        """Whether its queue knows any instance."""
        queue = self.assigner.queues.get("app")
        return queue is not None and bool(queue.seats)

    @property
    def has_none(self) -> bool:
        """Whether there is no instance, and was none for so long that nobody waits for one, or the queue is new."""
        was_there = time.monotonic() - self.had_instance_s <= PATIENCE_S and self.had_instance_s > self.lost_app_s
        return not was_there and not self.has_instances

    def watch_links(self, simulation: Simulation) -> None:
        """Have a connection end for no other reason than that it is ended."""
        lost = self.coordinator._on_lost

        def judged(link: AssignerLink) -> None:
            may_end = self.coordinator._link is not link or simulation.loop.has_cut or self.has_lost_any
            simulation.check("a connection that works is kept", may_end, f"{self.coordinator.name}: {link.peer}")
            used = self.coordinator._link
            lost(link)
            simulation.check("a connection that works is kept", self.coordinator._link is used or used is link)

        cast(Any, self.coordinator)._on_lost = judged

    def count_meetings(self, simulation: Simulation, met: Counter[tuple[Any, str]]) -> None:
        """Count how often another one was reached or unknown; until then it is said once that it is not reached."""
        coordinator, itself = cast(Any, self.coordinator), simulation.process()
        connect, choose, switch = coordinator._connect, coordinator.choose, coordinator._switch

        async def connected(peer: str, address: str) -> None:
            await itself.start(connect(peer, address))

        def chosen(others: Mapping[str, RouterState]) -> None:
            met.update((itself, name) for name in ("p1", "p2", "p3", "p4") if name not in others)
            choose(others)

        def switched(link: AssignerLink | None) -> None:
            met.update([(itself, link.peer)] if link is not None else ())
            switch(link)

        coordinator._connect, coordinator.choose, coordinator._switch = connected, chosen, switched

    def lose_peers(self) -> None:
        """End the connections of those who ask, in the order in which they were made: a set has no order."""
        type(self).has_lost_any = True
        for peer in sorted(self.coordinator._asking, key=lambda peer: cast(Any, peer._transport).number):
            peer.close()


def _table(instances: dict[str, str], concurrency: int, *, has_app: bool = True) -> RoutingTable:
    known = {"app": "app", "variant": "v", "url": "http://127.0.0.1:1", "location": "here"}
    return RoutingTable(
        made_at=datetime.fromtimestamp(EPOCH_S, UTC),
        pools=[],
        servers=[],
        apps=[RoutedApp(name="app", tenant_id="acme", concurrency=concurrency)] if has_app else [],
        app_servers=[
            RoutedAppServer.model_validate(
                known | {"id": "odd", "state": "ready", "app": "gone", "accuracy_pct": 80.0}
            ),
            *(
                RoutedAppServer.model_validate(known | {"id": name, "state": state, "accuracy_pct": ACCURACY_PCT[name]})
                for name, state in instances.items()
                if has_app
            ),
        ],
    )


class _FullCrowd(Crowd):
    """The connections of a process that has no place for another one now and then.

    Attributes:
        refused: Those for which it had none.
    """

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(1_000)
        self._simulation = simulation
        self._often = (0.0, 0.3)[simulation.choices.below(2)]
        self.refused: list[Any] = []

    def enter(self, guest: Guest, transport: Any, proxies: Any = ()) -> int | None:
        """As of its base."""
        if self._often and not self._simulation.is_calm and self._simulation.choices.below(2, often=self._often):
            self.refused.append(transport)
            return None
        return super().enter(guest, transport, proxies)


async def play(simulation: Simulation) -> None:
    """Processes find and lose each other while requests come, wait, leave and end; then every instance is free."""
    draw = simulation.choices.below
    _Process.has_lost_any, _Process.lost_app_s = False, -math.inf
    has_stranger = draw(6) == 1
    crowd = _FullCrowd(simulation)
    simulation.instead(remote, CROWD=crowd)
    most_waiting = (5, 0)[draw(2, often=0.4)]
    processes = [_Process(name, "token", most_waiting) for name in ("p1", "p2", "p3")[: 1 + draw(3)]]
    if has_stranger:  # of another installation; nobody lets it in
        processes.append(_Process("p4", "other", most_waiting))
    instances = dict[str, str]((name, "ready") for name in ("a", "b", "c")[: 1 + draw(3)])
    concurrency = 1 + draw(2, often=0.3)
    met = Counter[tuple[Any, str]]()
    simulation.says_once(
        "router_peer.not_reached", lambda said: met[simulation.loop.process_now(), said["peer"]], "peer"
    )
    for process in processes:
        process.adopt(_table(instances, concurrency))
        process.watch_links(simulation)
        process.count_meetings(simulation, met)
        await process.coordinator.listen("simulated")
        await asyncio.sleep(0.01)
        process.coordinator.started_at_s = time.time()
    simulation.holds("no queue counts below nothing", lambda: _negative(processes))
    simulation.rests("no instance with room stands beside a request that may use it", lambda: _stands_idle(processes))
    simulation.rests("whoever assigns is connected", lambda: _unconnected(processes))
    simulation.holds("a stranger is not let in", lambda: _let_in(processes))
    simulation.holds("who has no place among connections is not kept", lambda: _kept(crowd))
    give, take = _judged(simulation, AppQueue._give), _refused(simulation, AppQueue.take)
    simulation.instead(AppQueue, _give=give, take=take, _free_for=_spared(simulation, AppQueue._free_for))
    simulation.instead(Breaker, failed=ejected(simulation, Breaker.failed))
    simulation.instead(AssignerLink, message=_told(simulation, AssignerLink.message))
    simulation.instead(AskingPeer, send=_welcoming(simulation, AskingPeer.send))
    requests = [
        simulation.start(_ask(simulation, processes[draw(len(processes))], n), may_be_cancelled=True)
        for n in range(2 + draw(8))
    ]
    strays = simulation.start(_stray(simulation, processes))
    finding = simulation.loop.create_task(_find(simulation, processes))
    changing = simulation.loop.create_task(_change(simulation, processes, instances, concurrency))
    await asyncio.wait([*requests, strays])
    changing.cancel()
    for process in processes:
        process.adopt(_table(instances, concurrency))
    simulation.calm_down()
    await asyncio.sleep(CALM_S)
    first = processes[0].coordinator.name
    said = [each.coordinator.assigned_by for each in processes if each.coordinator.name != "p4"]
    simulation.check("one process assigns for all", set(said) == {first}, str(said))
    finding.cancel()
    await simulation.quiet()
    for process in processes:
        queues = process.assigner.queues.values()
        held = {seat.id: seat.held for queue in queues for seat in queue.seats.values() if seat.held}
        simulation.check("every instance is given back", not held, f"{process.coordinator.name}: {held}")
        simulation.check("nothing waits for nobody", not any(queue.waiting for queue in queues))
        simulation.check("no ticket is left", not process.coordinator._tickets)
        left = kept(process.assigner, but=KEPT) | kept(process.coordinator, but=KEPT)
        simulation.check("nothing is kept of who has gone", not left, f"{process.coordinator.name}: {left}")
    for process in processes:
        process.adopt(_table(instances, concurrency))
        seats = {name for queue in process.assigner.queues.values() for name in queue.seats}
        simulation.check("nothing is kept of who has gone", seats <= instances.keys(), str(seats))
        process.lose_peers()
        await process.coordinator.stop()
    await simulation.quiet()
    left = kept(crowd)
    simulation.check("nothing is kept of who has gone", not left, f"the crowd: {left}")
    await Coordinator("p5", "token", processes[0].assigner, processes[0].fleet).stop()  # it never listened


async def _stray(simulation: Simulation, processes: list[_Process]) -> None:
    """Connect as somebody who is no router: say nothing, or something else, and leave, or do not."""
    draw = simulation.choices.below
    for _ in range(draw(3)):
        await asyncio.sleep(0.1 * draw(10))
        port = int(str(processes[draw(len(processes))].coordinator.address).rpartition(":")[2])
        try:
            transport, _ = await simulation.loop.create_connection(asyncio.Protocol, "simulated", port)
        except OSError:
            continue
        if draw(2):
            transport.write((b"\n", b"[]\n", b'["take",1,"app","acme",null,[]]\n', b"x" * 100)[draw(4)])
        if draw(3):
            await asyncio.sleep(0.1 * draw(5))
            transport.close()


async def _find(simulation: Simulation, processes: list[_Process]) -> None:
    """Have processes hear of each other as through Redis: late, and not of those that seem dead."""
    draw = simulation.choices.below
    while True:
        for process in processes:
            others = {
                each.coordinator.name: RouterState(
                    at_s=time.time(), address=each.coordinator.address, started_at_s=each.coordinator.started_at_s
                )
                for each in processes
                if each is not process and (simulation.is_calm or not draw(6, often=0.3))
            }
            process.coordinator.choose(others)
            if draw(30) == 1 and not simulation.is_calm:
                simulation.loop.call_later(0.01 * draw(4), process.lose_peers)  # also of who is just let in
            process.assigner.check()
        await asyncio.sleep(LOOK_S)


async def _change(
    simulation: Simulation, processes: list[_Process], instances: dict[str, str], concurrency: int
) -> None:
    draw = simulation.choices.below
    while True:
        await asyncio.sleep(0.3)
        if draw(3) == 1:
            name = ("a", "b", "c")[draw(3)]
            match draw(3):
                case 0:
                    instances[name] = "ready"
                case 1:
                    instances[name] = "draining"
                case _:
                    instances.pop(name, None)
        has_app = not draw(2, often=0.1)
        _Process.lost_app_s = _Process.lost_app_s if has_app else time.monotonic()
        for process in processes:
            process.adopt(_table(instances, concurrency, has_app=has_app))


async def _ask(simulation: Simulation, process: _Process, number: int) -> None:
    draw = simulation.choices.below
    await asyncio.sleep(0.05 * draw(20))
    ticket = process.coordinator.ticket("app", ("acme", "beta")[draw(2, often=0.3)], LEAST_PCT * draw(2, often=0.3))
    for _ in range(3):
        patience_s = (0.5, 0.05, 4.0)[draw(3)]
        own_name, living = process.coordinator.name, simulation.living
        own = process.coordinator.assigned_by == own_name
        waited_s = time.monotonic() - process.had_instance_s
        has_none = waited_s > PATIENCE_S and not process.has_instances
        is_hopeless = own and has_none and "app" in process.assigner.queues
        try:
            await process.coordinator.take(ticket, patience_s)
        except NotAssignedError as error:
            is_true = {
                "queue_full": living > process.most_waiting,  # some may have left while it was told
                "unknown_app": _Process.lost_app_s > -math.inf,
                "no_instance": ticket.least_accuracy_pct > 0
                or not own
                or has_none
                or process.has_none
                or process.coordinator.assigned_by != own_name,
            }.get(error.reason, True)
            simulation.check("who is refused is told a reason that is true", is_true, error.reason)
            process.coordinator.leave(ticket, Outcome.NOT_ASKED)  # once more, which changes nothing
            return
        except TimeoutError:
            simulation.check("nobody waits where there has been no instance for long", not is_hopeless, str(ticket.id))
            return
        simulation.check("nobody waits where there has been no instance for long", not is_hopeless, str(ticket.id))
        outcome = Outcome.NOT_ASKED
        try:
            given = ticket.instance
            await asyncio.sleep(0.05 * draw(20))
            outcome = (Outcome.ANSWERED, Outcome.FAILED, Outcome.UNREACHABLE, Outcome.BUSY)[draw(4, often=0.3)]
        finally:
            process.coordinator.leave(ticket, outcome)
        if outcome is Outcome.ANSWERED or given is None:
            return
        ticket.excluded |= {given}


def _may_have(ticket: Ticket, instance: str) -> bool:
    """Whether a request may be sent to an instance that did not fail it: it is as accurate as that asks for."""
    return instance not in ticket.excluded and ACCURACY_PCT[instance] >= ticket.least_accuracy_pct


def _judged(simulation: Simulation, give: Any) -> Any:
    def judge(self: AppQueue, ticket: Ticket, seat: Seat, *, is_told: bool = True) -> None:
        now_s = time.monotonic()
        if is_told:
            others = [each for each in self.tickets.values() if each.tenant == ticket.tenant and each is not ticket]
            before = [each for each in others if (each.place or 0) < (ticket.place or 0)]
            overtaken = [each.id for each in before if _may_have(each, seat.id)]
            simulation.check("nobody is overtaken", not overtaken, f"{ticket.id} before {overtaken}")
            may = seat.is_ready and seat.held < seat.limit and seat.breaker.passes(now_s)
            may &= ACCURACY_PCT[seat.id] >= ticket.least_accuracy_pct
            simulation.check("an instance gets what it may have", may, f"{seat}")
        give(self, ticket, seat, is_told=is_told)

    return judge


def _told(simulation: Simulation, message: Any) -> Any:
    """Have nobody told an instance who has one, nor what an instance is more than once."""
    rows = defaultdict[AssignerLink, list[str]](list[str])

    def judge(self: AssignerLink, parts: Any) -> None:
        ticket = self._tickets.get(parts[1]) if parts[0] == "given" else None
        has_one = ticket.instance if ticket is not None else None
        simulation.check("who has an instance is given no other", has_one is None, f"{parts}: {has_one}")
        if parts[0] == "given" and parts[4] is not None:
            rows[self].append(parts[2])
            simulation.check("a row is told once", len({*rows[self]}) == len(rows[self]), str(rows[self]))
        message(self, parts)

    return judge


def _welcoming(simulation: Simulation, send: Any) -> Any:
    """Have a process welcome another one more than once, as one of another release may."""

    def say(self: AskingPeer, *parts: Any) -> None:
        for _ in range(1 + (parts == ("welcome",) and simulation.choices.below(2, often=0.2))):
            send(self, *parts)

    return say


def _spared(simulation: Simulation, free_for: Any) -> Any:
    """Have no request sent where it failed while another instance may be asked."""

    def judge(self: AppQueue, ticket: Ticket, now_s: float) -> Seat | None:
        least_pct, failed = ticket.least_accuracy_pct, ticket.excluded
        may_be = [each for each in self.seats.values() if each.is_ready and ACCURACY_PCT[each.id] >= least_pct]
        others = [each.id for each in may_be if each.id not in failed and each.breaker.passes(now_s)]
        found = free_for(self, ticket, now_s)
        is_other = found is None or found.id not in failed or not others
        simulation.check("who failed a request is asked last", is_other, f"{found and found.id}, and not {others}")
        return found

    return judge


def _refused(simulation: Simulation, take: Any) -> Any:
    """Have nobody refused for whom an instance is free, even if nobody may wait."""

    def judge(self: AppQueue, ticket: Ticket, now_s: float) -> None:
        free = [
            seat.id
            for seat in self.seats.values()
            if seat.is_ready and seat.held < seat.limit and seat.breaker.opened_s is None
        ]
        place, before = ticket.place, sum(each is not ticket for each in self.tickets.values())
        try:
            take(self, ticket, now_s)
            is_kept = place in (None, ticket.place)
            simulation.check("who waits again keeps its place", is_kept, f"{place}, and then {ticket.place}")
            is_full = ticket.waits_as is not None and place is None and before >= self._most_waiting
            simulation.check("no more wait than may", not is_full, f"{before} of {self._most_waiting}")
        except NotAssignedError as error:
            was_free = not self.tickets and any(_may_have(ticket, each) for each in free)
            simulation.check("nobody is refused for whom an instance is free", not was_free, f"{error.reason}: {free}")
            raise

    return judge


def _stands_idle(processes: list[_Process]) -> str | None:
    """Say which instance has room though a request waits for it; those that time gives back are left out."""
    for process in processes:
        for queue in process.assigner.queues.values():
            free = {
                seat.id
                for seat in queue.seats.values()
                if seat.is_ready and seat.held < seat.limit and seat.breaker.opened_s is None
            }
            if len(queue._queue) != queue.waiting:
                return f"{len(queue._queue)} requests wait, and {queue.waiting} are counted"
            for ticket in queue.tickets.values():
                if any(_may_have(ticket, each) for each in free):
                    return f"{process.coordinator.name}: {ticket.id} waits, and {free} are free"
    return None


def _unconnected(processes: list[_Process]) -> str | None:
    links = [each.coordinator._link for each in processes]
    return next((each.peer for each in links if each is not None and not each.is_open), None)


def _kept(crowd: _FullCrowd) -> str | None:
    return next((str(each.number) for each in crowd.refused if not each.is_closing()), None)


def _let_in(processes: list[_Process]) -> str | None:
    stranger = next((each.coordinator for each in processes if each.coordinator.name == "p4"), None)
    if stranger is None:
        return None
    others = [each.coordinator for each in processes if each.coordinator is not stranger]
    met = stranger.assigned_by != "p4" or any(each.assigned_by == "p4" for each in others)
    return "it is" if met else None


def _negative(processes: list[_Process]) -> str | None:
    for process in processes:
        for queue in process.assigner.queues.values():
            if queue.waiting < 0 or any(seat.held < 0 for seat in queue.seats.values()):
                return process.coordinator.name
            if sum(seat.held for seat in queue.seats.values()) != queue.in_service.total():
                return f"{process.coordinator.name}: {queue.in_service}"
            for seat in queue.seats.values():
                if seat.is_ready and seat.held > seat.limit and len(processes) == 1:
                    return f"{seat.id} holds {seat.held} of {seat.limit}"
    return None
