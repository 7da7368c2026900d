"""Exports of the ledger's lines: as PostgreSQL writes them, as fast as the client reads them."""

import asyncio
from collections.abc import AsyncGenerator
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


class LineExports:
    """Writes exports, a few at a time."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._under_way: dict[object, str | None] = {}  #: The tenants whose lines are read; None: those of all

    async def begin(
        self, about: Subject, form: Literal["csv", "jsonl"], signer: Signer | None = None, job_id: str | None = None
    ) -> AsyncGenerator[bytes]:
        """Return the lines of a period, or of one job in it, as of one instant, in pieces, once the first one is there.

        With a ``signer``, they are followed by what proves that nothing was changed.

        Raises:
            ProblemError: 429 if there are as many exports as are allowed, or one of the tenant, whose slow client would
                else keep all others waiting.
        """
        sign = await signer.ready() if signer is not None else None
        tenants = self._under_way.values()
        if len(tenants) >= AT_ONCE or (about.tenant_id is not None and about.tenant_id in tenants):
            detail = f"{AT_ONCE} exports are being read, or one of your tenant's; ask again when one has ended."
            raise ProblemError(429, ProblemCode.RATE_LIMITED, detail, headers={"Retry-After": "10"})
        pieces = self._pieces(about, form, sign, job_id)
        await anext(pieces)
        return pieces

    async def _pieces(
        self, about: Subject, form: Literal["csv", "jsonl"], sign: Sign | None, job_id: str | None
    ) -> AsyncGenerator[bytes]:
        """Yield an empty piece once the first one is there, and then the pieces."""
        pieces: asyncio.Queue[bytes | Exception | None] = asyncio.Queue(PIECES_AHEAD)
        place = object()

        async def write() -> None:
            end: Exception | None = None
            try:
                await write_lines(self._database, about, form, pieces.put, sign, job_id)
            except Exception as error:  # raised where the pieces are read
                end = error
            self._under_way.pop(place, None)  # its connection is free, however long its client may read on
            await pieces.put(end)

        self._under_way[place] = about.tenant_id
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
            self._under_way.pop(place, None)
            await end_tasks([writing])
