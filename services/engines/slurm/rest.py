"""slurmrestd, where a site has it: it reads jobs and nodes, and makes the changes that it can.

It speaks the newest version that both this module and slurmrestd know. v0.0.36 to v0.0.38 cannot set admin comments,
and no version can requeue, signal a batch script or shrink: Slurm's commands do that, and also changes of very many
jobs, which scontrol can combine. They also do everything for a while if slurmrestd does not answer, or not fully.
"""

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import orjson

from services.engines.slurm.commands import Commands, version_of
from services.engines.slurm.reading import Rows, SlurmJob, SlurmNode, read_jobs, read_nodes
from services.engines.slurm.steering import Changes, together
from services.kit.bridges.silent import EngineSilentError
from services.kit.logging import Log

log = Log(__name__)
T = TypeVar("T")

VERSIONS = tuple(range(36, 45))  #: v0.0.36 to v0.0.44; those from v0.0.39 on by their published descriptions alone
_PATH = re.compile(r"^/slurm/v0\.0\.(\d+)/jobs/?$")
AWAY_S = 60.0
MOST_BY_REST = 100
"""Jobs changed one by one; more of them are changed by commands, many at a time."""
_AT_ONCE = 8


class RestSilentError(Exception):
    """slurmrestd does not answer, or its answer is unusable; the message says how."""


class RestRefusedError(Exception):
    """Slurm refuses a change; the message has its words."""


class Rest(Commands):
    """Slurm through slurmrestd, and through its commands where that falls short."""

    def __init__(self, address: str, *, user: str, token_file: Path | None, timeout_s: float) -> None:
        """Connect to ``http://HOST:PORT``, or to a Unix socket as ``unix:/PATH``, which needs no token."""
        super().__init__(timeout_s)
        self._socket = address.removeprefix("unix:") if address.startswith("unix:") else None
        self._base = "http://slurmrestd" if self._socket else address.rstrip("/")
        self._user, self._token_file = user, token_file
        self._version = 0
        self._away_until_s = 0.0

    async def jobs(self) -> tuple[Rows[SlurmJob], str]:
        found = await self._read("jobs", lambda document: (read_jobs(document), version_of(document)))
        return await super().jobs() if found is None else found

    async def nodes(self) -> Rows[SlurmNode]:
        found = await self._read("nodes", read_nodes)
        if found is None or not all(node.partitions for node in found):  # v0.0.36 does not name partitions
            return await super().nodes()
        return found

    async def change(self, changes: Changes) -> dict[str, str]:
        jobs = sum(len(numbers) for numbers, _ in changes.updates) + len(changes.cancels)
        if self._is_away() or jobs > MOST_BY_REST:
            return await super().change(changes)
        refused: dict[str, str] = {}
        left: dict[str, dict[str, str]] = {}
        room = asyncio.Semaphore(_AT_ONCE)

        async def update(number: str, fields: tuple[tuple[str, str], ...]) -> None:
            body = self._body(fields)
            try:
                if body is None or "_" in number:
                    raise RestSilentError("this version cannot set all of it, or takes no tasks of arrays")
                async with room:
                    await self._ask("POST", f"job/{number}", body)
            except RestSilentError:  # a level: setting it twice is as setting it once
                left[number] = dict(fields)
            except RestRefusedError as error:
                refused[number] = str(error)[-300:]

        async def cancel(number: str) -> str | None:
            if "_" in number:
                return number
            try:
                async with room:
                    await self._ask("DELETE", f"job/{number}", None)
            except RestSilentError:
                return number
            except RestRefusedError:
                pass  # it has ended meanwhile, or is named again at the next look
            return None

        await asyncio.gather(*(update(number, fields) for numbers, fields in changes.updates for number in numbers))
        cancelled = await asyncio.gather(*map(cancel, changes.cancels))
        rest = replace(changes, updates=together(left), cancels=[number for number in cancelled if number is not None])
        return refused | (await super().change(rest) if rest.size else {})

    def _is_away(self) -> bool:
        return time.monotonic() < self._away_until_s

    async def _read(self, what: str, read: Callable[[Any], T]) -> T | None:
        """Return slurmrestd's answer; None if there is none."""
        if self._is_away():
            return None
        try:
            return read(await self._ask("GET", what, None))
        except (RestSilentError, RestRefusedError, EngineSilentError) as error:
            log.warning("slurmrestd.silent", error=str(error), what=what)
            self._away_until_s = time.monotonic() + AWAY_S
            self._version = 0
            return None

    async def _ask(self, method: str, what: str, body: Any) -> Any:
        """Return an answer in the negotiated version; ``RestSilentError`` if none, ``RestRefusedError`` if refused."""
        self._version = self._version or await self._newest()
        status, document = await self._call(method, f"/slurm/v0.0.{self._version}/{what}", body)
        errors: Any = document.get("errors") if isinstance(document, dict) else None
        if method == "GET" and status == 200:
            return document
        if errors or status >= 400:
            words = [each.get("error") or each.get("description") for each in errors or () if isinstance(each, dict)]
            if method == "GET" or status < 500 or not any(words):  # not Slurm's word, but slurmrestd's
                raise RestSilentError(f"slurmrestd answers {method} {what} with {status}: {str(errors)[:300]}")
            raise RestRefusedError("; ".join(str(each) for each in words if each))
        return document

    async def _newest(self) -> int:
        """Return the newest version that both sides know."""
        for path in ("/openapi/v3", "/openapi"):
            status, document = await self._call("GET", path, None)
            if status == 200 and isinstance(document, dict) and isinstance(document.get("paths"), dict):
                found = {int(match[1]) for each in document["paths"] if (match := _PATH.match(str(each)))}
                if known := found.intersection(VERSIONS):
                    return max(known)
                raise RestSilentError(f"slurmrestd has none of v0.0.{VERSIONS[0]} to v0.0.{VERSIONS[-1]}")
        raise RestSilentError(f"slurmrestd does not say which versions it has: {status}")

    async def _call(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        headers = {"content-type": "application/json"}
        try:
            if self._token_file is not None:
                token = self._token_file.read_text(encoding="utf-8").strip().removeprefix("SLURM_JWT=")
                headers |= {"X-SLURM-USER-NAME": self._user, "X-SLURM-USER-TOKEN": token}
            kept = aiohttp.UnixConnector(self._socket) if self._socket else aiohttp.TCPConnector()
            limit = aiohttp.ClientTimeout(total=self._timeout_s)
            data = None if body is None else orjson.dumps(body)
            async with (
                aiohttp.ClientSession(connector=kept, timeout=limit) as session,
                session.request(method, self._base + path, data=data, headers=headers) as answer,
            ):
                content = await answer.read()
                return answer.status, await asyncio.to_thread(orjson.loads, content) if content else None
        except orjson.JSONDecodeError as error:
            raise RestSilentError(f"slurmrestd answers {path} with no JSON: {error}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RestSilentError(f"slurmrestd does not answer: {error or type(error).__name__}") from error

    def _body(self, fields: Sequence[tuple[str, str]]) -> dict[str, Any] | None:
        """Return scontrol's fields in the form of this version; None if it cannot set one of them."""
        later, body = self._version >= 39, dict[str, Any]()
        for name, value in fields:
            match name:
                case "comment":
                    body["comment"] = value
                case "admincomment" if later:
                    body["admin_comment"] = value
                case "starttime" if later:  # older ones read words, and cannot set the mark that goes with it
                    begin_s = time.time() if value == "now" else datetime.fromisoformat(value + "+00:00").timestamp()
                    number = {"set": True, "infinite": False, "number": int(begin_s)}
                    body["begin_time"] = number if self._version > 39 else int(begin_s)
                case "gres":
                    body |= {"tres_per_node": f"gres/{value}"} if later else {"gres": value}
                case _:
                    return None
        return body if self._version else None
