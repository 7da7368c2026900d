"""Addresses of a Valkey or Redis that Sentinels watch: they know which server takes writes, now and after a failover.

    redis+sentinel://USER:PASSWORD@HOST1:26379,HOST2:26379/0?master=NAME

is the server that those Sentinels call NAME; ``rediss+sentinel`` is the same over TLS, Sentinels included. ``USER`` and
``PASSWORD`` are the server's; for Sentinels that have their own, add ``sentinel_username`` and ``sentinel_password``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

SCHEMES: Mapping[str, str] = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
PORT = 26_379


@dataclass(frozen=True)
class Watched:
    sentinels: tuple[tuple[str, int], ...]
    master: str
    over_tls: bool  #: Whether all of them speak TLS
    user: dict[str, Any]  #: Client options for the server: its user and database
    sentinel_user: dict[str, Any]  #: Client options for the Sentinels

    def broker_url(self) -> str:
        """Return the address for Celery, which takes the name of the server in ``transport_options``."""
        name, password = (quote(self.user.get(each, ""), safe="") for each in ("username", "password"))
        return ";".join(
            f"sentinel://{name}:{password}@{host}:{port}/{self.user['db']}" for host, port in self.sentinels
        )

    def transport_options(self, tls: Mapping[str, str]) -> dict[str, Any]:
        return {"master_name": self.master, "sentinel_kwargs": self.sentinel_options(tls)}

    def sentinel_options(self, tls: Mapping[str, str]) -> dict[str, Any]:
        """Return the options for clients of the Sentinels; one that does not answer at once is skipped."""
        return {**self.sentinel_user, **self.tls_options(tls), "socket_timeout": 2, "socket_connect_timeout": 2}

    def tls_options(self, tls: Mapping[str, str]) -> dict[str, Any]:
        """Return the options that make a client speak TLS; none if it should not."""
        return {"ssl": True, **tls} if self.over_tls else {}


def watched(url: str) -> Watched | None:
    """Return the server of an address, None if it names no Sentinels; ``ValueError`` if it names them wrongly."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        return None
    user, _, hosts = parts.netloc.rpartition("@")
    options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    if unknown := options.keys() - {"master", "sentinel_username", "sentinel_password"}:
        raise ValueError(f"it has options that Sentinels have not: {', '.join(sorted(unknown))}")
    if not options.get("master"):
        raise ValueError("it names Sentinels, and not the server that they watch: add ?master=NAME")
    database = parts.path.strip("/") or "0"
    if not database.isdigit():
        raise ValueError(f"it names the database {database!r}, which is no number")
    name, _, password = user.partition(":")
    client: dict[str, Any] = {"db": int(database)}
    client |= {"username": unquote(name)} if name else {}
    client |= {"password": unquote(password)} if password else {}
    return Watched(
        sentinels=tuple(_address(each) for each in hosts.split(",")),
        master=options["master"],
        over_tls=parts.scheme.startswith("rediss"),
        user=client,
        sentinel_user={
            key.removeprefix("sentinel_"): value for key, value in options.items() if key.startswith("sentinel_")
        },
    )


def _address(text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        if parts.hostname:
            return parts.hostname, parts.port or PORT
    except ValueError:
        pass
    raise ValueError(f"it names the Sentinel {text!r}, which is no HOST:PORT")
