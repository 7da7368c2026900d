"""What a gang needs before it starts, beside the command: fetched once the control plane has named the gang."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from gpu_agent.control_plane import ControlPlane
from gpu_agent.secrets import InputError
from services.contracts.commands import StartGang
from services.kit.logging import Log
from services.kit.problems import ProblemError

log = Log(__name__)

T = TypeVar("T")

_PASSING = frozenset({401, 429, 502, 503, 504})
"""Statuses after which a question is asked again: the control plane is away, or the node has to register anew."""


@dataclass(frozen=True)
class Inputs:
    """What was fetched for a gang.

    Attributes:
        secrets: Values by the names of the secrets.
    """

    secrets: dict[str, str] = field(default_factory=dict[str, str], repr=False)


NO_INPUTS = Inputs()


async def fetch_nothing(start: StartGang) -> Inputs:
    """Return nothing, for gangs that name nothing."""
    return NO_INPUTS


class Fetcher:
    """Fetches the inputs of gangs from the control plane.

    Args:
        plane: Answers only for gangs that this node may run.
        retry_s: Pause between two attempts while the control plane does not answer.
    """

    def __init__(self, plane: ControlPlane, retry_s: float) -> None:
        self._plane = plane
        self._retry_s = retry_s

    async def fetch(self, start: StartGang) -> Inputs:
        """Return the inputs of a gang.

        Raises:
            InputError: They cannot be had, whoever asks.
        """
        if not start.spec.secrets:
            return NO_INPUTS
        opened = await self._asked("secrets", lambda: self._plane.open_secrets(start.allocation_id))
        if opened.missing:
            raise InputError(" ".join(opened.missing))
        values = {each.name: each.value for each in opened.secrets}
        return Inputs(values)

    async def _asked(self, what: str, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the answer of the control plane, however long it is away."""
        while True:
            try:
                return await ask()
            except ProblemError as error:
                if error.status not in _PASSING:
                    raise InputError(
                        f"The control plane does not give this node the job's {what}: {error.detail}"
                    ) from error
                log.info("input.not_fetched", what=what, status=error.status)
            await asyncio.sleep(self._retry_s)
