"""Requests through the router's queues, to the instances of the plans, in virtual time.

What decides is the code that is deployed: ``services.core.policies.freesh`` orders requests, chooses instances, plans
pools and sets clocks. What is simulated is the rest: arrivals from a trace, and servers (``servers``).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from lab.serving.accounting import ServedRequests
from lab.serving.plans import HalfHour
from lab.serving.profiled import for_prompts, kv_tokens
from lab.serving.rates import PlaceRates
from lab.serving.requests import BLOCK_TOKENS, RequestTrace
from lab.serving.servers import Seen, SimulatedInstance
from lab.serving.site import ServerKind, Site
from services.core.domain.arrays import Floats, Ints
from services.core.domain.errors import DomainError
from services.core.domain.serving import SLO_LATENCIES, MiadConfig
from services.core.domain.units import J_PER_KWH
from services.core.policies.freesh.clock_model import ClockLearner, ClockSample, learned_clock
from services.core.policies.freesh.dispatch import WeightedRoundRobin
from services.core.policies.freesh.laxity import PREEMPTION_MARGIN_S, Order, ServiceTimes, ServingRequest, preempted_by
from services.core.policies.freesh.miad import miad_clock
from services.core.policies.freesh.request_queue import RequestQueue
from services.core.policies.freesh.server_choice import Given, ServerCosts, Work, choose_server
from services.core.profiles.prefix_cache import PrefixCache

TICK_S = 1.0
"""How often clocks are set. Source: FREESH section 3.2."""
LATEST_S = 7 * 86_400.0
LLAMA_70B_GIB = 131.4
"""Weights of Llama-3-70B: 70.55e9 parameters of 16 bits."""
ANY = "any"
"""The queue of all requests, where nothing tells them apart."""


class Frequency(StrEnum):
    """How clocks are set."""

    FIXED = "fixed"
    MIAD = "miad"
    LEARNED = "learned"


class Placement(StrEnum):
    """Which instance serves a request."""

    WEIGHTS = "weights"
    """Each in proportion to its weight, as in the paper."""
    CARBON = "carbon"
    """That which adds least carbon in time: the router's own choice (``server_choice``)."""


class Prefill(StrEnum):
    """What the time of a prefill depends on."""

    FIXED = "fixed"
    """Nothing: each takes the profile's TTFT."""
    LENGTH = "length"
    """The prompt: one of the mean length of its class in the trace takes the profile's TTFT."""


class ClocksSee(StrEnum):
    """Which times to the first token and to the end clocks are set by."""

    CLIENT = "client"
    """From a request's arrival: waits in the queue raise clocks."""
    SERVER = "server"
    """From the moment at which an instance got it. *Our reading* of the paper, whose energy and TTFT at twice the load
    are nearly those of the simple load."""


@dataclass(frozen=True)
class ServingOptions:
    """What is simulated.

    Attributes:
        order: Of waiting requests.
        frequency: How clocks are set.
        preempt: Whether a waiting request may take the place of one in service (never with FCFS).
        preempt_margin_s: By how much less laxity it must have; the paper has no margin.
        one_queue: Whether all classes wait in one line, whose first holds up all others (only with FCFS); else each
            class has its own.
        clocks_see: Which latencies clocks are set by.
        start_s: How long an instance takes to start after a plan; those that are to leave serve until then.
        classify: Whether requests go to the instances of their class; else any instance takes any request.
        length_mae: Mean absolute error of predicted output lengths, tokens.
        miad: Parameters of MIAD.
        seed: Of the errors of predictions.
        prefill: What a prefill's time depends on.
        kv_kib_per_token: Of an instance's KV cache, KiB; 0: memory is not looked at.
        weights_gib: Of the model, which leaves the rest of the memory to the KV cache.
        late_last: Whether requests that cannot be in time any more wait behind those that can, as in the router.
        latest_s: Requests that have not ended so long after the last arrival are given up; nothing counts after that.
        prefix_cache_tokens: Tokens of prompts that each instance keeps, besides its KV cache; 0 for none. Only prefills
            that depend on the prompt become shorter by it.
        placement: Which instance serves a request.
    """

    order: Order = Order.LLF
    frequency: Frequency = Frequency.MIAD
    preempt: bool = True
    preempt_margin_s: float = PREEMPTION_MARGIN_S
    one_queue: bool = False
    clocks_see: ClocksSee = ClocksSee.CLIENT
    start_s: float = 0.0
    classify: bool = True
    length_mae: float = 0.0
    miad: MiadConfig = field(default_factory=MiadConfig)
    seed: int = 1
    prefill: Prefill = Prefill.FIXED
    kv_kib_per_token: float = 0.0
    weights_gib: float = LLAMA_70B_GIB
    prefix_cache_tokens: int = 0
    placement: Placement = Placement.WEIGHTS
    latest_s: float = LATEST_S
    late_last: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.length_mae < 1e6 or self.seed < 0:
            raise DomainError("the error of predicted lengths (length_mae) and the seed are not negative")
        if self.one_queue and self.order is not Order.FCFS:
            raise DomainError("one queue for all classes (one_queue) is first come, first served")
        if not (0 <= self.start_s <= LATEST_S and 0 <= self.preempt_margin_s <= LATEST_S):
            raise DomainError(f"a start (start_s) and the margin of preemption take between 0 and {LATEST_S:g} s")
        if not 0 <= self.latest_s <= LATEST_S:
            raise DomainError(f"requests are given up between 0 and {LATEST_S:g} s after the last arrival (latest_s)")
        sizes = (self.kv_kib_per_token, self.weights_gib, self.prefix_cache_tokens)
        if not all(0 <= each < 1e12 for each in sizes):
            raise DomainError(
                "the sizes of the weights, of the KV cache per token and of the prefix cache are not negative"
            )
        if self.prefix_cache_tokens and self.prefill is Prefill.FIXED:
            raise DomainError("a prefix cache shortens prefills by length only: say so (prefill), or leave it out")


@dataclass
class Outcome:
    """What a simulation came to.

    Attributes:
        served: Of all requests that ended.
        request_class: (n_served,) the class by which each was served.
        dispatched_s: (n_served,) when each was first given to an instance.
        longest_gap_s: (n_served,) the longest time without a token that a preemption cost, after the first token.
        unserved: Requests that did not end.
        energy_j, carbon_g: Of all instances, starts included.
        preemptions: How often a request lost its place.
        clock_mhz: Mean over instances and time.
        ends_s: When the last request ended, or the trace.
        cached_tokens: Tokens of prompts that were in a prefix cache.
        read_tokens: Tokens of prompts in all, those read again after a preemption too.
        waited_for_memory: Requests that waited although an instance had a place, for want of memory.
    """

    served: ServedRequests
    request_class: Ints
    dispatched_s: Floats
    longest_gap_s: Floats
    unserved: int
    energy_j: float
    carbon_g: float
    preemptions: int
    clock_mhz: float
    ends_s: float
    cached_tokens: int = 0
    read_tokens: int = 0
    waited_for_memory: int = 0


@dataclass
class _ClassPool:
    """The instances that serve one class, and the requests that wait for them."""

    queue: RequestQueue
    instances: list[SimulatedInstance] = field(default_factory=list[SimulatedInstance])
    turns: WeightedRoundRobin = field(default_factory=WeightedRoundRobin)


PREFILLED, ENDED = 0, 1
_Event = tuple[float, int, int, SimulatedInstance, int]
"""Time, sequence number, kind, instance, and the request or the instance's version."""


def predicted_lengths(output_tokens: Ints, mae: float, seed: int) -> Floats:
    """Return output lengths as a predictor of that mean absolute error would give them: (n_requests,), at least 1.

    *Our reading* of the paper's classifier (MAE 110 tokens): errors are Laplace distributed and do not depend on the
    length. Cutting them off at one token makes the error of short answers smaller, and all of them slightly too long.
    """
    error = np.random.default_rng(seed).laplace(0.0, mae, output_tokens.size) if mae > 0 else 0.0
    return np.maximum(output_tokens + error, 1.0)


class ServingSimulation:
    """One run.

    Args:
        site: The pool.
        rates: Of its places, from the simulation's start.
        trace: The requests.
        plans: The half hours, the first from 0 s.
        options: How.
    """

    def __init__(
        self, site: Site, rates: PlaceRates, trace: RequestTrace, plans: Sequence[HalfHour], options: ServingOptions
    ) -> None:
        self._site, self._rates, self._trace, self._plans, self._options = site, rates, trace, plans, options
        self._places = {place.name: at for at, place in enumerate(site.spec.places)}
        n = len(trace)
        self._arrival_s = trace.arrival_s.tolist()
        self._tokens: list[int] = trace.output_tokens.tolist()
        self._predicted = predicted_lengths(trace.output_tokens, options.length_mae, options.seed)
        self._classes = self._classify([plan.partition for plan in plans])
        self._first_s, self._finish_s, self._sent_s = np.full(n, np.nan), np.full(n, np.nan), np.full(n, np.nan)
        self._latency_s, self._class = np.full(n, np.nan), np.zeros(n, np.int64)
        self._lost_s, self._gap_s = np.full(n, np.nan), np.zeros(n)
        self._requests: dict[int, ServingRequest] = {}
        self._instances: list[SimulatedInstance] = []
        self._numbers, self._sequence = itertools.count(), itertools.count()
        self._pools: dict[str, _ClassPool] = {}
        self._learners: dict[tuple[str, str, str | None], ClockLearner] = {}
        self._events: list[_Event] = []
        self._partition = plans[0].partition
        self._preemptions = 0
        self._preempts = options.preempt and options.order is not Order.FCFS
        self._open = n
        self._energy_j = self._carbon_g = self._clock_mhz_s = self._up_s = 0.0
        self._current: list[float] = []
        self._kinds: dict[tuple[str, str | None, str], ServerKind] = {}
        self._cached_tokens = self._read_tokens = 0
        self._waited_for_memory: set[int] = set()
        self._given: dict[int, Given] = {}
        self._starting: list[tuple[float, list[SimulatedInstance], list[SimulatedInstance]]] = []

    def run(self) -> Outcome:
        """Run to the last request's end, and return what it came to."""
        horizon_s = self._trace.length_s
        ticks = self._options.frequency is not Frequency.FIXED or self._preempts
        plans, n, arrived = list(self._plans), len(self._trace), 0
        next_tick = TICK_S if ticks else np.inf
        next_rate, rate_step = 0.0, 0
        now = 0.0
        while self._open or now < horizon_s:
            arrival = self._arrival_s[arrived] if arrived < n else np.inf
            event = self._events[0][0] if self._events else np.inf
            plan = plans[0].from_s if plans else np.inf
            started = self._starting[0][0] if self._starting else np.inf
            now = min(arrival, event, plan, started, next_tick, next_rate)
            if not self._open and now > horizon_s:
                now = horizon_s
                break
            if now > horizon_s + self._options.latest_s:
                now = horizon_s + self._options.latest_s
                break
            if next_rate <= now:
                self._set_rates(now, rate_step)
                rate_step, next_rate = rate_step + 1, next_rate + self._rates.step_s
            elif started <= now:
                self._has_started(now)
            elif plan <= now:
                self._apply(plans.pop(0), now)
            elif event <= now:
                self._happens(heapq.heappop(self._events))
            elif arrival <= now:
                self._arrives(arrived, now)
                arrived += 1
            else:
                self._tick(now)
                next_tick += TICK_S
        for instance in self._instances:
            self._retire(instance, now)
        return self._outcome(now)

    def _classify(self, partitions: Iterable[str]) -> dict[str, list[str]]:
        """Return each request's predicted class by partition."""
        lengths = np.round(self._predicted).astype(np.int64)
        found: dict[str, list[str]] = {}
        for partition in dict.fromkeys(partitions):
            names = self._site.class_names(partition)
            of = self._site.classes_of(partition, self._trace.input_tokens, lengths)
            found[partition] = [names[at] for at in of.tolist()]
        return found

    def _set_rates(self, now: float, step: int) -> None:
        current = self._rates.of_steps(step, 1)[:, 0].tolist()
        self._current = current
        for instance in self._instances:
            instance.advance(now)
            instance.rate = current[instance.place]

    def _apply(self, plan: HalfHour, now: float) -> None:
        """Start and drain instances as planned; one of a planned place and mode stays, whatever class it served."""
        for instance in self._instances:
            instance.advance(now)
        if self._starting:
            self._has_started(now)  # what was begun for the last plan is part of what this one changes
        left = [each for each in self._instances if not each.is_leaving]
        wanted = [
            (self._places[each.place], each.mode, each.request_class)
            for each in plan.instances
            for _ in range(each.count)
        ]
        same_partition = plan.partition == self._partition
        kept: list[tuple[SimulatedInstance, str | None]] = []
        for exactly in (True, False):
            rest: list[tuple[int, str, str | None]] = []
            for place, mode, name in wanted:
                found = next(
                    (
                        each
                        for each in left
                        if (each.place, each.mode) == (place, mode)
                        and (not exactly or (same_partition and each.request_class == name))
                    ),
                    None,
                )
                if found is None:
                    rest.append((place, mode, name))
                else:
                    left.remove(found)
                    kept.append((found, name))
            wanted = rest
        self._partition = plan.partition
        for instance, name in kept:
            self._serve(instance, name)
        started = [self._start(place, mode, name, now) for place, mode, name in wanted]
        if started and now > 0 and self._options.start_s:
            for instance in started:
                instance.is_leaving = True  # nothing is sent there yet
            self._starting = [(now + self._options.start_s, started, left)]
            self._form_pools(now)
        else:
            self._leave(left, now)

    def _has_started(self, now: float) -> None:
        """Have the instances of the last plan serve, and those leave that it has none of."""
        ((_, started, left),) = self._starting
        self._starting = []
        for instance in started:
            instance.is_leaving = False
        self._leave(left, now)

    def _leave(self, left: Sequence[SimulatedInstance], now: float) -> None:
        for instance in left:
            instance.is_leaving = True
        self._instances = [each for each in self._instances if not self._is_gone(each, now)]
        self._form_pools(now)

    def _start(self, place: int, mode: str, name: str | None, now: float) -> SimulatedInstance:
        kind = self._kind(name, mode)
        instance = SimulatedInstance(
            str(next(self._numbers)), place, mode, kind, name, self._current[place], kind.clocks.highest, now
        )
        times, cache = kind.times, PrefixCache(self._options.prefix_cache_tokens, BLOCK_TOKENS)
        instance.costs = ServerCosts(times.ttft_s, times.tbt_s, kind.server.capacity, cache)
        if now > 0:
            instance.energy_j = kind.start_j
            instance.carbon_g = kind.start_j * instance.rate / J_PER_KWH
        self._instances.append(instance)
        return instance

    def _serve(self, instance: SimulatedInstance, name: str | None) -> None:
        instance.request_class, instance.kind = name, self._kind(name, instance.mode)
        instance.changed()
        self._expect_end(instance)

    def _kind(self, name: str | None, mode: str) -> ServerKind:
        """Return the kind of a class and mode; of instances kept without a class, that of any class of the mode."""
        key = self._partition, name, mode
        if key not in self._kinds:
            self._kinds[key] = self._made_kind(name, mode)
        return self._kinds[key]

    def _made_kind(self, name: str | None, mode: str) -> ServerKind:
        if name is None:
            part = self._site.partition(self._partition)
            names = (each.name for each in part.classes for profile in each.profiles if profile.mode == mode)
            name = next(names)
        kind, options = self._site.kind(self._partition, name, mode), self._options
        server = kind.server
        if options.prefill is Prefill.LENGTH:
            of_class = [each == name for each in self._classes[self._partition]]
            lengths = self._trace.input_tokens[of_class] if any(of_class) else self._trace.input_tokens
            server = for_prompts(server, float(lengths.mean()))
        if options.kv_kib_per_token:
            server = replace(server, kv_tokens=self._kv_tokens(mode))
        return kind if server is kind.server else replace(kind, server=server)

    def _kv_tokens(self, mode: str) -> float:
        options = self._options
        try:
            return kv_tokens(self._site.memory_gib(mode), options.weights_gib, options.kv_kib_per_token)
        except DomainError as error:
            raise DomainError(f"mode {mode}: {error}") from None

    def _form_pools(self, now: float) -> None:
        """Give each class the instances that serve it, and its waiting requests."""
        waiting = [request for pool in self._pools.values() for request in pool.queue]
        staying = [each for each in self._instances if not each.is_leaving]
        serving = [each for each in staying if each.request_class is not None] or staying
        names = self._site.class_names(self._partition) if self._options.classify else [ANY]
        pools: dict[str, _ClassPool] = {}
        for name in names:
            own = [each for each in serving if name in (each.request_class, ANY)] or serving
            pools[name] = _ClassPool(self.new_queue(_times_of(own)), own)
        self._pools = pools
        for request in waiting:
            self._pool_of(int(request.id)).queue.requeue(request)
        for pool in pools.values():
            self._dispatch(pool, now)

    def new_queue(self, times: ServiceTimes) -> RequestQueue:
        """Return an empty queue for the requests of a class whose servers have these times."""
        return RequestQueue(self._options.order, times)

    def _pool_of(self, request: int) -> _ClassPool:
        return self._pools[self._classes[self._partition][request] if self._options.classify else ANY]

    def _arrives(self, index: int, now: float) -> None:
        request = ServingRequest(str(index), now, float(self._predicted[index]))
        pool = self._pool_of(index)
        if self._options.late_last:
            request.due_s = self._due_s(pool, request)
        pool.queue.push(request)
        self._dispatch(pool, now)
        if self._preempts and pool.queue.peek(now_s=now) is request:
            self._preempt(pool, now)

    def _dispatch(self, pool: _ClassPool, now: float) -> None:
        while (head := pool.queue.peek(now_s=now)) is not None:
            if self._options.one_queue:
                pool, head = self._oldest(now)
            if not any(each.has_room for each in pool.instances):
                return
            index = int(head.id)
            tokens = self._kv_need(index)
            if self._options.placement is Placement.CARBON:
                instance = self._cleanest_in_time(pool, head, tokens, now)
            else:
                chosen = pool.turns.choose([each.load(tokens) for each in pool.instances if not each.is_leaving])
                instance = next((each for each in pool.instances if chosen and each.id == chosen.id), None)
            if instance is None:
                self._waited_for_memory.add(index)
                return
            pool.queue.remove(head.id)
            self._send(head, instance, now)

    def _oldest(self, now: float) -> tuple[_ClassPool, ServingRequest]:
        """Return the request that has waited longest in any class, and its class's pool; one must wait."""
        heads = [(head, pool) for pool in self._pools.values() if (head := pool.queue.peek(now_s=now)) is not None]
        head, pool = min(heads, key=lambda each: (each[0].arrival_s, int(each[0].id)))
        return pool, head

    def _kv_need(self, index: int) -> int:
        """Return the tokens of a request, prompt and answer."""
        return int(self._trace.input_tokens[index]) + self._tokens[index] if self._options.kv_kib_per_token else 0

    def _cleanest_in_time(
        self, pool: _ClassPool, request: ServingRequest, tokens: int, now: float
    ) -> SimulatedInstance | None:
        """Return the instance that the router would choose."""
        free = [each for each in pool.instances if each.has_room and each.has_memory(tokens)]
        if not free:
            return None
        return choose_server(free, self._work(int(request.id)), self._due_s(pool, request) - now, now, {})

    def _due_s(self, pool: _ClassPool, request: ServingRequest) -> float:
        """Return when a request is due: by its class's limit, else by ``5 * Lat``, as in the router."""
        promised_s = pool.instances[0].kind.limits.e2e_s
        return request.arrival_s + (
            SLO_LATENCIES * pool.queue.times.latency_s(request.output_tokens) if promised_s is None else promised_s
        )

    def _work(self, index: int) -> Work:
        """Return a request as instances are compared for it."""
        blocks = self._trace.blocks[index] if self._trace.blocks else ()
        tokens = int(self._trace.input_tokens[index]), float(self._predicted[index])
        return Work(*tokens, blocks, block_tokens=BLOCK_TOKENS)

    def _send(self, request: ServingRequest, instance: SimulatedInstance, now: float) -> None:
        index = int(request.id)
        self._requests[index] = request
        if np.isnan(self._sent_s[index]):
            self._sent_s[index] = now
        self._class[index] = self._class_number(index)
        self._latency_s[index] = instance.kind.times.latency_s(self._tokens[index])
        instance.advance(now)
        instance.prefilling += 1
        instance.kv_held += self._kv_need(index)
        if instance.held == 1:
            instance.changed()
        prompt = int(self._trace.input_tokens[index])
        given = self._given[index] = instance.costs.begin(self._work(index), now)
        cached = given.cached_tokens
        self._read_tokens += prompt
        self._cached_tokens += cached
        prefill_s = instance.kind.server.prefill_s(prompt - cached + request.tokens_done, instance.clock_mhz)
        heapq.heappush(self._events, (now + prefill_s, next(self._sequence), PREFILLED, instance, index))

    def _class_number(self, index: int) -> int:
        names = self._site.class_names(self._partition)
        return names.index(self._classes[self._partition][index])

    def _preempt(self, pool: _ClassPool, now: float) -> None:
        """Let the first that wait take the places of the last of those in service, as far as they come before them.

        *Our reading* of when: at every tick, as in algorithm 1, and when a request arrives that is the first at once.
        """
        running: dict[str, SimulatedInstance] = {}
        for instance in pool.instances:
            instance.advance(now)
            for index in instance.members:
                request = self._requests[index]
                request.tokens_done = self._tokens[index] - instance.lacks(index)
                running[request.id] = instance
        while (head := pool.queue.peek(now_s=now)) is not None and not head.is_late:
            candidates = (self._requests[int(each)] for each in running)
            options, times = self._options, pool.queue.times
            victim = preempted_by(head, candidates, options.order, times, margin_s=options.preempt_margin_s)
            if victim is None:
                return
            instance = running[victim.id]
            freed = self._kv_need(int(victim.id))
            if not instance.kind.server.has_memory(instance.kv_held - freed, self._kv_need(int(head.id))):
                return
            del running[victim.id]
            lacking = instance.leave(int(victim.id))
            instance.costs.end(self._given.pop(int(victim.id)))
            instance.kv_held -= freed
            victim.tokens_done = float(int(self._tokens[int(victim.id)] - lacking))
            self._preemptions += 1
            self._lost_s[int(victim.id)] = now
            pool.queue.remove(head.id)
            pool.queue.requeue(victim)
            self._send(head, instance, now)
            self._expect_end(instance)

    def _happens(self, event: _Event) -> None:
        now, _, kind, instance, what = event
        if kind == ENDED:
            if what != instance.version:
                return
            instance.advance(now)
            ended = instance.ended()
        else:
            instance.advance(now)
            instance.prefilling -= 1
            ended = self._first_token(instance, what, now)
        for index in ended:
            self._end(instance, index, now)
            instance.kv_held -= self._kv_need(index)
        self._expect_end(instance)
        if not ended:
            return
        if self._is_gone(instance, now):
            self._instances.remove(instance)
            return
        for pool in self._pools.values():
            if instance in pool.instances:
                self._dispatch(pool, now)

    def _first_token(self, instance: SimulatedInstance, index: int, now: float) -> list[int]:
        """Let a prefilled request decode; return it if its only token is there already."""
        request = self._requests[index]
        instance.costs.has_read(self._given[index], now)
        if np.isnan(self._first_s[index]):
            self._first_s[index] = now
            instance.seen.ttft_s += now - self._seen_from_s(request)
            instance.seen.queued_s += self._sent_s[index] - request.arrival_s
            instance.seen.first_tokens += 1
        else:
            self._gap_s[index] = max(self._gap_s[index], now - self._lost_s[index])
        left = self._tokens[index] - request.tokens_done - 1
        if left <= 0:
            instance.changed()
            return [index]
        instance.join(index, left)
        return []

    def _seen_from_s(self, request: ServingRequest) -> float:
        """Return from when on the latencies of a request count for clocks."""
        is_server = self._options.clocks_see is ClocksSee.SERVER
        return float(self._sent_s[int(request.id)]) if is_server else request.arrival_s

    def _end(self, instance: SimulatedInstance, index: int, now: float) -> None:
        request = self._requests.pop(index)
        self._finish_s[index] = now
        self._open -= 1
        given = self._given.pop(index)
        instance.costs.learn(given, None, now - given.at_s, self._tokens[index])
        instance.costs.end(given)
        seen = instance.seen
        seen.e2e_s += now - self._seen_from_s(request)
        seen.ended += 1
        seen.ended_tokens += self._tokens[index]

    def _expect_end(self, instance: SimulatedInstance) -> None:
        at_s = instance.next_end_s()
        if at_s is not None:
            heapq.heappush(self._events, (at_s, next(self._sequence), ENDED, instance, instance.version))

    def _tick(self, now: float) -> None:
        if self._preempts:
            for pool in self._pools.values():
                if len(pool.queue):
                    self._preempt(pool, now)
        if self._options.frequency is not Frequency.FIXED:
            self._set_clocks(now)

    def _set_clocks(self, now: float) -> None:
        for instance in self._instances:
            seen, kind = instance.seen, instance.kind
            if not instance.held and not seen.ended and instance.clock_mhz == kind.clocks.lowest:
                continue
            instance.advance(now)
            clock = self._next_clock(instance)
            instance.seen = Seen()
            if clock != instance.clock_mhz:
                instance.clock_mhz = clock
                instance.changed()
                self._expect_end(instance)

    def _next_clock(self, instance: SimulatedInstance) -> float:
        seen, kind, options = instance.seen, instance.kind, self._options
        report = seen.report(instance.held)
        if options.frequency is Frequency.MIAD:
            return miad_clock(instance.clock_mhz, report, kind.limits, kind.clocks, options.miad)
        key = (self._partition, instance.mode, instance.request_class)
        learner = self._learners.setdefault(key, ClockLearner())
        sample = ClockSample(
            clock_mhz=instance.clock_mhz,
            batch=seen.batch_s / seen.busy_s if seen.busy_s > 0 else 0.0,
            report=report,
            power_w=instance.power_w,
            queued_s=seen.queued_s / seen.first_tokens if seen.first_tokens else 0.0,
            tokens_per_request=seen.ended_tokens / seen.ended if seen.ended else None,
            tokens_per_s=seen.tokens / TICK_S,
            busy_share=min(seen.busy_s / TICK_S, 1.0),
        )
        learner.add(sample)
        idle_w = kind.server.power_w(kind.clocks.lowest, is_busy=False)
        return learned_clock(
            learner, sample, kind.limits, kind.clocks, kind.server.capacity, idle_w=idle_w, config=options.miad
        )

    def _is_gone(self, instance: SimulatedInstance, now: float) -> bool:
        if not instance.is_leaving or instance.held:
            return False
        self._retire(instance, now)
        return True

    def _retire(self, instance: SimulatedInstance, now: float) -> None:
        """Count what an instance took."""
        instance.advance(now)
        self._energy_j += instance.energy_j
        self._carbon_g += instance.carbon_g
        self._clock_mhz_s += instance.clock_mhz_s
        self._up_s += instance.up_s

    def _outcome(self, now: float) -> Outcome:
        done = np.isfinite(self._finish_s)
        return Outcome(
            served=ServedRequests(
                self._trace.arrival_s[done],
                self._first_s[done],
                self._finish_s[done],
                self._trace.output_tokens[done],
                self._latency_s[done],
            ),
            request_class=self._class[done],
            dispatched_s=self._sent_s[done],
            longest_gap_s=self._gap_s[done],
            unserved=int((~done).sum()),
            energy_j=self._energy_j,
            carbon_g=self._carbon_g,
            preemptions=self._preemptions,
            clock_mhz=self._clock_mhz_s / self._up_s if self._up_s else float("nan"),
            ends_s=now,
            cached_tokens=self._cached_tokens,
            read_tokens=self._read_tokens,
            waited_for_memory=len(self._waited_for_memory),
        )


def _times_of(instances: Sequence[SimulatedInstance]) -> ServiceTimes:
    """Return the times of a class's instances, weighted by what they serve."""
    total = sum(each.kind.weight for each in instances)

    def mean(values: Mapping[SimulatedInstance, float]) -> float:
        return sum(each.kind.weight * value for each, value in values.items()) / total

    return ServiceTimes(
        mean({each: each.kind.times.ttft_s for each in instances}),
        mean({each: each.kind.times.tbt_s for each in instances}),
    )
