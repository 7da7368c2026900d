"""TLS between hosts: the certificate that a process presents, and the authority by which it verifies others."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from services.kit.logging import Log

log = Log(__name__)


@dataclass(frozen=True)
class Tls:
    certificate: Path | None = None
    """What it presents, including any intermediate certificates; None: it speaks plain HTTP."""
    key: Path | None = None
    authority: Path | None = None  #: Certificates by which it verifies others; None: those of the system
    asks_clients: bool = False
    """Whether it admits only clients that present a certificate of the authority (mutual TLS)."""
    pin: str = ""  #: SHA-256 of the one certificate that it accepts from the server it calls, in place of an authority

    @property
    def scheme(self) -> str:
        return "https" if self.certificate else "http"

    def client(self) -> ssl.SSLContext | None:
        """Return the TLS context for calls to others, None for the default; ``OSError`` if a file cannot be used."""
        if self.authority is None and self.certificate is None:
            return None
        context = ssl.create_default_context(cafile=None if self.authority is None else str(self.authority))
        if self.certificate is not None:
            context.load_cert_chain(self.certificate, self.key)
        return context

    def server(self) -> dict[str, Any]:
        if self.certificate is None:
            return {}
        options: dict[str, Any] = {"ssl_certfile": str(self.certificate), "ssl_keyfile": str(self.key)}
        if self.asks_clients:
            options |= {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_ca_certs": str(self.authority)}
        return options

    def redis(self, url: str) -> dict[str, str]:
        """Return the options for a client of Valkey or Redis; none if ``url`` is not over TLS."""
        if not url.startswith(("rediss://", "rediss+sentinel://")):
            return {}
        found = {"ssl_ca_certs": self.authority, "ssl_certfile": self.certificate, "ssl_keyfile": self.key}
        return {name: str(path) for name, path in found.items() if path is not None}

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> Tls:
        """Return the TLS settings of a process that would run in ``environment``."""

        def path(name: str) -> Path | None:
            return Path(environment[name]) if environment.get(name) else None

        certificate, key = path("WATTSHIFT_TLS_CERT"), path("WATTSHIFT_TLS_KEY")
        asks_clients = environment.get("WATTSHIFT_TLS_CLIENTS") == "required"
        return cls(certificate, key, path("WATTSHIFT_TLS_CA"), asks_clients)


class FollowedContext:
    """A TLS context that has what its files hold by now, so that certificates are replaced while a process runs.

    Args:
        tls: Where the files are.
        context: One that was made of them.
    """

    def __init__(self, tls: Tls, context: ssl.SSLContext) -> None:
        self._tls, self._context, self._seen = tls, context, _stamps(tls)

    def now(self) -> ssl.SSLContext:
        """Return the context for a connection that begins; files that do not go together yet change nothing."""
        if (stamps := _stamps(self._tls)) != self._seen:
            self._seen = stamps
            try:
                check(self._tls)
                if self._tls.certificate is not None:
                    self._context.load_cert_chain(self._tls.certificate, self._tls.key)
                if self._tls.authority is not None:  # the one before stays, for peers that still have its certificates
                    self._context.load_verify_locations(self._tls.authority)
                log.info("tls.renewed", certificate=str(self._tls.certificate or self._tls.authority))
            except (ValueError, OSError) as error:
                log.warning("tls.not_renewed", why=str(error))
        return self._context


def _stamps(tls: Tls) -> list[tuple[int, int] | None]:
    found: list[tuple[int, int] | None] = []
    for path in (tls.certificate, tls.key, tls.authority):
        try:
            found.append(None if path is None else ((seen := path.stat()).st_mtime_ns, seen.st_ino))
        except OSError:  # about to be replaced
            found.append(None)
    return found


def trusts_network(url: str) -> bool:
    """Return whether a client of PostgreSQL or Valkey sends a password without verifying the server.

    Args:
        url: Of the server, as in a setting. A server at a Unix socket is verified by its folder.
    """
    parts = urlsplit(url)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    is_given = any("password" in name for name in query) or ":" in parts.netloc.rpartition("@")[0]
    if not is_given or parts.scheme == "unix":
        return False
    if parts.scheme.startswith("postgres"):
        hosts = parts.netloc.rpartition("@")[2] or query.get("host", "")
        return not hosts.startswith("/") and query.get("sslmode") != "verify-full"
    return not parts.scheme.startswith("rediss") or query.get("ssl_cert_reqs", "required") != "required"


def check(tls: Tls) -> None:
    """Read the files before anything starts; ``ValueError`` if something is missing or cannot be used."""
    if (tls.certificate is None) != (tls.key is None):
        raise ValueError("WATTSHIFT_TLS_CERT and WATTSHIFT_TLS_KEY are set together, or neither is")
    if tls.asks_clients and (tls.certificate is None or tls.authority is None):
        raise ValueError("WATTSHIFT_TLS_CLIENTS=required needs WATTSHIFT_TLS_CERT, WATTSHIFT_TLS_KEY, WATTSHIFT_TLS_CA")
    files = {"CERT": tls.certificate, "KEY": tls.key, "CA": tls.authority}
    for name, path in files.items():
        try:
            if path is not None:
                path.read_bytes()
        except OSError as error:
            raise ValueError(f"WATTSHIFT_TLS_{name}={path}: {error.strerror}") from error
    try:
        tls.client()
    except (OSError, ssl.SSLError) as error:
        shown = ", ".join(str(path) for path in files.values() if path is not None)
        raise ValueError(f"{shown}: no certificates, or not the key of the certificate ({error})") from error
