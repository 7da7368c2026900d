"""What each service may do in Valkey or Redis. Telemetry creates the users of nodes when they enrol.

Like ``callers``, this is data without dependencies: ``deploy/make_env.py`` writes it on hosts that have only Python.
"""

import hashlib
import hmac
from collections.abc import Mapping
from urllib.parse import quote, urlsplit, urlunsplit

_ALWAYS = "+ping +hello +auth +select +client|setinfo +client|setname +info +multi +exec +discard"
_QUEUES = (
    "~wattshift:celery:* ~wattshift:experiments:* &* +@read +@write +@list +@hash +@set +@sortedset +@string +@pubsub "
    "+@connection +@transaction +@blocking +eval +evalsha +script|load -@dangerous -@admin +info"
)

RULES: Mapping[str, str] = {
    "gateway": "~wattshift:gateway-limits ~wattshift:ended-session:* +hset +hgetall +hdel +set +exists",
    "admission": "~wattshift:hints +xadd",
    "telemetry": "~wattshift:hints ~wattshift:node:*:commands %R~wattshift:node:*:latency "
    "+xadd +xread +xdel +acl|setuser +acl|deluser +acl|users",
    "scheduler": "~wattshift:hints ~wattshift:node:*:commands +xadd +xread +xlen",
    "router": "~wattshift:routers ~wattshift:router-limits ~wattshift:node:*:latency "
    "+hset +hgetall +hdel +xadd +expire +time",
    "optimizer": _QUEUES,
    "simulator": _QUEUES,
}
"""By service. The others have no use for it. Who makes users could give itself any right: telemetry is trusted so far,
and nodes reach it, so that it takes from them what it has checked alone."""


def password(secret: str, service: str) -> str:
    """Return the password of a service's user, derived from the server's own."""
    return hmac.new(secret.encode(), f"wattshift redis/{service}".encode(), hashlib.sha256).hexdigest()


def configuration(secret: str) -> list[str]:
    """Return the lines of a server's configuration that create the users."""
    return [
        f"user {service} on #{hashlib.sha256(password(secret, service).encode()).hexdigest()} -@all {_ALWAYS} {rules}"
        for service, rules in RULES.items()
    ]


def without_user(url: str) -> str:
    """Return the address of a server without user and password."""
    given = urlsplit(url).netloc
    return url.replace(f"//{given}", f"//{given.rpartition('@')[2]}", 1)


def with_user(url: str, name: str, password: str) -> str:
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{quote(name, safe='')}:{quote(password, safe='')}@{host}"))
