"""Send submissions to admission in groups, so that those that arrive together share one request.

A request between processes costs as much as everything else that the gateway does for a submission. There is no timer:
while ``groups_in_flight`` requests are in progress, new submissions wait for one of them to end. So groups grow with
the load, and a single submission is sent at once.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import aiohttp
import orjson

from services.kit import traces
from services.kit.logging import Log
from services.kit.problems import unavailable
from services.kit.tokens import Outgoing

log = Log(__name__)

ATTEMPTS = 8
RETRY_EVERY_S = 0.25


class Entry(TypedDict):
    """``services.contracts.jobs.SubmissionEntry``, as it is sent."""

    tenant_id: str
    key_id: str
    idempotency_key: str | None
    batch: bool
    body: str
    user_id: str | None
    project: str | None
    traceparent: NotRequired[str | None]


class Answer(TypedDict):
    """``services.contracts.jobs.SubmissionAnswer``, as it is received."""

    status: int
    body: str
    replayed: bool
    location: str | None


@dataclass(slots=True, eq=False)
class _Waiting:
    entry: Entry
    answer: asyncio.Future[Answer]


class Gatherer:
    """Sends submissions to admission in groups and returns the answer to each."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        tokens: Outgoing,
        group_entries: int,
        group_bytes: int,
        groups_in_flight: int,
        timeout_s: float,
    ) -> None:
        self._session = session
        self._url = url.rstrip("/") + "/internal/submissions"
        self._tokens, self._group_entries = tokens, group_entries
        self._group_bytes, self._free = group_bytes, groups_in_flight
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._waiting: deque[_Waiting] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_due = False

    async def submit(self, entry: Entry) -> Answer:
        """Return admission's answer.

        Raises:
            ProblemError: 503 if admission cannot be reached. It is then unknown whether a submission without an
                idempotency key was accepted; with one, it can safely be repeated.
        """
        loop = asyncio.get_running_loop()
        waiting = _Waiting(entry, loop.create_future())
        self._waiting.append(waiting)
        if not self._is_due and self._free:
            self._is_due = True
            loop.call_soon(self._leave)
        return await waiting.answer

    def _leave(self) -> None:
        """Send waiting submissions while requests are free; runs after all that arrived in this event loop turn."""
        self._is_due = False
        while self._free and (group := self._next_group()):
            self._free -= 1
            task = asyncio.create_task(self._carry(group))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _next_group(self) -> list[_Waiting]:
        group: list[_Waiting] = []
        size = 0
        while self._waiting and len(group) < self._group_entries:
            first = self._waiting[0]
            if not first.answer.done():  # its client is still there
                size += len(first.entry["body"])
                if group and size > self._group_bytes:
                    break
                group.append(first)
            self._waiting.popleft()
        return group

    async def _carry(self, group: list[_Waiting]) -> None:
        with traces.within(group[0].entry.get("traceparent")):  # a group is noted in the trace of its first
            await self._settle(group)

    async def _settle(self, group: list[_Waiting]) -> None:
        try:
            answers = await self._send(group)  # may shorten the group
            for waiting, answer in list(zip(group, answers, strict=True)):
                if not waiting.answer.done():
                    waiting.answer.set_result(answer)
        except _NotAnsweredError:
            pass
        except Exception:  # what was answered is no answer to this group
            log.exception("submissions.not_carried", entries=len(group))
        finally:
            for waiting in group:
                if not waiting.answer.done():
                    waiting.answer.set_exception(unavailable("Admission"))
            self._free += 1
            self._leave()

    async def _send(self, group: list[_Waiting]) -> list[Answer]:
        """Return the answers to a group.

        A group that was never sent is sent again, without those whose clients have gone. If it may have been received,
        those with idempotency keys are sent again; the others must not be submitted twice, and get a 503.
        """
        for attempt in range(ATTEMPTS):
            group[:] = [waiting for waiting in group if not waiting.answer.done()]
            if not group:
                return []
            if attempt:
                await asyncio.sleep(RETRY_EVERY_S)
            headers = {**self._tokens.headers(), "content-type": "application/json"}
            body = orjson.dumps({"entries": [waiting.entry for waiting in group]})
            try:
                async with self._session.post(self._url, data=body, headers=headers, timeout=self._timeout) as answer:
                    content = await answer.read()
                    if answer.status == 200:
                        return orjson.loads(content)["answers"]
                    log.error("submissions.refused", status=answer.status, entries=len(group))
                    raise _NotAnsweredError
            except aiohttp.ClientConnectorError:
                continue
            except (aiohttp.ClientError, OSError) as error:
                log.warning("submissions.lost", entries=len(group), error=repr(error))
                if isinstance(error, TimeoutError):
                    raise _NotAnsweredError from error
                for waiting in group:
                    if waiting.entry["idempotency_key"] is None and not waiting.answer.done():
                        waiting.answer.set_exception(unavailable("Admission"))
        raise _NotAnsweredError


class _NotAnsweredError(Exception):
    """Admission did not answer; the log has the cause."""
