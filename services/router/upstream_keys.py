"""API keys that model servers ask for: those of instances, secrets of tenants, or files in one folder.

Secrets are fetched from serving and kept in memory only: not in the table that the router keeps on disk, nor in a log.
The table says when each was last set, so that one that was set again is fetched the next time the table is read.
"""

import asyncio
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from services.contracts import routing
from services.kit.http import ServiceClient
from services.kit.logging import Log
from services.kit.problems import ProblemError
from services.router.fleet import Server
from services.router.upstream import UpstreamError

log = Log(__name__)

PAUSE_S = 2.0  #: Between two attempts to fetch a key that could not be had


class UpstreamKeys:
    """Keys by server."""

    def __init__(self, folder: Path | None, serving: ServiceClient) -> None:
        self._folder, self._serving = folder, serving
        self._files: dict[str, bytes] = {}
        self._secrets: dict[str, tuple[datetime, bytes]] = {}
        self._missing: dict[str, str] = {}
        self._fetching = asyncio.Lock()
        self._not_before_s = 0.0
        self._is_away = False

    def of(self, server: Server) -> bytes | None:
        """Return a server's key, None if it asks for none; ``UpstreamError`` if it is unknown, or cannot be sent."""
        if server.spec.pool is not None:
            known = self._secrets.get(server.id)
            return None if known is None else known[1]
        spec = server.spec
        if spec.upstream_secret is not None:
            if spec.upstream_secret_set_at is None:
                raise _no_key(f"Tenant {spec.tenant_id} has no secret {spec.upstream_secret}.")
            known = self._secrets.get(server.id)
            if known is None:
                raise _no_key(self._missing.get(server.id, f"The secret {spec.upstream_secret} is not known yet."))
            return known[1]
        return None if spec.upstream_key is None else self._file(spec.upstream_key)

    def is_wanted(self, server: Server) -> bool:
        """Whether a request must wait until a server's key is fetched.

        For an instance's key it need not while serving is away: the server may answer without the key, or else refuses.
        """
        is_ours = server.spec.pool is not None
        return self.is_due(server) and not (is_ours and self._is_away)

    def is_due(self, server: Server) -> bool:
        """Whether a server's secret is unknown, or was set again since it was fetched."""
        if server.instance is not None:
            return not server.was_key_asked_for
        set_at = server.spec.upstream_secret_set_at
        if set_at is None:
            return False
        known = self._secrets.get(server.id)
        return known is None or known[0] != set_at

    async def renew(self, servers: Iterable[Server]) -> None:
        """Fetch secrets if any are due; while serving does not answer, the known ones stay in use."""
        due = [each for each in servers if self.is_due(each)]
        if not due:
            return
        async with self._fetching:
            due = [each for each in due if self.is_due(each)]
            if not due or time.monotonic() < self._not_before_s:
                return
            try:
                found = await self._serving.call(
                    "GET", "/internal/routing/keys", routing.UpstreamKeys, attempts=1, timeout_s=2
                )
            except ProblemError as error:
                log.warning("keys.not_read", error=error.detail)
                self._is_away = True
            else:
                self._is_away = False
                self._take(found)
                for each in due:
                    each.was_key_asked_for = True
            if any(self.is_due(each) for each in due):
                self._not_before_s = time.monotonic() + PAUSE_S

    def forget_files(self) -> None:
        """Read files again when they are next needed."""
        self._files.clear()

    def _take(self, found: routing.UpstreamKeys) -> None:
        missing = dict(found.missing)
        secrets: dict[str, tuple[datetime, bytes]] = {}
        for key in found.keys:
            value = key.value.strip().encode()
            if _is_usable(value):
                secrets[key.server] = (key.set_at, value)
            else:
                missing[key.server] = "The secret has characters that a header cannot have, so that it is no API key."
        for server, why in missing.items():
            if self._missing.get(server) != why:
                log.error("key.not_usable", server=server, why=why)
        self._secrets, self._missing = secrets, missing

    def _file(self, name: str) -> bytes:
        found = self._files.get(name)
        if found is None:
            try:
                found = b"" if self._folder is None else (self._folder / name).read_bytes().strip()
            except OSError:
                found = b""
            if not _is_usable(found):
                raise _no_key(f"ROUTER_KEYS_DIR has no usable file {name}.")
            self._files[name] = found
        return found


def _is_usable(key: bytes) -> bool:
    return bool(key) and all(0x20 < byte < 0x7F for byte in key)


def _no_key(detail: str) -> UpstreamError:
    return UpstreamError("no_key", detail, may_repeat=True)
