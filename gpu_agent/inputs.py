"""What a gang needs before it starts, besides the command: fetched once the control plane has named the gang."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from gpu_agent.launch import Inputs, Launcher
from gpu_agent.secrets import InputError
from gpu_agent.sources import Sources
from services.contracts.commands import StartGang
from services.contracts.sources import OpenedChunk
from services.core.domain.errors import DomainError
from services.kit.control_plane import ControlPlane
from services.kit.logging import Log
from services.kit.problems import ProblemError
from services.kit.repeating import pauses

log = Log(__name__)

T = TypeVar("T")

_PASSING = frozenset({401, 429, 502, 503, 504})
"""Statuses after which a question is asked again: the control plane is away, or the node has to register anew."""


class Fetcher:
    """Fetches the inputs of gangs from the control plane, which answers only for gangs that this node may run.

    Args:
        retry_s: The pause between two attempts while the control plane does not answer.
        launcher: Knows the account of a job, and what confines its processes and those that fetch its files.
    """

    def __init__(self, plane: ControlPlane, sources: Sources, retry_s: float, launcher: Launcher) -> None:
        self._plane, self._sources, self._retry_s, self._launcher = plane, sources, retry_s, launcher

    async def fetch(self, start: StartGang, rank: Path) -> Inputs:
        """Return the inputs of a gang; by then its files are in the folder of its rank."""
        source = start.spec.source
        git_secret = source.git.secret if source is not None and source.git is not None else None
        values: dict[str, str] = {}
        key: str | None = None
        if start.spec.secrets or git_secret is not None or start.spec.service is not None:
            opened = await self._asked("secrets", lambda: self._plane.open_secrets(start.allocation_id))
            if opened.missing:
                raise InputError(" ".join(opened.missing))
            values, key = {each.name: each.value for each in opened.secrets}, opened.instance_key

        async def read_chunk(number: int) -> OpenedChunk:
            return await self._asked("upload", lambda: self._plane.read_chunk(start.allocation_id, number))

        if source is None:
            return Inputs(values, instance_key=key)
        try:
            account = self._launcher.account_of(start)
        except DomainError as error:
            raise InputError(str(error)) from None
        credential = None if git_secret is None else values[git_secret]
        confinement = partial(self._launcher.confinement_of, start, rank)
        made = await self._sources.make(source, rank, read_chunk, credential, account, confinement)
        return Inputs(values, made, key)

    async def _asked(self, what: str, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the answer of the control plane, however long it is away: a gang that waits too long is stopped."""
        for pause_s in pauses(self._retry_s):
            try:
                return await ask()
            except ProblemError as error:
                if error.status not in _PASSING:
                    why = f"The control plane does not give this node the job's {what}: {error.detail}"
                    raise InputError(why) from error
                log.info("input.not_fetched", what=what, status=error.status)
            await asyncio.sleep(pause_s)
        raise AssertionError("pauses have no end")
