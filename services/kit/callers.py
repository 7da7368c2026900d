"""The one table of which service may ask which, for what, and on whose behalf. Anything not listed is refused.

It is data without dependencies, because ``deploy/make_env.py`` needs it on hosts where only Python is installed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

GRID, READ_ONLY, USER, OPERATOR, ADMIN = "grid", "read_only", "user", "operator", "admin"
"""``services.contracts.identity.Role``, as text."""

NODE = "node"  #: The audience that stands for every agent; one node's is ``node/NAME``


@dataclass(frozen=True)
class Calls:
    """What one service may ask another."""

    allowed: re.Pattern[str]  #: ``METHOD /path`` in full, as a regular expression
    roles: frozenset[str] = frozenset()  #: The user roles in which it may act; empty if it asks only for itself


def _calls(*allowed: str, roles: tuple[str, ...] = ()) -> Calls:
    return Calls(re.compile("|".join(allowed)), frozenset(roles))


_EVERYBODY = (GRID, READ_ONLY, USER, OPERATOR, ADMIN)
_PUBLIC = r"(GET|POST|PUT|PATCH|DELETE) /(v1|emissions)/.*"
_CARBON = (r"GET /v1/carbon/.*",)
_KEYS = r"POST /internal/keys/resolve"
_METRICS = r"GET /metrics"

CALLERS: Mapping[str, Mapping[str, Calls]] = {
    "admission": {
        "gateway": _calls(
            _PUBLIC, _KEYS, _METRICS, r"POST /internal/submissions", r"GET /internal/agents/metrics", roles=_EVERYBODY
        ),
        "router": _calls(_KEYS),
        "serving": _calls(_KEYS, r"POST /internal/submissions", r"POST /v1/jobs/[^/]+/cancel", roles=(USER,)),
    },
    "carbon": {
        "gateway": _calls(_PUBLIC, _METRICS, r"GET /locations", roles=_EVERYBODY),
        "scheduler": _calls(*_CARBON),
        "serving": _calls(*_CARBON),
        "simulator": _calls(*_CARBON),
        "telemetry": _calls(*_CARBON),
    },
    "optimizer": {
        "gateway": _calls(_PUBLIC, _METRICS, roles=_EVERYBODY),
        "serving": _calls(r"(GET|POST|DELETE) /v1/optimize/[^/]+", roles=(USER,)),
    },
    "scheduler": {
        "gateway": _calls(_PUBLIC, _METRICS, roles=_EVERYBODY),
        "admission": _calls(r"POST /v1/jobs:estimate", roles=(USER,)),
        "simulator": _calls(r"GET /internal/live", roles=_EVERYBODY),
    },
    "serving": {
        "gateway": _calls(_PUBLIC, _METRICS, roles=_EVERYBODY),
        "router": _calls(
            r"GET /internal/routing(/keys)?",
            r"POST /internal/routing/held",
            r"POST /internal/apps/observations",
            r"POST /v1/pools/[^/]+/traffic",
            r"(GET|POST|DELETE) /internal/openai/v1/(files|batches)(/.*)?",
            roles=(READ_ONLY, USER),
        ),
    },
    "router": {"serving": _calls(r"POST /v1/(chat/completions|completions|embeddings)", roles=(USER,))},
    "simulator": {
        "gateway": _calls(_PUBLIC, _METRICS, roles=_EVERYBODY),
        "scheduler": _calls(r"GET /internal/comparisons/[^/]+", r"POST /internal/earlier"),
    },
    "telemetry": {
        "gateway": _calls(_PUBLIC, _METRICS, roles=_EVERYBODY),
        "router": _calls(r"POST /internal/request-usage"),
        "simulator": _calls(r"GET /v1/(reports/(history|footprint)|nodes)", roles=_EVERYBODY),
    },
    NODE: {
        "admission": _calls(
            r"GET /v1/allocations/.+/logs",
            r"POST /v1/allocations/[^/]+/exec/[^/]+",
            r"POST /v1/allocations/[^/]+/files",
            r"PUT /v1/exec/[^/]+",
            r"GET /v1/state",
            _METRICS,
            roles=_EVERYBODY,
        )
    },
}
"""By who is asked, then by who asks."""

KEEPERS_OF_NODES = frozenset({"telemetry", "admission"})
"""Services with the secret from which the keys of nodes follow: one hands them out, the other asks nodes."""

SERVICES = ("gateway", "carbon", "admission", "scheduler", "optimizer", "router", "serving", "simulator", "telemetry")


def audiences_of(issuer: str) -> tuple[str, ...]:
    return tuple(audience for audience, callers in CALLERS.items() if issuer in callers and audience != NODE)
