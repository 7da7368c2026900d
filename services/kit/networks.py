"""Networks: those named in the settings, in which a process may connect to others, and those of its clients."""

import ipaddress
from functools import lru_cache

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def read_networks(text: str) -> tuple[Network, ...]:
    """Return networks such as `10.8.0.0/16,192.0.2.7`; ``ValueError`` if one is none, or has bits beyond its prefix."""
    found: list[Network] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            found.append(ipaddress.ip_network(part))
        except ValueError as error:
            raise ValueError(f"must be networks such as 10.8.0.0/16,192.0.2.7, not {part!r}") from error
    return tuple(found)


def is_within(address: str, networks: tuple[Network, ...]) -> bool:
    """Return whether an IP address lies in one of the networks; an IPv4 address written as IPv6 counts as IPv4."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return any(found.version == network.version and found in network for network in networks)


@lru_cache(1_024)
def is_loopback(host: str) -> bool:
    """Return whether an IP address is one of this machine's alone; False for what is no IP address."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


def peer_network(address: str) -> str:
    """Return what counts as one client: the address, or for IPv6 its network of 64 bits, which one host may own."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if found.version == 4:
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, 64), strict=False))
