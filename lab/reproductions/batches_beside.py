"""What lines of batches cost interactive requests: the table ``beside`` of ``lab/results/batches.md``.

    python -m lab.reproductions.batches_beside PAGE DATA

Requests come one by one, at FREESH's rates with Azure's lengths (conversations), to the servers of one place. Who gets
which server is decided by the router's own lanes, how many lines are sent by the batch worker's own rule; time is
virtual. A server is Llama-2-70B on four H100s as Splitwise measured it: it reads prompts one after another, and each
step makes a token of all that it decodes.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import selectors
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np

from lab.reproductions.batches_day import rates_of
from lab.reproductions.marked import fill
from lab.reproductions.router import read_trace
from lab.serving.model_server import LLAMA_70B, ModelServer
from services.contracts.routing import RoutedClass, RoutedPool, RoutedServer, RoutingTable
from services.core.domain.arrays import Floats
from services.core.policies.freesh.laxity import ServingRequest
from services.core.policies.freesh.server_choice import Work
from services.core.profiles.answer_lengths import AnswerLengths, input_bucket
from services.router.fleet import Fleet, Server
from services.router.lanes import Lane, LaneRules, Lanes, NoSpareError, Ticket
from services.router.upstream import UpstreamError
from services.serving.batches.sending import Room
from services.serving.batches.worker import LOOK_S

KIND = LLAMA_70B["h100-tp4"]
SERVERS = 4
HOUR_S = 60.0
"""Of each hour of the day, with its rates, so much is simulated."""
SHARES = (0.5, 0.7, 0.9)
LIMITS = RoutedClass(name="", max_ttft_ms=800.0, max_tbt_ms=60.0)
"""Of a class that has some: twice the time to the first token, and between tokens, that 95 % see without lines."""
CLASSES: tuple[Sequence[RoutedClass], ...] = (), (LIMITS,)
AGAIN_S = 2.0
"""After which the router has lines that it refuses sent again."""
PATIENCE_S = 600.0


class _Clock(selectors.DefaultSelector):
    """Lets virtual time pass where a loop would wait."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing will ever happen"
        self.now_s += max(timeout, 0.0)
        return super().select(0)


@dataclass
class Decoder:
    """A model server: the steps that it has made say how far all its requests are."""

    kind: ModelServer
    clock: _Clock
    steps: float = 0.0
    at_s: float = 0.0
    read_until_s: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    members: dict[int, asyncio.Future[None]] = field(default_factory=dict[int, asyncio.Future[None]])
    next_end: asyncio.TimerHandle | None = None
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def _change(self) -> None:
        """Count steps up to now, end what is complete, and wake when the next request will be."""
        now_s = self.clock.now_s
        step_s = self.kind.step_s(len(self.members), self.kind.highest_clock_mhz)
        if self.members:
            self.steps += (now_s - self.at_s) / step_s
        self.at_s = now_s
        while self.ends and (self.ends[0][0] <= self.steps + 1e-6 or self.ends[0][1] not in self.members):
            if (done := self.members.pop(heapq.heappop(self.ends)[1], None)) is not None and not done.done():
                done.set_result(None)
        if self.next_end is not None:
            self.next_end.cancel()
        self.next_end = None
        if self.ends:
            step_s = self.kind.step_s(len(self.members), self.kind.highest_clock_mhz)
            after_s = (self.ends[0][0] - self.steps) * step_s
            self.next_end = asyncio.get_running_loop().call_later(after_s, self._change)

    async def read(self, prompt: int) -> None:
        """Read a prompt, after those that came before it, and make the first token."""
        took_s = self.kind.prefill_s(prompt, self.kind.highest_clock_mhz)
        self.read_until_s = max(self.read_until_s, self.clock.now_s) + took_s
        await asyncio.sleep(self.read_until_s - self.clock.now_s)

    async def decode(self, tokens: int) -> None:
        """Make that many tokens."""
        self._change()
        number, done = next(self.numbers), asyncio.get_running_loop().create_future()
        self.members[number] = done
        heapq.heappush(self.ends, (self.steps + tokens, number))
        self._change()
        try:
            await done
        finally:
            if self.members.pop(number, None) is not None:
                self._change()


class _Cut:
    """What the lane has of a request's connection: a way to end it."""

    def __init__(self, work: asyncio.Task[Any]) -> None:
        self._work = work

    def abort(self, _: UpstreamError) -> None:
        self._work.cancel()


@dataclass
class Seen:
    """What requests saw, seconds: to the first token, to the last, and between tokens."""

    first_s: list[float] = field(default_factory=list[float])
    end_s: list[float] = field(default_factory=list[float])
    between_s: list[float] = field(default_factory=list[float])
    lines: int = 0
    refused: int = 0

    def __add__(self, other: Seen) -> Seen:
        return Seen(
            self.first_s + other.first_s,
            self.end_s + other.end_s,
            self.between_s + other.between_s,
            self.lines + other.lines,
            self.refused + other.refused,
        )


Lengths = Sequence[tuple[int, int]]


class Place:
    """One place: a lane with its servers, the requests that come, and the lines that wait."""

    def __init__(self, clock: _Clock, servers: int, classes: list[RoutedClass]) -> None:
        full = float(KIND.capacity)
        tbt_s, ttft_s = KIND.step_s(full, KIND.highest_clock_mhz), KIND.prefill_s(788, KIND.highest_clock_mhz)
        latency_s = ttft_s + 200 * tbt_s
        rows = [
            RoutedServer(
                id=f"server-{number}",
                url=f"http://127.0.0.1:{9_000 + number}",
                location="here",
                state="ready",
                pool="pool",
                tenant_id="t",
                capacity=KIND.capacity,
                ttft_ms=1e3 * ttft_s,
                tbt_ms=1e3 * tbt_s,
                latency_s=latency_s,
                max_qps=full / latency_s,
            )
            for number in range(servers)
        ]
        pool = RoutedPool(name="pool", tenant_id="t", models=["model"], classes=classes)
        fleet = Fleet()
        fleet.adopt(RoutingTable(made_at=datetime.now(UTC), pools=[pool], servers=rows))
        self.clock, self.lanes = clock, Lanes(LaneRules())
        self.lane: Lane = self.lanes.of(fleet.pools["pool"], "")
        self.decoders = {each.id: Decoder(KIND, clock) for each in fleet.servers.values()}
        self.room = Room(KIND.capacity * servers, latency_s)
        self.lengths, self.seen = AnswerLengths(), Seen()
        self.numbers = itertools.count()

    def _ticket(self, prompt: int, contexts: Sequence[Any]) -> Ticket:
        expected = self.lengths.predict(contexts).tokens
        request = ServingRequest(f"r{next(self.numbers)}", self.clock.now_s, expected, prompt, 0.0, "", "t")
        return Ticket(request, self.lane.limit_s(request, None), {}, Work(prompt, expected))

    async def _serve(self, ticket: Ticket, server: Server, prompt: int, tokens: int) -> float:
        """Have a server answer; return when the first token was there."""
        ticket.connection = cast("Any", _Cut(cast("asyncio.Task[Any]", asyncio.current_task())))
        given, began_s = ticket.place, self.clock.now_s
        assert given is not None
        try:
            await self.decoders[server.id].read(prompt)
            first_s = self.clock.now_s
            server.costs.has_read(given, first_s)
            if tokens > 1:
                await self.decoders[server.id].decode(tokens - 1)
            server.costs.learn(given, first_s - began_s, self.clock.now_s - began_s, tokens)
            return first_s
        finally:
            self.lane.leave(ticket, server)
            self.lanes.room_at(server)

    async def ask(self, prompt: int, tokens: int) -> None:
        """Answer an interactive request, and note what its client saw."""
        came_s, contexts = self.clock.now_s, ["model", ("model", input_bucket(prompt))]
        ticket = self._ticket(prompt, contexts)
        server = await self.lane.take(ticket, PATIENCE_S)
        first_s = await self._serve(ticket, server, prompt, tokens)
        now_s, seen = self.clock.now_s, self.seen
        seen.first_s.append(first_s - came_s)
        seen.end_s.append(now_s - came_s)
        if tokens > 1:
            seen.between_s.append((now_s - first_s) / (tokens - 1))
        self.lengths.observe(contexts, tokens)

    async def line(self, prompt: int, tokens: int) -> None:
        """Answer a line if there is room for it."""
        came_s, room = self.clock.now_s, self.room
        room.in_flight += 1
        try:
            ticket = self._ticket(prompt, ["model", ("model", input_bucket(prompt))])
            server = await self.lane.take_spare(ticket, came_s, ())
            await self._serve(ticket, server, prompt, tokens)
            self.seen.lines += 1
            room.answered(self.clock.now_s - came_s)
        except (NoSpareError, asyncio.CancelledError):
            self.seen.refused += 1
            room.refused(self.clock.now_s, AGAIN_S)
        finally:
            room.in_flight -= 1

    async def run(self, rates: Floats, lengths: Lengths, lines: Floats, seed: int) -> Seen:
        """Serve hours of interactive requests at ``rates`` per second, and in each as many ``lines`` as it can."""
        random = np.random.default_rng(seed)
        arrivals_s = [
            at * HOUR_S + float(each)
            for at, rate in enumerate(rates)
            for each in np.sort(random.uniform(0, HOUR_S, random.poisson(rate * HOUR_S)))
        ]
        drawn = random.integers(0, len(lengths), len(arrivals_s)).tolist()
        loop, asked = asyncio.get_running_loop(), list[asyncio.Task[None]]()
        for at_s, of in zip(arrivals_s, drawn, strict=True):
            loop.call_at(at_s, lambda of=of: asked.append(loop.create_task(self.ask(*lengths[of]))))
        left, sent = 0.0, set[asyncio.Task[None]]()
        for step in range(int(len(rates) * HOUR_S / LOOK_S)):
            await asyncio.sleep(step * LOOK_S - self.clock.now_s)
            hour, within = divmod(step, int(HOUR_S / LOOK_S))
            left = float(lines[hour]) if not within else left
            count = min(self.room.free(self.clock.now_s), left)
            for _ in range(int(count)):
                of = int(random.integers(0, len(lengths)))
                sent.add(task := loop.create_task(self.line(*lengths[of])))
                task.add_done_callback(sent.discard)
            left -= int(count)
        await asyncio.sleep(0)
        await asyncio.gather(*asked, *sent)
        return self.seen


def day(
    rates: Floats, lengths: Lengths, lines: Floats, servers: int = SERVERS, classes: Sequence[RoutedClass] = ()
) -> Seen:
    """Return what the interactive requests of a day saw."""
    clock = _Clock()
    loop = asyncio.SelectorEventLoop(clock)
    with patch.object(time, "monotonic", lambda: clock.now_s):
        try:
            return loop.run_until_complete(Place(clock, servers, [*classes]).run(rates, lengths, lines, 1))
        finally:
            loop.close()


def capacity_per_s(lengths: Lengths) -> float:
    """Return the requests per second of a server with a full batch."""
    prompts, answers = (float(np.mean([each[at] for each in lengths])) for at in (0, 1))
    step_s = KIND.step_s(KIND.capacity, KIND.highest_clock_mhz)
    return min(KIND.capacity / (step_s * answers), 1 / KIND.prefill_s(prompts, KIND.highest_clock_mhz))


def p95(values: Sequence[float]) -> float:
    """Return the 95th percentile."""
    return float(np.percentile(values, 95))


def row(day_per_s: Floats, lengths: Lengths, share: float, classes: Sequence[RoutedClass]) -> str:
    """Return what the same requests see with and without lines that always wait."""
    most = SERVERS * capacity_per_s(lengths)
    rates = day_per_s / day_per_s.max() * most * share / 2
    without, beside = (day(rates, lengths, lines, classes=classes) for lines in (np.zeros(24), np.full(24, np.inf)))
    free = float((most - rates).sum()) * HOUR_S
    seen = ((without.first_s, beside.first_s), (without.between_s, beside.between_s), (without.end_s, beside.end_s))
    changes = [f"{p95(before):.3g} s, {p95(after) / p95(before) - 1:+.1%}" for before, after in seen]
    limits = f"{LIMITS.max_ttft_ms:.0f}, {LIMITS.max_tbt_ms:.0f} ms" if classes else "none"
    return f"| {limits} | {share:.0%} | {beside.lines / free:.0%} | {' | '.join(changes)} |".replace("%", " %")


def table(
    data: Path, cases: Sequence[Sequence[RoutedClass]] = ((), (LIMITS,)), shares: Sequence[float] = SHARES
) -> str:
    """Return the rows."""
    lengths = [(prompt, max(answer, 1)) for _, prompt, answer in read_trace(data, "conv")]
    head = "| limits to, between tokens | peak, of capacity | lines, of what is free | first token | between | last |"
    rows = [row(rates_of(data) / 3_600, lengths, share, classes) for classes in CLASSES for share in SHARES]
    return "\n".join([head, "|---|---:|---:|---:|---:|---:|", *rows])


if __name__ == "__main__":
    fill(Path(sys.argv[1]), {"beside": lambda: table(Path(sys.argv[2]))})
