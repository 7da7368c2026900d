"""Which addresses webhooks may be sent to, checked on the very address that a connection is opened to.

Users choose the URL; without a check they could make this process reach hosts that only the cluster's own network can.
"""

import asyncio
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from services.kit.networks import Network

NAT64 = IPv6Network("64:ff9b::/96")
LOOKUPS = 32
"""Names that are looked up at once, in threads of their own: a slow name server keeps nothing else waiting."""


class ForbiddenAddressError(OSError):
    """The host has no address that webhooks may use."""


class AddressRules:
    """Public addresses over https; those in the operator's networks also over http."""

    def __init__(self, networks: Sequence[Network]) -> None:
        self._networks = tuple(networks)

    def allow(self, address: str, *, encrypted: bool) -> bool:
        """Return whether a message may go to an IP address."""
        found = _real(ip_address(address.partition("%")[0]))
        return any(found in network for network in self._networks) or (encrypted and _is_public(found))


def _real(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """Return the IPv4 address that an IPv6 address embeds, or else the address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address in NAT64:
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address.sixtofour or address


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


class CheckedResolver(AbstractResolver):
    """Looks names up afresh each time, and returns only addresses that are allowed."""

    def __init__(self, rules: AddressRules, *, encrypted: bool) -> None:
        self._rules, self._encrypted = rules, encrypted
        self._executor = ThreadPoolExecutor(LOOKUPS, thread_name_prefix="webhook-names")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return a host's allowed addresses; ``ForbiddenAddressError`` if it has only others, ``OSError`` if none."""
        look_up = partial(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM, 0, socket.AI_ADDRCONFIG)
        found = await asyncio.get_running_loop().run_in_executor(self._executor, look_up)
        allowed = [entry for entry in found if self._rules.allow(str(entry[4][0]), encrypted=self._encrypted)]
        if not allowed:
            raise ForbiddenAddressError
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [
            ResolveResult(hostname=host, host=str(address[0]), port=port, family=family, proto=proto, flags=flags)
            for family, _, proto, _, address in allowed
        ]

    async def close(self) -> None:
        """End the threads that look names up, without waiting for them."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def checked_session(rules: AddressRules, *, encrypted: bool) -> aiohttp.ClientSession:
    """Return a session that connects to allowed addresses only, and keeps neither connections nor cookies."""

    def open_socket(info: tuple[Any, ...]) -> socket.socket:
        family, kind, proto, _, address = info
        if not rules.allow(str(address[0]), encrypted=encrypted):  # a URL with an IP address is not looked up
            raise ForbiddenAddressError
        return socket.socket(family, kind, proto)

    connector = aiohttp.TCPConnector(
        resolver=CheckedResolver(rules, encrypted=encrypted),
        use_dns_cache=False,
        force_close=True,
        limit=0,
        socket_factory=open_socket,
    )
    return aiohttp.ClientSession(
        connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False, trust_env=False
    )


async def fault_of(url: str, rules: AddressRules) -> str | None:
    """Look up a webhook's address and return what is wrong with it; None if nothing is."""
    parts = urlsplit(url)
    encrypted = parts.scheme == "https"
    host = parts.hostname or ""
    resolver = CheckedResolver(rules, encrypted=encrypted)
    try:
        async with asyncio.timeout(5):
            await resolver.resolve(host)
    except ForbiddenAddressError:
        return forbidden(encrypted)
    except (OSError, UnicodeError, TimeoutError):
        return f"{host} has no address: check the name"
    finally:
        await resolver.close()
    return None


def forbidden(encrypted: bool) -> str:
    """Return why an address is refused, and how others can be allowed."""
    rule = "must be a public address" if encrypted else "must be https"
    return f"{rule}; the operator allows other networks by ADMISSION_WEBHOOK_NETWORKS"
