"""Exports of the ledger's lines: as PostgreSQL writes them, as fast as the client reads them."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Literal

from services.contracts.codes import ProblemCode
from services.db.database import Database
from services.kit.problems import ProblemError
from services.kit.tasks import end_tasks
from services.telemetry.repository.line_export import write_lines
from services.telemetry.repository.reports import Subject
from services.telemetry.repository.seals import Sign
from services.telemetry.seals import Signer

AT_ONCE = 2  #: Exports hold a connection for as long as their clients read; the others are the ledger's
PIECES_AHEAD = 2
PATIENCE_S, LEAST_BYTES_PER_S = 30.0, 64 * 1024
"""An export ends once another wants its place, if its client let it wait for so long and read no more than this."""


class _Place:
    """A place of an export that reads the lines of a tenant, or those of all (None), and how fast its client reads."""

    def __init__(self, tenant_id: str | None) -> None:
        self.tenant_id = tenant_id
        self.limit = asyncio.timeout(None)
        self._read_bytes, self._waited_s, self._since_s = 0, 0.0, math.inf

    async def put(self, pieces: asyncio.Queue[bytes | Exception | None], piece: bytes) -> None:
        """Give the client a piece once it has room for it."""
        self._since_s = time.monotonic()
        await pieces.put(piece)
        self._waited_s += time.monotonic() - self._since_s
        self._read_bytes, self._since_s = self._read_bytes + len(piece), math.inf

    @property
    def is_slow(self) -> bool:
        waited_s = self._waited_s + max(time.monotonic() - self._since_s, 0.0)
        return waited_s > PATIENCE_S and self._read_bytes < LEAST_BYTES_PER_S * waited_s


class LineExports:
    """Writes exports, a few at a time."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._under_way: set[_Place] = set()

    async def begin(
        self, about: Subject, form: Literal["csv", "jsonl"], signer: Signer | None = None, job_id: str | None = None
    ) -> AsyncGenerator[bytes]:
        """Return the lines of a period, or of one job in it, as of one instant, in pieces, once the first one is there.

        With a ``signer``, they are followed by what proves that nothing was changed.

        Raises:
            ProblemError: 429 if there are as many exports as are allowed and none of them has a slow client, or one of
                the tenant, whose slow client would else keep all others waiting.
        """
        sign = await signer.ready() if signer is not None else None
        own = {each for each in self._under_way if about.tenant_id is not None and each.tenant_id == about.tenant_id}
        rivals = own or (self._under_way if len(self._under_way) >= AT_ONCE else set[_Place]())
        if rivals:
            slow = next((each for each in rivals if each.is_slow), None)
            if slow is None:
                detail = f"{AT_ONCE} exports are being read, or one of your tenant's; ask again when one has ended."
                raise ProblemError(429, ProblemCode.RATE_LIMITED, detail, headers={"Retry-After": "10"})
            self._under_way.remove(slow)
            slow.limit.reschedule(0.0)
        pieces = self._pieces(about, form, sign, job_id)
        await anext(pieces)
        return pieces

    async def _pieces(
        self, about: Subject, form: Literal["csv", "jsonl"], sign: Sign | None, job_id: str | None
    ) -> AsyncGenerator[bytes]:
        """Yield an empty piece once the first one is there, and then the pieces."""
        pieces: asyncio.Queue[bytes | Exception | None] = asyncio.Queue(PIECES_AHEAD)
        place = _Place(about.tenant_id)

        async def write() -> None:
            end: Exception | None = None
            try:
                async with place.limit:
                    await write_lines(self._database, about, form, partial(place.put, pieces), sign, job_id)
            except Exception as error:  # raised where the pieces are read
                end = error
            self._under_way.discard(place)  # its connection is free, however long its client may read on
            await pieces.put(end)

        self._under_way.add(place)
        writing = asyncio.create_task(write())
        try:
            piece = await pieces.get()
            if isinstance(piece, Exception):
                raise piece
            yield b""
            while piece is not None:
                if isinstance(piece, Exception):
                    raise piece
                yield bytes(piece)
                piece = await pieces.get()
        finally:
            self._under_way.discard(place)
            await end_tasks([writing])
