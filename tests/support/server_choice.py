"""The rules by which a server is chosen, said as plainly as they can be: each term from scratch, for every server.

What serves (``server_choice``) looks up what does not change, and ends early; it has to choose the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from services.core.domain.units import J_PER_KWH
from services.core.policies.freesh.server_choice import (
    ADAPTER_S,
    ALIKE,
    ALIKE_PACE,
    BALANCE_REQUESTS,
    BALANCE_SHARE,
    PREFILL_BASE_TOKENS,
    SLOWDOWN_PER_TOKEN,
    S,
    Server,
    ServerCosts,
    Work,
)


def plain_cached(costs: ServerCosts, work: Work) -> int:
    """Return how many tokens of a prompt a server need not read."""
    known = 0.0 if work.session is None else costs._sessions.get(work.session, 0)
    kept, shared = costs._cache._blocks, 0
    while shared < len(work.blocks) and work.blocks[shared] in kept:
        shared += 1
    return max(int(min(max(known, shared * work.block_tokens), work.input_tokens - 1)), 0)


def plain_end_s(
    costs: ServerCosts, work: Work, now_s: float, cached_tokens: int, read_s: float, token_s: float
) -> float:
    """Return the predicted time until a request's last token, seconds."""
    loads_s = ADAPTER_S if work.adapter is not None and work.adapter not in costs.adapters else 0.0
    reads_s = loads_s + read_s * (PREFILL_BASE_TOKENS + work.input_tokens - cached_tokens)
    waits_s = max(costs._reads_until_s - costs._ahead_s - now_s, 0.0)
    slowed = 1.0 + SLOWDOWN_PER_TOKEN * (costs.held_tokens + costs.others_tokens)
    served_s = waits_s + reads_s + work.output_tokens * token_s * slowed
    return served_s * (1.0 + costs.queued / max(costs.running, 1.0)) if costs.queued else served_s


def plain_carbon(servers: Sequence[Server], work: Work) -> list[float]:
    """Return what is to be compared between servers: one unit for all of them; infinite where intensity is unknown.

    That is what the request adds, gCO2, if the profiles of all whose intensity is known state it; else, as known
    energies do not compare with unknown ones, gCO2 per kWh. Negative where the intensity is.
    """
    if all(each.energy is not None for each in servers if each.gco2_per_kwh is not None):
        return [
            inf
            if each.gco2_per_kwh is None or each.energy is None
            else each.gco2_per_kwh * each.energy.added_j(work) / J_PER_KWH
            for each in servers
        ]
    return [inf if each.gco2_per_kwh is None else each.gco2_per_kwh for each in servers]


def plain_choice(
    servers: Sequence[S], work: Work, limit_s: float, now_s: float, network_s: Mapping[str, float]
) -> S | None:
    """Return the server that adds least carbon among those predicted to be in time, else the first to answer.

    Of servers that are alike the first to answer is taken, and of those the one named first.

    Args:
        servers: Those that may be given the request now.
        work: The request.
        limit_s: How long its answer may still take.
        now_s: The moment, by the clock of ``ServerCosts.begin``.
        network_s: Time to each place and back, seconds; 0 where none is given.
    """
    if len(servers) < 2:
        return servers[0] if servers else None
    carbon = plain_carbon(servers, work)
    away_s = [network_s.get(each.location, 0.0) for each in servers]
    read_s = plain_even([each.costs.read_s for each in servers])
    token_s = plain_even([each.costs.token_s for each in servers])
    in_time: list[int] = []
    ends_s: dict[int, float] = {}
    for at in _balanced(servers, carbon, away_s, token_s, work):
        costs = servers[at].costs
        cached = plain_cached(costs, work)
        own_s = away_s[at] + plain_end_s(costs, work, now_s, cached, costs.read_s, costs.token_s)
        ends_s[at] = away_s[at] + plain_end_s(costs, work, now_s, cached, read_s[at], token_s[at])
        if own_s <= limit_s:
            in_time.append(at)
    found = list(ends_s)
    if in_time:
        least = min([carbon[at] for at in in_time])
        most = least if least == inf else least + ALIKE * abs(least)
        found = [at for at in in_time if carbon[at] <= most]
    return servers[min(found, key=ends_s.__getitem__)]


def plain_even(paces_s: Sequence[float]) -> list[float]:
    """Return servers' times with those of the fastest for all that are about as fast."""
    fastest = min(paces_s)
    return [fastest if each <= (1.0 + ALIKE_PACE) * fastest else each for each in paces_s]


def _balanced(
    servers: Sequence[Server], carbon: Sequence[float], away_s: Sequence[float], token_s: Sequence[float], work: Work
) -> list[int]:
    """Return the servers that are not much fuller than one that is no dirtier and no farther, by their places.

    How full one is: the seconds of work that each of its places holds.
    """
    place_s = [pace_s / each.limit for each, pace_s in zip(servers, token_s, strict=True)]
    loads = [each.costs.held_tokens + each.costs.others_tokens for each in servers]
    full_s = [load * s for load, s in zip(loads, place_s, strict=True)]
    spare = BALANCE_REQUESTS * work.tokens
    found: list[int] = []
    for at in range(len(servers)):
        as_good = [
            other for other in range(len(servers)) if carbon[other] <= carbon[at] and away_s[other] <= away_s[at]
        ]
        least_s = min(full_s[other] for other in as_good)
        if full_s[at] <= (1.0 + BALANCE_SHARE) * least_s + spare * place_s[at]:
            found.append(at)
    return found
