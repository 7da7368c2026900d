"""Which server answers a request with the least carbon and in time, over all places. Beyond the paper.

FREESH decides every half hour how many instances run where, and then shares requests among them by weights. Between two
plans intensity moves and so does load. Here each request goes where the energy that it adds is cleanest now, among the
servers that are predicted to answer it within its limit: network, queue, first token and the rest. Where none is, it
goes to the one that answers soonest.

The energy that a request adds is what the server draws beyond its idle power; its idle power is drawn with or without
the request. How servers compare is a property of theirs and of the grid now. Power over the rate of the moment would be
none: it falls while a server is busy and rises while it is idle, so that the busy one would look clean and stay busy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
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
        ttft_s, tbt_s: Time to the first token, and between tokens, as observed lately.
    """

    @property
    def location(self) -> str: ...
    @property
    def held(self) -> int: ...
    @property
    def room(self) -> int: ...
    @property
    def ttft_s(self) -> float: ...
    @property
    def tbt_s(self) -> float: ...


class Emitter(Protocol):
    """A server as emissions are compared.

    Attributes:
        id: Unique.
        request_class: Of the requests that it is for; None for all.
        request_j: Energy that a request of its class adds, by its profile, joules > 0; None if unknown.
        gco2_per_kwh: Intensity of its grid now, for energy at its meter: PUE included; None if unknown.
    """

    @property
    def id(self) -> str: ...
    @property
    def request_class(self) -> str | None: ...
    @property
    def request_j(self) -> float | None: ...
    @property
    def gco2_per_kwh(self) -> float | None: ...


S = TypeVar("S", bound=Server)


def marginal_j(power_w: float, idle_w: float, per_s: float) -> float | None:
    """Return the energy that each of some things adds, joules; None where none is known to be added.

    Args:
        power_w: Of the server at the given rate.
        idle_w: Of the server without requests.
        per_s: How many it makes each second at that power.
    """
    return (power_w - idle_w) / per_s if per_s > 0 and power_w > idle_w else None


def emissions(servers: Collection[Emitter]) -> dict[str, float]:
    """Return what is to be compared between the servers of one choice, by id: one unit for all of them.

    That is what a request adds, gCO2, if the profiles of all state it for the same class; else, as energies of
    different classes and unknown ones do not compare, gCO2 per kWh. Negative where the intensity is. Servers whose
    intensity is unknown are left out.
    """
    rates = [(each, each.gco2_per_kwh) for each in servers if each.gco2_per_kwh is not None]
    added = [(each.id, rate * each.request_j / KWH_J) for each, rate in rates if each.request_j is not None]
    if len(added) == len(rates) and len({each.request_class for each, _ in rates}) == 1:
        return dict(added)
    return {each.id: rate for each, rate in rates}


def predicted_s(server: Server, output_tokens: float, network_s: Mapping[str, float]) -> float:
    """Return the predicted time until the last token arrives, if the server is given the request now, seconds."""
    return network_s.get(server.location, 0.0) + server.ttft_s + output_tokens * server.tbt_s


def cleanest_in_time(
    servers: Iterable[S],
    gco2: Callable[[S], float | None],
    output_tokens: float,
    limit_s: float,
    network_s: Mapping[str, float],
) -> S | None:
    """Return the cleanest server with room that is predicted to answer in time, else the fastest; None without room.

    Servers whose carbon is unknown come after those whose carbon is known. Among servers that are alike the one with
    the smallest part of its room in use is taken, and among those the one named first.

    Args:
        servers: Those that may serve the request.
        gco2: What each emits, as ``emissions`` says; None if unknown.
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
    known = [(each, emits) for each in in_time if (emits := gco2(each)) is not None]
    if known:
        least = min(emits for _, emits in known)
        most = least + ALIKE * abs(least)
        in_time = [each for each, emits in known if emits <= most]
    return min(in_time, key=lambda each: each.held / (each.held + each.room))
