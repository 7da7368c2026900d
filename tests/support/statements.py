"""Statements of a scheduler's turn that name a job, and a database that refuses one of them."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from services.db import database
from services.scheduler.loop import Scheduler

METHODS = ("execute", "executemany", "fetch", "fetchrow", "fetchval")


class Statements:
    """Watches a scheduler's turns.

    Attributes:
        names: Parts of the job's ids.
        refused: The statement that is refused as often as its arguments have one of them.
        seen: All statements whose arguments had one.
    """

    def __init__(self, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.refused = ""
        self.seen: dict[str, None] = {}
        self._turn, self._turns = scheduler.turn, False
        monkeypatch.setattr(scheduler, "turn", self._watched_turn)
        for name in METHODS:
            monkeypatch.setattr(database._Shared, name, self._watched(getattr(database._Shared, name)))

    async def _watched_turn(self) -> None:
        self._turns = True
        try:
            await self._turn()
        finally:
            self._turns = False

    def _watched(self, method: Any) -> Any:
        async def watched(connection: Any, query: str, *arguments: Any, **options: Any) -> Any:
            if self._turns and self.names:
                said = repr(arguments)
                if any(name in said for name in self.names):
                    self.seen[query] = None
                    if query == self.refused:
                        raise asyncpg.DataError("value out of range")
            return await method(connection, query, *arguments, **options)

        return watched


def shown(failed: dict[str, object]) -> str:
    """Return which statements others suffered from, and how."""
    return "\n".join(f"{' '.join(query.split())[:300]}\n   {why!r}" for query, why in failed.items())
