"""A request's way to a server that answers it: its pool and lane, then other servers and models if that one fails."""

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from services.core.policies.freesh.laxity import Order, ServingRequest
from services.core.policies.freesh.server_choice import Work
from services.kit.logging import Log
from services.router.answers import AnswerPasser, passes_as_it_comes
from services.router.expectations import Expectations
from services.router.fleet import Extra, Fleet, Pool, Server
from services.router.gate import KeyRules
from services.router.lanes import Lanes, NoServerError, NoSpareError, QueueFullError, Ticket
from services.router.metrics import Metrics
from services.router.openai import DoorError
from services.router.outgoing import RequestWriter
from services.router.reports import unreported
from services.router.settings import RouterSettings
from services.router.stored_answers import StoredAnswers
from services.router.turn import Received, Turn
from services.router.upstream import NOT_ITS_FAULT, Connection, Limits, UpstreamError
from services.router.upstream_keys import UpstreamKeys

log = Log(__name__)

BUSY = frozenset({429, 502, 503, 504})
"""Statuses of a server that has not worked on the request: another server is asked."""
REFUSED = frozenset({400, 422})  #: Statuses of a request that a server does not take as it is
HUNG_TIMES = 5.0
"""A server is thought to hang once its first token takes this many times as long as was predicted."""
REGION, SESSION = b"x-wattshift-region", b"x-session-id"


@dataclass
class Dispatcher:
    """Gets requests answered."""

    settings: RouterSettings
    fleet: Fleet
    lanes: Lanes
    rules: KeyRules
    expectations: Expectations
    keys: UpstreamKeys
    writer: RequestWriter
    answers: AnswerPasser
    stored: StoredAnswers
    metrics: Metrics
    arrived: Callable[[Pool, float, int, float], Callable[[int, int], None]]  #: Counts a request for the planner
    limits: Limits  #: Bound a request's time

    def __post_init__(self) -> None:
        self._ids = itertools.count()
        self._network_s = {
            region.encode("latin-1", "replace"): {place: ms / 1e3 for place, ms in places.items()}
            for region, places in self.settings.network_ms.items()
        }
        self._usual_network_s: dict[str, float] = self._network_s.get(b"default", {})

    async def serve(self, received: Received, pool: Pool) -> None:
        """Have a request answered by the pool of its model, or by those of the fallback models in turn.

        Raises:
            DoorError: None of them answered. Nothing has been sent to the client.
        """
        asked, identity = received.asked, received.key.identity
        failure: DoorError | None = None
        report: Callable[[int, int], None] | None = None
        is_final = False
        pools = [(asked.model, pool)]
        if received.spare is None:
            pools += [
                (model, each)
                for model in pool.spec.fallback
                if received.key.key_limits.may_name(model) and (each := self.fleet.pool_of(model, identity))
            ]
        for at, (model, known) in enumerate(pools):
            # By the newest table: the servers of the model before this one may have taken long to fail.
            current = self.fleet.pools.get(known.spec.name) or Pool(known.spec)
            expected = self.expectations.of(received.kind, asked, current, model, identity.key_id)
            arrived = current, received.at_utc_s, expected.input_tokens, expected.output_tokens
            if report is None:
                self.rules.take_tokens(received, expected.input_tokens + round(expected.output_tokens * asked.choices))
                # pools are planned for others than those that only get what they leave
                report = self.arrived(*arrived) if received.spare is None else unreported
            lane = self.lanes.of(current, expected.request_class)
            turn = Turn(received, model, current, lane, expected, report)
            try:
                await self._in_lane(turn, at == len(pools) - 1)
            except asyncio.CancelledError:
                if turn.place is None:  # its client left the queue
                    self.metrics.requests.add((model, expected.request_class, "499"))
                raise
            except NoServerError as error:
                if received.spare is not None:
                    self.arrived(*arrived)  # a pool without instances wants one
                least = f" with an accuracy of {least_pct:g} %" if (least_pct := received.least_accuracy_pct) else ""
                detail = f"No server of the model {model}{least} is ready{_why(error.starting)}."
                failure = DoorError(503, "no_server", detail, retry_after_s=5)
            except QueueFullError as full:
                detail = f"Too many requests wait for the model {model}."
                failure = DoorError(429, "queue_full", detail, retry_after_s=full.retry_after_s)
            except DoorError as unknown:
                failure = unknown
            except NoSpareError:
                detail = f"Others leave no room for the model {model} now."
                failure = DoorError(429, "resource_unavailable", detail, retry_after_s=2)
            except UpstreamError as error:
                if received.exchange.has_begun:
                    return  # the stream ended with an error
                failure = _of_upstream(error)
                is_final = not (error.may_repeat or received.asked.may_repeat)
            else:
                return
            self.metrics.requests.add((model, expected.request_class, str(failure.status)))
            if is_final:
                break  # a server may have done what may not be done twice
        assert failure is not None
        raise failure

    async def _in_lane(self, turn: Turn, waits_for_first: bool) -> None:
        """Send a request to a server of its lane, or to another one if that fails before its answer begins.

        If the pool has none and ``waits_for_first`` is set, the request waits for a first one, for as long as its class
        is promised.
        """
        received, lane, expected = turn.received, turn.lane, turn.expected
        request = ServingRequest(
            f"r{next(self._ids)}",
            received.at_s,
            expected.output_tokens * received.asked.choices,
            expected.input_tokens,
            0.0,
            expected.request_class,
            received.key.identity.tenant_id,
        )
        promised_s = turn.pool.promised_s.get(expected.request_class)
        limit_s = lane.limit_s(request, promised_s)
        if self.settings.order is not Order.FCFS:
            request.due_s = received.at_s + limit_s
        session = received.exchange.headers.get(SESSION) or received.asked.session
        ticket = Ticket(
            request,
            limit_s,
            self._network_s.get(received.exchange.headers.get(REGION, b""), self._usual_network_s),
            Work(
                expected.input_tokens,
                request.output_tokens,
                expected.blocks,
                hash(session) if session else None,  # servers' sessions are kept, and a name may be long
                None if turn.model == turn.pool.spec.models[0] else turn.model,
                expected.block_tokens,
            ),
            (turn.model, received.key.identity),
            turn.pool.is_mixed,
            received.asked.may_repeat,
            least_accuracy_pct=received.least_accuracy_pct,
            only_at=self.stored.server_of(received.asked.fields, turn.pool.servers, received.key.identity.tenant_id),
            among=None if received.carrier is None else received.carrier.reaches,
        )
        timeout_s = self.settings.queue_timeout_s
        first_s = timeout_s if promised_s is None else promised_s
        until_s = received.at_s + received.spare.patience_s if received.spare is not None else 0.0

        async def take(first_s: float = 0.0, *, again: bool = False) -> Server:
            if received.spare is None:
                return await (lane.take_again(ticket, timeout_s) if again else lane.take(ticket, timeout_s, first_s))
            server = await lane.take_spare(ticket, until_s, received.spare.places)
            received.at_s = time.monotonic()
            return server

        server = await take(first_s if waits_for_first else 0.0)
        failure: UpstreamError | None = None
        while True:
            turn.wait_s = time.monotonic() - received.at_s
            try:
                return await self._ask(turn, ticket, server)
            except UpstreamError as error:
                if received.exchange.has_begun:
                    raise
                failure, turn.place = error, None
            if failure.reason == "preempted":
                self.metrics.preemptions.add((turn.model, expected.request_class))
                server = await take(again=True)
                continue
            request.excluded |= {server.id}
            may_repeat = failure.may_repeat or (received.asked.may_repeat and failure.reason in ("closed", "hung"))
            if not may_repeat or ticket.failures >= self.settings.attempts:
                raise failure
            try:
                server = await take()
            except (NoServerError, NoSpareError):
                raise failure from None

    async def _ask(self, turn: Turn, ticket: Ticket, server: Server) -> None:
        """Send a request to the server it was given, and pass on the answer; the server is given back in any case.

        Raises:
            UpstreamError: It failed; the server's breaker has been told.
        """
        lane, received = turn.lane, turn.received
        turn.place = ticket.place
        connection: Connection | None = None
        share_s: float | None = None

        def give_back() -> float:
            nonlocal share_s
            if share_s is None:
                share_s = lane.leave(ticket, server)
                self.lanes.room_at(server)  # its client may take a while to read
            return share_s

        try:
            if self.keys.is_wanted(server):
                await self.keys.renew((server,))
            refused: list[Extra] = []
            while True:
                if received.carrier is None:
                    connection = await server.origin.connection(self.limits)
                else:
                    connection = received.carrier.connection(server)
                ticket.connection = connection
                if ticket.is_preempted:
                    raise UpstreamError("preempted", "A more urgent request took its place.", may_repeat=True)
                connection.send(self.writer.write(turn, ticket, server))
                if self._may_be_asked_of_others(turn, ticket, server):
                    predicted_s = ticket.place.first_s if ticket.place is not None else 0.0
                    least_s = self.settings.stream_first_byte_timeout_s
                    connection.limit_first(max(least_s, HUNG_TIMES * predicted_s))
                await connection.head()
                if connection.status not in REFUSED or not turn.extras:
                    break
                refused.append(turn.extras[0])  # perhaps: it is asked without that
                server.refused(refused[-1], time.monotonic())
                if received.carrier is not None:
                    refused.clear()  # it is sent once: without what was refused when its client asks again
                    break
                await connection.whole(self.settings.max_answer_bytes)
                ticket.connection = None
                connection.release()
                connection = None
            if connection.status in REFUSED:
                for extra in refused:
                    server.takes(extra)
            if connection.status in BUSY:
                reason = "rate_limited" if connection.status == 429 else "busy"
                after = next((value for name, value in connection.headers if name == b"retry-after"), b"")
                after_s = float(after) if after.isdigit() and len(after) < 6 else None
                detail = f"The server answered {connection.status}."
                raise UpstreamError(reason, detail, may_repeat=True, retry_after_s=after_s)
            spec = server.spec
            if connection.status == 401 and (spec.pool is None or spec.upstream_secret_set_at is not None):
                raise UpstreamError("key_refused", "The server refused the key that it is sent.", may_repeat=True)
            lane.answered(ticket)
            status, connection.on_over = connection.status, give_back
            if passes_as_it_comes(turn, connection):
                status = await self.answers.stream(turn, ticket, server, connection, give_back)
            else:
                status = await self.answers.whole(turn, server, connection, give_back)
            if status >= 500:
                server.breaker.failed(time.monotonic(), ticket)
            else:
                server.breaker.succeeded()
        except UpstreamError as error:
            error.may_repeat &= received.carrier is None or not received.carrier.has_told
            self._note_failure(ticket, server, error)
            raise
        except asyncio.CancelledError:
            if not turn.is_charged:  # also of an answer that had come, and was not read yet
                self.answers.left(turn, server, give_back())
            raise
        finally:
            if share_s is None:
                lane.leave(ticket, server)
            if connection is not None:
                connection.release()
            server.breaker.abandoned(ticket)
            self.lanes.room_at(server)

    def _may_be_asked_of_others(self, turn: Turn, ticket: Ticket, server: Server) -> bool:
        """Whether a stream that its server does not begin may be requested from another one."""
        asked, tried = turn.received.asked, ticket.failures + 1
        is_free_to = asked.is_stream and asked.may_repeat and tried < self.settings.attempts
        return is_free_to and turn.lane.has_other(ticket, server)

    def _note_failure(self, ticket: Ticket, server: Server, error: UpstreamError) -> None:
        if error.reason in NOT_ITS_FAULT:
            return
        self.metrics.upstream.add((error.reason,))
        if error.reason == "rate_limited":
            return  # it works, and has enough to do
        is_certain = error.reason in ("connect", "refused_address")
        if server.breaker.failed(time.monotonic(), ticket, is_certain=is_certain):
            log.warning("server.ejected", server=server.id, url=server.spec.url, reason=error.reason, error=str(error))


def _why(starting: int | None) -> str:
    if starting is None:
        return ""
    return f" yet: {starting} {'is' if starting == 1 else 'are'} starting" if starting else ", and none is starting"


def _of_upstream(error: UpstreamError) -> DoorError:
    if error.reason in ("timeout", "hung"):
        return DoorError(504, "upstream_timeout", f"The model server did not answer in time: {error}")
    after_s = 2 if error.retry_after_s is None else error.retry_after_s
    if error.reason == "rate_limited":
        return DoorError(429, "upstream_rate_limited", f"No model server takes more: {error}", retry_after_s=after_s)
    if error.reason == "busy":
        return DoorError(503, "upstream_busy", f"All model servers are busy: {error}", retry_after_s=after_s)
    return DoorError(502, f"upstream_{error.reason}", "The model server failed before it answered.", retry_after_s=1)
