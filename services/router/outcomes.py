"""What the router does with a request that was answered: it learns, counts and reports."""

import time

from services.core.domain.serving import SLO_LATENCIES
from services.router.expectations import Expectations
from services.router.fleet import Server
from services.router.latency import LatencyReporter
from services.router.metrics import Metrics
from services.router.streams import Footprint
from services.router.turn import Tokens, Turn
from services.router.usage import UsageReporter


class Outcomes:
    """Learns from answers, counts and reports them."""

    def __init__(
        self, expectations: Expectations, metrics: Metrics, latency: LatencyReporter, usage: UsageReporter
    ) -> None:
        self.latency = latency
        self._expectations = expectations
        self._metrics = metrics
        self._usage = usage

    def learn(self, turn: Turn, server: Server, now_s: float, tokens: Tokens) -> None:
        """Learn from a complete answer."""
        expected, output_tokens = turn.expected, tokens.output
        e2e_s = now_s - turn.received.at_s
        served_s = e2e_s - turn.wait_s
        self.latency.end(server.id, expected.request_class, e2e_s, output_tokens)
        if turn.place is not None:
            away_s = min(server.origin.connect_s or 0.0, served_s)
            first_s = max(turn.first_s - turn.wait_s - away_s, 0.0) if turn.first_s else None
            choices = turn.received.asked.choices
            server.costs.learn(turn.place, first_s, served_s - away_s, output_tokens / choices)
        turn.lane.served_s += 0.05 * (served_s - turn.lane.served_s)
        answer_tokens = max(1, output_tokens // turn.received.asked.choices) if output_tokens else 0
        self._expectations.learn(
            turn.pool.spec.name, expected, tokens.input if tokens.are_stated else None, answer_tokens
        )
        turn.window[0], turn.window[1] = tokens.input, output_tokens
        lat_s = turn.lane.times.latency_s(output_tokens)
        labels = (turn.model, expected.request_class)
        if e2e_s > SLO_LATENCIES * lat_s:
            self._metrics.violations.add(labels)
        if turn.first_s:
            self._metrics.ttft.observe(labels, turn.first_s)
            if output_tokens > 1:
                self._metrics.tbt.observe(labels, (e2e_s - turn.first_s) / (output_tokens - 1))

    def came_at_once(self, turn: Turn, server: Server, now_s: float, tokens: int) -> None:
        """Note how long an answer that was not streamed took, and how many tokens its server says it has.

        An answer of at most one token, such as an embedding, is its own first token.
        """
        e2e_s, request_class = now_s - turn.received.at_s, turn.expected.request_class
        tokens //= turn.received.asked.choices
        if tokens > 1:
            self.latency.whole(server.id, request_class, now_s - e2e_s + turn.wait_s, now_s, tokens)
        else:
            self.latency.first(server.id, request_class, e2e_s, turn.wait_s)

    def end(
        self, turn: Turn, server: Server, status: int, share_s: float, tokens: Tokens, footprint: Footprint
    ) -> None:
        metrics, labels = self._metrics, (turn.model, turn.expected.request_class)
        metrics.requests.add((*labels, str(status)))
        e2e_s = time.monotonic() - turn.received.at_s
        metrics.e2e.observe(labels, e2e_s)
        metrics.wait.observe(labels, turn.wait_s)
        spec = server.origin.authority.decode("latin-1")
        place = (turn.model, turn.received.kind.operation, spec, server.location)
        metrics.gen_ai_duration.observe((*place, "" if status == 200 else str(status)), e2e_s)
        if status == 200:
            if turn.first_s:
                metrics.gen_ai_first.observe(place, turn.first_s)
            metrics.gen_ai_tokens.observe((*place, "input"), tokens.input)
            metrics.gen_ai_tokens.observe((*place, "output"), tokens.output)
            metrics.tokens.add((*labels, "input"), tokens.input)
            metrics.tokens.add((*labels, "output"), tokens.output)
            metrics.estimated.add(labels, not tokens.are_stated)
        else:
            tokens = tokens._replace(input=0)
        if footprint.energy_j is not None:
            metrics.energy.add(labels, footprint.energy_j)
        if footprint.carbon_gco2 is not None:
            metrics.carbon.add(labels, footprint.carbon_gco2)
        turn.received.used_tokens += tokens.input + tokens.output
        request_class = turn.expected.request_class or "any"
        self._usage.served(server, turn.received.key, turn.model, request_class, share_s, tokens, footprint)
