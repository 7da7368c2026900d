"""Visitors of models: they ask through the router all the time, and know of each answer whether it can be right."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx

POOL, APP = "chat", "photos"
Flow = Literal["whole", "stream", "infer", "plain"]
FLOWS: tuple[Flow, ...] = ("whole", "stream", "infer", "plain")
"""Completions of the pool's model, whole and as streams; requests to the application, as inferences and as plain HTTP.
"""
PAUSE_S = 0.4
SHORT, LONG = (3, 30), (60, 150)
LONG_SHARE = 0.15
"""So many answers are long: a drain, a kill or a cut meets them on their way."""
REFUSALS = (429, 502, 503, 504)
"""Overloaded, broken off, not ready, too late: whatever else goes wrong, visitors are told nothing else."""
PATIENCE_S = 60.0
AGAIN_S = 0.5


@dataclass(frozen=True)
class Visit:
    """A request.

    Attributes:
        visit_id: What its answer has to name.
        pieces: How many its answer has to have; of completions.
        once: Whether it may reach a server no more than once, since the router may not repeat it.
    """

    visit_id: str
    flow: Flow
    pieces: int = 0
    once: bool = False

    def request(self) -> tuple[str, dict[str, Any]]:
        """Return path and options of the request."""
        if self.flow == "plain":
            return f"/apps/{APP}/visits", {"content": self.visit_id.encode()}
        if self.flow == "infer":
            tensor = {"name": "visit", "datatype": "BYTES", "shape": [1], "data": [self.visit_id]}
            return f"/v2/models/{APP}/infer", {"json": {"id": self.visit_id, "inputs": [tensor]}}
        asked: dict[str, Any] = {"model": POOL, "prompt": self.visit_id, "max_tokens": self.pieces}
        return "/v1/completions", {
            "json": asked | {"stream": self.flow == "stream"} | ({"store": True} if self.once else {})
        }


@dataclass(frozen=True)
class Reply:
    """What came back.

    Attributes:
        status: None if there was no answer at all.
        is_cut: Whether the connection broke off before the answer was whole, as HTTP has it.
    """

    status: int | None
    body: bytes = b""
    is_cut: bool = False

    @property
    def kind(self) -> str:
        """What it counts as."""
        if self.status is None:
            return "no answer"
        return f"{self.status} cut" if self.is_cut else str(self.status)


def fault_of(visit: Visit, reply: Reply) -> str:
    """Return why a reply cannot be right; empty if it can."""
    if reply.status is None or reply.status in REFUSALS:
        return ""
    said = f"{visit.visit_id} ({visit.flow}) was answered {reply.status}"
    if reply.status != 200:
        return f"{said}: {reply.body[:200]!r}"
    if visit.flow == "stream":
        fault = _of_stream(visit, reply)
    elif reply.is_cut:
        fault = ""
    else:
        fault = _of_whole(visit, reply.body)
    return f"{said}, {fault}" if fault else ""


def _of_whole(visit: Visit, body: bytes) -> str:
    try:
        answer = json.loads(body)
        if visit.flow in ("whole", "stream"):
            return _of_pieces(visit, answer["choices"][0]["text"].split("\n"), is_whole=True)
        named = [answer["visit"]] if visit.flow == "plain" else [answer["id"], *answer["outputs"][0]["data"]]
    except (ValueError, LookupError, TypeError):
        return f"with no answer of a model server: {body[:200]!r}"
    return "" if set(named) == {visit.visit_id} else f"with the answer to {named}"


def _of_stream(visit: Visit, reply: Reply) -> str:
    events = [event[5:].strip() for event in reply.body.split(b"\n\n") if event.startswith(b"data:")]
    if reply.is_cut and not reply.body.endswith(b"\n\n"):
        events = events[:-1]
    pieces, ends = list[str](), list[str]()
    for event in events:
        if ends:
            return f"with {event!r} after its end {ends[0]!r}"
        try:
            if event == b"[DONE]":
                ends.append("done")
            elif "error" in (chunk := json.loads(event)):
                ends.append("error")
            else:
                pieces.append(chunk["choices"][0]["text"])
        except (ValueError, LookupError, TypeError):
            return f"with the event {event[:200]!r}"
    if not ends and not reply.is_cut:
        return f"and ended after {len(pieces)} of {visit.pieces} pieces without a word"
    return _of_pieces(visit, pieces, is_whole=ends == ["done"])


def _of_pieces(visit: Visit, pieces: list[str], *, is_whole: bool) -> str:
    words = [piece.split(" ") for piece in pieces]
    stamps = {word[1] for word in words if len(word) == 3}
    if len(stamps) > 1:
        return f"with two answers in one: {sorted(stamps)}"
    stamp = next(iter(stamps), "")
    expected = [[visit.visit_id, stamp, f"{number}/{visit.pieces}"] for number in range(visit.pieces)]
    if words != (expected if is_whole else expected[: len(words)]):
        return f"with the pieces {pieces[:3]} ... {pieces[-3:]}, {len(pieces)} of {visit.pieces}"
    return ""


@dataclass
class Visitors:
    """Ask until told to stop; ``faults`` has what cannot be right, ``replies`` how many there were of each kind."""

    http: httpx.AsyncClient
    dice: random.Random
    storm: str
    visits: list[Visit] = field(default_factory=list[Visit])
    replies: Counter[str] = field(default_factory=Counter[str])
    faults: list[str] = field(default_factory=list[str])

    async def ask(self, until: asyncio.Event) -> None:
        """Send requests, several at once, until it is over and all are answered."""
        async with asyncio.TaskGroup() as open_:
            while not until.is_set():
                await asyncio.sleep(self.dice.uniform(0, 2 * PAUSE_S))
                open_.create_task(self.pay(self._draw()))

    async def are_known(self) -> None:
        """Ask in each way until the router has heard of what has just been created."""
        for number, flow in enumerate(FLOWS):
            visit = Visit(f"{self.storm}-new-{number}", flow, 3)
            while (await self._reply_to(visit)).status in (None, 404):  # noqa: ASYNC110, no event tells of it
                await asyncio.sleep(AGAIN_S)

    async def pay(self, visit: Visit) -> int | None:
        """Send one request, judge what comes back, and return its status; None if it did not come whole."""
        reply = await self._reply_to(visit)
        self.replies[f"{visit.flow} {reply.kind}"] += 1
        if fault := fault_of(visit, reply):
            self.faults.append(fault)
        return None if reply.is_cut else reply.status

    async def _reply_to(self, visit: Visit) -> Reply:
        path, options = visit.request()
        self.visits.append(visit)
        status, body, is_cut = None, bytearray(), False
        try:
            async with self.http.stream("POST", path, **options) as answer:
                status = answer.status_code
                async for piece in answer.aiter_bytes():
                    body += piece
        except httpx.HTTPError:
            is_cut = True
        return Reply(status, bytes(body), is_cut)

    async def are_served(self, name: str, within_s: float = PATIENCE_S) -> list[str]:
        """Ask in each way until it is answered, and return the ways in which nobody does."""
        late: list[str] = []
        for number, flow in enumerate(FLOWS):
            try:
                async with asyncio.timeout(within_s):
                    attempt = 0
                    while await self.pay(Visit(f"{self.storm}-{name}-{number}-{attempt}", flow, 3)) != 200:
                        attempt += 1
                        await asyncio.sleep(AGAIN_S)
            except TimeoutError:
                late.append(f"no request ({flow}) is answered within {within_s:.0f} s")
        return late

    def count(self) -> Counter[str]:
        """Return how many requests were made to each model."""
        return Counter(POOL if visit.flow in ("whole", "stream") else APP for visit in self.visits)

    def repeated(self, notes: Path) -> list[str]:
        """Return what reached a server twice although it may not be repeated."""
        arrived = Counter(visit for path in notes.glob("arrived-*") for visit in path.read_text().splitlines() if visit)
        once = [visit.visit_id for visit in self.visits if visit.once]
        return [f"{visit} reached servers {arrived[visit]} times" for visit in once if arrived[visit] > 1]

    def _draw(self) -> Visit:
        flow = self.dice.choice(FLOWS)
        pieces = self.dice.randint(*(LONG if self.dice.random() < LONG_SHARE else SHORT))
        once = flow == "plain" or (flow != "infer" and self.dice.random() < 0.5)
        return Visit(f"{self.storm}-visit-{len(self.visits)}", flow, pieces if flow in FLOWS[:2] else 0, once)
