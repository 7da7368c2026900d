"""Which server answers a request with the least carbon and in time, over all places. Beyond the paper.

FREESH decides every half hour how many instances run where, and then shares requests among them by weights. Between two
plans intensity moves and so does load. Here each request goes where the energy that it adds is cleanest now, among the
servers that are predicted to answer it within its limit: network, queue, first token and the rest. Where none is, it
goes to the one that answers soonest.

The energy that a request adds is what the server draws beyond its idle power, per token; a server's idle power is drawn
with or without the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

ALIKE = 0.05
"""Carbon within so much of the least is as good: among those, the least loaded server is taken."""
KWH_J = 3.6e6


class Server(Protocol):
    """A server as this choice sees it.

    Attributes:
        location: Its place.
        held: Requests that it holds.
        room: How many more it may be given.
        gco2_per_token: What another token emits there now; None if unknown.
        ttft_s, tbt_s: Time to the first token, and between tokens, as observed lately.
    """

    @property
    def location(self) -> str: ...
    @property
    def held(self) -> int: ...
    @property
    def room(self) -> int: ...
    @property
    def gco2_per_token(self) -> float | None: ...
    @property
    def ttft_s(self) -> float: ...
    @property
    def tbt_s(self) -> float: ...


S = TypeVar("S", bound=Server)


def marginal_gco2_per_token(
    power_w: float, idle_w: float, tokens_per_s: float, gco2_per_kwh: float, pue: float
) -> float | None:
    """Return what one more token emits, gCO2; negative where the marginal intensity is.

    Args:
        power_w: Of the server at the given rate.
        idle_w: Of the server without requests.
        tokens_per_s: That it makes at that power; None is returned where it makes none.
        gco2_per_kwh: Carbon intensity of its grid.
        pue: Power usage effectiveness of its site.
    """
    if tokens_per_s <= 0:
        return None
    return max(0.0, power_w - idle_w) / tokens_per_s * pue / KWH_J * gco2_per_kwh


def predicted_s(server: Server, output_tokens: float, network_s: Mapping[str, float]) -> float:
    """Return the predicted time until the last token arrives, if the server is given the request now, seconds."""
    return network_s.get(server.location, 0.0) + server.ttft_s + output_tokens * server.tbt_s


def cleanest_in_time(
    servers: Iterable[S], output_tokens: float, limit_s: float, network_s: Mapping[str, float]
) -> S | None:
    """Return the cleanest server with room that is predicted to answer in time, else the fastest; None without room.

    Servers whose carbon is unknown come after those whose carbon is known. Among servers that are alike the one with
    the smallest part of its room in use is taken, and among those the one named first.

    Args:
        servers: Those that may serve the request.
        output_tokens: Predicted length of the answer.
        limit_s: How long it may take.
        network_s: Time to each place and back, seconds; 0 where none is given.
    """
    in_time: list[S] = []
    fastest: S | None = None
    fastest_s = 0.0
    for server in servers:
        if server.room <= 0:
            continue
        takes_s = predicted_s(server, output_tokens, network_s)
        if takes_s <= limit_s:
            in_time.append(server)
        elif fastest is None or takes_s < fastest_s:
            fastest, fastest_s = server, takes_s
    if not in_time:
        return fastest
    known = [each.gco2_per_token for each in in_time if each.gco2_per_token is not None]
    if known:
        least = min(known)
        most = least + ALIKE * abs(least)
        in_time = [each for each in in_time if each.gco2_per_token is not None and each.gco2_per_token <= most]
    return min(in_time, key=lambda each: each.held / (each.held + each.room))
