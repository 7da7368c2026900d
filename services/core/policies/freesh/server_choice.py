"""Which server answers a request: for each server, predict when the answer ends and what the request adds there.

FREESH decides every half hour how many instances run where, and then shares requests among them by weights. Between two
plans both intensity and load change. Here each request goes where it adds the least carbon, among the servers that are
predicted to answer it within its limit; among equals, to the one that answers first. This goes beyond the paper.

- *Time*: prompts are read one after another, and each step makes one token of every request held. Whatever is cached
  need not be read, so a cache hit is worth the time that it saves. Load is counted in tokens.
- *Carbon* is a property of server and request: what one more request in a full batch draws, for as long as the profile
  takes for its tokens, times PUE and intensity. Power divided by the present rate would not be one: it falls while a
  server is busy, so a busy server would look clean and stay busy. What is cached plays no part in it either.
- *Accuracy*: where servers are variants of different accuracy, a point of it is worth so much intensity.
- *Balance*: of servers that are no dirtier and no farther, one that is fuller by more than ``BALANCE_SHARE`` and
  ``BALANCE_REQUESTS`` is passed over, whatever it has cached.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import NamedTuple, Protocol, TypeVar

from services.core.domain.units import J_PER_KWH
from services.core.profiles.prefix_cache import PrefixCache

BATCH_SLOWDOWN = 0.010
"""By what share of a lone request's step each further request lengthens it.

Fitted to Splitwise's measurements of Llama-2-70B, batches of 1 to 64 on A100s and H100s with 2, 4 and 8 GPUs: between
0.007 and 0.012 by GPU and degree (``python -m lab.reproductions.serving_profiles``).
"""
PREFILL_BASE_TOKENS = 212.0
"""Tokens that take as long to prefill as what every prefill takes besides: the median of Splitwise's measurements of
Llama-2-70B (97 .. 519; ``lab/serving/model_server.py``)."""
ALIKE = 0.05  #: Carbon within so much of the least is as good: among those, the one that answers first is taken
ALIKE_PACE = 0.25
"""Servers that are slower than the fastest by less count as fast as it: what was seen of them varies by as much."""
BALANCE_SHARE, BALANCE_REQUESTS = 0.25, 2.0
"""By how much of the least full one's tokens, and of how many requests like this one, a server may be fuller."""
USUAL_REQUEST_TOKENS = 1_300.0
"""Of a request in the batches by which ``BATCH_SLOWDOWN`` was fitted: prompt, answer and ``PREFILL_BASE_TOKENS``."""
USUAL_READ_TOKENS = 1_000.0
"""Tokens that a prefill reads in a profile's time to the first token, ``PREFILL_BASE_TOKENS`` included."""
USUAL_TTFT_S, USUAL_TBT_S = 0.2, 0.03  #: Assumed of a server that has neither a profile nor answers yet
SLOWDOWN_PER_TOKEN = BATCH_SLOWDOWN / USUAL_REQUEST_TOKENS
IDLE_SHARE = 0.4  #: Idle power as a share of full power, where the profile does not state it
NEW_SHARE = 0.1  #: Weight of the newest answer in a server's mean times
ADAPTER_S, MOST_ADAPTERS = 0.5, 4
"""Time to load an adapter (LoRA), and how many of those used last a server is thought to have loaded."""
KV_FULL = 0.95  #: Of its KV cache, from where on a server has the next request wait for one to end
CACHE_TOKENS, BLOCK_TOKENS, MOST_SESSIONS = 2**19, 128, 10_000
"""What a server is thought to have cached: tokens of prompts, in blocks; sessions."""


class Work(NamedTuple):
    """A request, as needed to compare servers for it."""

    input_tokens: int  #: Length of the prompt
    output_tokens: float  #: Predicted length of the answer
    blocks: Sequence[int] = ()  #: Keys of the prompt's prefixes that are whole blocks, the shortest first
    session: Hashable = None  #: The session to which it says it belongs
    adapter: str | None = None  #: The adapter that it needs; None for the model itself
    block_tokens: float = BLOCK_TOKENS  #: Length of each block

    @property
    def tokens(self) -> int:
        """The number of tokens that it adds to the load of a server that holds it."""
        return round(PREFILL_BASE_TOKENS + self.input_tokens + self.output_tokens)


class EnergyProfile(NamedTuple):
    """What requests add to a server's power at the load of its profile."""

    slot_w: float  #: Power per request in the batch, watts > 0
    read_s: float  #: Seconds to read a token of a prompt
    token_s: float  #: Seconds to make one of an answer

    def added_j(self, work: Work) -> float:
        reads_s = self.read_s * (PREFILL_BASE_TOKENS + work.input_tokens)
        return self.slot_w * (reads_s + self.token_s * work.output_tokens)


def energy_profile(
    full_w: float | None,
    idle_w: float | None,
    max_qps: float | None,
    latency_s: float | None,
    ttft_s: float | None,
    tbt_s: float | None,
) -> EnergyProfile | None:
    """Return a profile's energy figures; None if any is missing, or if requests add no energy.

    At ``max_qps`` a server holds ``max_qps * latency_s`` requests (Little's law); they share what it draws beyond idle.
    """
    if not (full_w and max_qps and latency_s and ttft_s and tbt_s):
        return None
    slot_w = (full_w - (IDLE_SHARE * full_w if idle_w is None else idle_w)) / (max_qps * latency_s)
    return EnergyProfile(slot_w, ttft_s / USUAL_READ_TOKENS, tbt_s) if slot_w > 0 else None


@dataclass(slots=True)
class Given:
    """A request that was given to a server."""

    work: Work  #: The request
    at_s: float  #: When it was given
    cached_tokens: int  #: Tokens of its prompt that the server need not read
    first_s: float  #: Predicted time to its first token
    read_at_s: float  #: When its prompt should have been read, by the server's own reading clock
    beside: float  #: Tokens that the server held without it
    given_at_s: float  #: When it was given, by the server's own reading clock
    reads_s: float  #: Predicted time to read its prompt alone


class ServerCosts:
    """A server's speed, which is a property of it, and its load."""

    def __init__(
        self,
        ttft_s: float | None = None,
        tbt_s: float | None = None,
        batch: float = 1.0,
        cache: PrefixCache | None = None,
    ) -> None:
        """Take its cache, and its profile's times as ``expect`` does."""
        self.read_s = self.token_s = 0.0  #: Seconds to read a token, and between the tokens of a lone request
        self._usual = 0.0, 0.0
        self.expect(ttft_s, tbt_s, batch)
        self.held_tokens, self.others_tokens = 0, 0.0  #: Tokens of the requests that it was given here, and by others
        self._count()
        self.running = self.queued = 0.0  #: Requests that it works on, and that wait inside it, as it reports
        self.adapters: OrderedDict[str, None] = OrderedDict()  #: Those thought to be loaded, the last used last
        self._reads_until_s = self._read_to_s = self._free_at_s = -inf
        self._ahead_s = 0.0
        self._unread: dict[int, Given] = {}
        self._cache = PrefixCache(CACHE_TOKENS, BLOCK_TOKENS) if cache is None else cache
        self._sessions: OrderedDict[Hashable, int] = OrderedDict()
        self._has_answered = False

    def expect(self, ttft_s: float | None, tbt_s: float | None, batch: float) -> None:
        """Take the times of its profile, None if unknown, and the batch at which they hold; what was learned stays."""
        was_learned = (self.read_s, self.token_s) != self._usual
        lone_s = (tbt_s or USUAL_TBT_S) / (1.0 + BATCH_SLOWDOWN * max(batch - 1.0, 0.0))
        self._usual = (ttft_s or USUAL_TTFT_S) / USUAL_READ_TOKENS, lone_s
        if not was_learned:
            self.read_s, self.token_s = self._usual

    @property
    def drift(self) -> tuple[float, float]:
        """Its times to read a token and between tokens, as shares of those of its profile."""
        return self.read_s / self._usual[0], self.token_s / self._usual[1]

    @property
    def ttft_s(self) -> float:
        """Time to the first token of a typical prompt that does not wait, seconds."""
        return self.read_s * USUAL_READ_TOKENS

    @property
    def tbt_s(self) -> float:
        """Present time between tokens, seconds."""
        return self.token_s * self._slowed

    def _count(self) -> None:
        """Update what depends on the load, so that choices, which are far more frequent, only look it up."""
        self.load_tokens = self.held_tokens + self.others_tokens  #: The sum of both
        self._slowed = 1.0 + SLOWDOWN_PER_TOKEN * self.load_tokens

    def cached_tokens(self, work: Work) -> int:
        """Return how many tokens of a prompt it need not read, because it has had that prefix or session before."""
        known = 0.0 if work.session is None else self._sessions.get(work.session, 0)
        if work.blocks and (shared := self._cache.shared(work.blocks)):
            known = max(known, shared * work.block_tokens)
        if known >= work.input_tokens:  # one makes the first token
            known = work.input_tokens - 1
        return int(known) if known > 0 else 0

    def end_s(
        self, work: Work, now_s: float, cached_tokens: int, read_s: float | None = None, token_s: float | None = None
    ) -> float:
        """Return the predicted time until a request's last token if it is given now, seconds.

        Each request that waits inside the server is assumed to take as long as this one; the server is assumed to work
        on as many at a time as it does now.

        Args:
            now_s: The present time, by the clock of ``begin``.
            read_s, token_s: Times to use in place of its own.
        """
        served_s = (read_s or self.read_s) * (PREFILL_BASE_TOKENS + work.input_tokens - cached_tokens)
        if work.adapter is not None and work.adapter not in self.adapters:
            served_s += ADAPTER_S
        if self._free_at_s > now_s:
            served_s += self._free_at_s - now_s
        served_s += work.output_tokens * (token_s or self.token_s) * self._slowed
        return served_s * (1.0 + self.queued / max(self.running, 1.0)) if self.queued else served_s

    def _reads_s(self, work: Work, cached_tokens: int) -> float:
        loads_s = ADAPTER_S if work.adapter is not None and work.adapter not in self.adapters else 0.0
        return loads_s + self.read_s * (PREFILL_BASE_TOKENS + work.input_tokens - cached_tokens)

    def begin(self, work: Work, now_s: float) -> Given:
        """Count a request that the server is given; return the record to pass to ``end``."""
        cached = self.cached_tokens(work)
        ahead_s = now_s + self._ahead_s
        reads_s = self._reads_s(work, cached)
        self._reads_until_s = until_s = max(self._reads_until_s, ahead_s) + reads_s
        self._free_at_s = until_s - self._ahead_s
        given = Given(work, now_s, cached, until_s - ahead_s, until_s, self.load_tokens, ahead_s, reads_s)
        self._unread[id(given)] = given
        self.held_tokens += work.tokens
        self._count()
        if work.blocks:
            self._cache.keep(work.blocks)
        if work.session is not None:
            self._sessions[work.session] = work.input_tokens + round(work.output_tokens)
            self._sessions.move_to_end(work.session)
            if len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)
        if work.adapter is not None:
            self.adapters[work.adapter] = None
            self.adapters.move_to_end(work.adapter)
            if len(self.adapters) > MOST_ADAPTERS:
                self.adapters.popitem(last=False)
        return given

    def has_read(self, given: Given, now_s: float) -> None:
        """Note that a request's answer has begun, so its prompt and all before it have been read, perhaps early."""
        if id(given) not in self._unread:
            return
        for name in list(self._unread):
            if self._unread.pop(name) is given:
                break
        self._read_to_s = given.read_at_s
        self._ahead_s = max(self._ahead_s, given.read_at_s - now_s)
        self._free_at_s = self._reads_until_s - self._ahead_s

    def end(self, given: Given) -> None:
        """Stop counting a request that it no longer holds; if its prompt was not read yet, it will not be."""
        self.held_tokens -= given.work.tokens
        self._count()
        if self._unread.pop(id(given), None) is None:
            return
        until_s = self._read_to_s
        for each in self._unread.values():
            until_s = max(until_s, each.given_at_s) + each.reads_s
            each.read_at_s, each.first_s = until_s, until_s - each.given_at_s
        self._reads_until_s, self._free_at_s = until_s, until_s - self._ahead_s

    def tell(self, held: float, running: float, queued: float, kv_use: float) -> None:
        """Take in the server's report of itself, and how many of its requests were given here.

        Args:
            running, queued: Requests that it works on, and that wait inside it.
            kv_use: Share of its KV cache in use, 0 .. 1.
        """
        self.running, self.queued = running, queued + (kv_use >= KV_FULL)
        self.others_tokens = USUAL_REQUEST_TOKENS * max(running + queued - held, 0.0)
        self._count()

    def learn(self, given: Given, first_s: float | None, served_s: float, tokens: float) -> None:
        """Learn from a complete answer.

        Args:
            first_s: Time from being given to the server to its first token; None if that was not seen.
            served_s: Time to its last token.
        """
        self._has_answered = True
        if first_s is None:
            first_s = served_s if tokens <= 1 else min(given.first_s, served_s)
        if given.first_s > 0:
            ratio = min(max(first_s / given.first_s, 0.1), 10.0)
            self.read_s = min(max(self.read_s * (1.0 + NEW_SHARE * (ratio - 1.0)), 1e-7), 1.0)
        if tokens > 1 and served_s > first_s:
            beside = max(given.beside, self.load_tokens)
            lone_s = (served_s - first_s) / (tokens - 1) / (1.0 + SLOWDOWN_PER_TOKEN * beside)
            self.token_s += NEW_SHARE * (lone_s - self.token_s)

    def fade(self) -> None:
        """Discount observed times if nothing was observed since the last call, so that a slow server is tried again."""
        if not self.held_tokens and not self._has_answered:
            read_s, token_s = self._usual
            self.read_s += NEW_SHARE * (read_s - self.read_s)
            self.token_s += NEW_SHARE * (token_s - self.token_s)
        self._has_answered = False


class Server(Protocol):
    """A server, as needed for this choice."""

    @property
    def location(self) -> str: ...  #: Where it is
    @property
    def limit(self) -> int: ...  #: Requests that it may be given at once
    @property
    def gco2_per_kwh(self) -> float | None: ...  #: Intensity of its grid now, at its meter, with PUE; None if unknown
    @property
    def energy(self) -> EnergyProfile | None: ...  #: What requests add to its energy, by its profile; None if unknown
    @property
    def accuracy_pct(self) -> float | None: ...  #: Of its variant of the model; None where there is one variant alone
    @property
    def costs(self) -> ServerCosts: ...  #: Its times and load


S = TypeVar("S", bound=Server)


def with_accuracy(servers: Sequence[Server], work: Work, carbon: list[float], point_gco2_per_kwh: float) -> list[float]:
    """Return the figures of ``added_carbon`` with what less accuracy than the best of the servers costs.

    A point of accuracy is worth so much intensity, at the energy that the request would add at the most accurate
    server. So of two variants, the one that needs less energy is taken where the grid is dirty, the more accurate one
    where it is clean (Clover's trade-off of accuracy and carbon, for one request).

    Args:
        servers: Servers, of which those without an accuracy count as the most accurate.
        point_gco2_per_kwh: Worth of a percentage point, gCO2/kWh >= 0.
    """
    stated = [each.accuracy_pct for each in servers if each.accuracy_pct is not None]
    if not stated or not point_gco2_per_kwh:
        return carbon
    best = max(stated)
    of_best = next(each for each in servers if each.accuracy_pct == best)
    is_in_grams = all(each.energy is not None for each in servers if each.gco2_per_kwh is not None)
    point = point_gco2_per_kwh
    if is_in_grams and of_best.energy is not None:
        point *= of_best.energy.added_j(work) / J_PER_KWH
    return [
        adds if each.accuracy_pct is None else adds + point * (best - each.accuracy_pct)
        for each, adds in zip(servers, carbon, strict=True)
    ]


def added_carbon(servers: Sequence[Server], work: Work) -> list[float]:
    """Return the figure by which to compare servers, in one unit for all; infinite where intensity is unknown.

    That is what the request adds, gCO2, if the profiles of all servers with known intensity state it; otherwise, since
    known energies do not compare with unknown ones, it is gCO2 per kWh. Negative where the intensity is.
    """
    rates = [each.gco2_per_kwh for each in servers]
    if None in rates and rates.count(None) == len(rates):
        return [inf] * len(rates)
    energy, added_j = None, 0.0
    found: list[float] = []
    for each, rate in zip(servers, rates, strict=True):
        if rate is None:
            found.append(inf)
            continue
        own = each.energy
        if own is None:
            return [inf if each is None else each for each in rates]
        if own != energy:  # servers of one pool mostly have one profile
            energy, added_j = own, own.added_j(work)
        found.append(rate * added_j / J_PER_KWH)
    return found


def choose_server(
    servers: Sequence[S],
    work: Work,
    limit_s: float,
    now_s: float,
    network_s: Mapping[str, float],
    point_gco2_per_kwh: float = 0.0,
) -> S | None:
    """Return the server that adds least carbon among those predicted to be in time, else the first to answer.

    Among equals, the first to answer is taken, and among those the one listed first.

    Args:
        limit_s: How long its answer may still take.
        network_s: Round-trip time to each place, seconds; 0 where none is given.
        point_gco2_per_kwh: Worth of a percentage point of accuracy, see ``with_accuracy``.
    """
    if len(servers) < 2:
        return servers[0] if servers else None
    carbon = added_carbon(servers, work)
    if point_gco2_per_kwh:
        carbon = with_accuracy(servers, work, carbon, point_gco2_per_kwh)
    away_s = [network_s.get(each.location, 0.0) for each in servers] if network_s else [0.0] * len(servers)
    all_costs = [each.costs for each in servers]
    read_s = even([each.read_s for each in all_costs])
    token_s = even([each.token_s for each in all_costs])
    may_be_cached = bool(work.blocks) or work.session is not None
    place_s = [pace_s / each.limit for each, pace_s in zip(servers, token_s, strict=True)]
    full_s = [costs.load_tokens * s for costs, s in zip(all_costs, place_s, strict=True)]  # of work held, per place
    spare, least_s = BALANCE_REQUESTS * work.tokens, dict[tuple[float, float], float]()
    most, is_in_time = inf, False
    best_s, best = inf, -1
    order = sorted(range(len(servers)), key=carbon.__getitem__)
    floors_s = dict[float, list[float]]()  # by distance: the least full that is no farther, up to each place in order
    for at in order:  # the cleanest first
        adds, away = carbon[at], away_s[at]
        if adds > most:
            break
        floor_s = least_s.get((adds, away))
        if floor_s is None:
            if not least_s:  # mostly, no other is looked at
                floor_s = min([s for s, c, d in zip(full_s, carbon, away_s, strict=True) if c <= adds and d <= away])
            else:
                if away not in floors_s:
                    near_s = [full_s[other] if away_s[other] <= away else inf for other in order]
                    floors_s[away] = [*accumulate(near_s, min)]
                floor_s = floors_s[away][bisect_right(order, adds, key=carbon.__getitem__) - 1]
            least_s[adds, away] = floor_s = (1.0 + BALANCE_SHARE) * floor_s
        if full_s[at] > floor_s + spare * place_s[at]:
            continue  # much fuller than one that is no dirtier and no farther
        costs = all_costs[at]
        cached = costs.cached_tokens(work) if may_be_cached else 0
        own_s = end_s = away + costs.end_s(work, now_s, cached)
        if read_s[at] != costs.read_s or token_s[at] != costs.token_s:
            end_s = away + costs.end_s(work, now_s, cached, read_s[at], token_s[at])
        if own_s <= limit_s:
            if not is_in_time:
                is_in_time, best_s, best = True, inf, -1
                most = adds + ALIKE * abs(adds) if adds < inf else inf
        elif is_in_time:
            continue
        if end_s < best_s or best < 0 or (end_s == best_s and at < best):
            best_s, best = end_s, at
    return servers[best]


def even(paces_s: Sequence[float]) -> Sequence[float]:
    """Return the servers' times, with those that are about as fast as the fastest set equal to it."""
    fastest = min(paces_s)
    most = (1.0 + ALIKE_PACE) * fastest
    return [fastest if each <= most else each for each in paces_s]
