"""The installation's Ed25519 key, which signs each day of the ledger, and when that is done."""

from collections.abc import Awaitable, Callable
from datetime import timedelta

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from services.db import locks
from services.db.database import Connection, Database
from services.db.sealing import Sealer, SealError
from services.kit.ids import utc_now
from services.kit.logging import Log
from services.telemetry.repository import seals

log = Log(__name__)

CLOSE_EVERY_S = 60.0
_PLACE = "ledger key"


class Signer:
    """Signs statements with the installation's key, which the database keeps sealed by ``WATTSHIFT_SECRETS_KEY``."""

    def __init__(self, database: Database, sealer: Sealer) -> None:
        self._database, self._sealer = database, sealer
        self._key: Ed25519PrivateKey | None = None
        self._public = b""

    async def use(self, work: Callable[..., Awaitable[object]], *arguments: object) -> None:
        """Call ``work`` with the database, ``sign`` and ``arguments`` once there is a key."""
        await work(self._database, await self.ready(), *arguments)

    async def ready(self) -> seals.Sign:
        """Return the function that signs, once the key is loaded, or made if none can be opened.

        Without a secrets key nothing is signed.
        """
        if self._key is None and self._sealer.has_key:
            async with self._database.transaction() as connection:
                await connection.execute("SELECT pg_advisory_xact_lock($1)", locks.LEDGER_UPKEEP)
                key = await self._known(connection) or await self._made(connection)
            self._key, self._public = key, key.public_key().public_bytes_raw()  # stored, whatever happens from now on
        return self.sign

    async def _known(self, connection: Connection) -> Ed25519PrivateKey | None:
        for key in await seals.newest_keys(connection):
            try:
                private = self._sealer.open(key["sealed"], _PLACE, key["public_key"].hex())
            except SealError:
                continue
            return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(private))
        return None

    async def _made(self, connection: Connection) -> Ed25519PrivateKey:
        key = Ed25519PrivateKey.generate()
        public = key.public_key().public_bytes_raw()
        sealed = self._sealer.seal(key.private_bytes_raw().hex(), _PLACE, public.hex())
        await seals.add_key(connection, public, sealed)
        log.info("ledger.key_made", public_key=public.hex())
        return key

    def sign(self, text: str) -> tuple[bytes | None, bytes | None]:
        """Return the public key and the signature of a text; both are None without a key."""
        return (None, None) if self._key is None else (self._public, self._key.sign(text.encode()))


async def close_days(database: Database, sign: seals.Sign) -> None:
    """State and sign yesterday's ledger, UTC, unless that was done; days without statements go into it too."""
    yesterday = (utc_now() - timedelta(days=1)).date()
    if await seals.close_day(database, sign, yesterday):
        log.info("ledger.day_closed", day=str(yesterday))
