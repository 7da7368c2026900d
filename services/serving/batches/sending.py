"""Lines on their way: where they may be answered, how many at once, and what the router's answers say of them.

The router takes them as requests that come after all others.
"""

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from services.contracts.batches import BATCH_HEADER, BATCH_MODEL_HEADER
from services.contracts.identity import Identity, KeyLimits
from services.contracts.routing import RoutedServer
from services.core.domain.units import J_PER_KWH
from services.kit.edge.keys import Resolve
from services.kit.ids import new_id
from services.kit.logging import Log
from services.kit.tokens import Outgoing
from services.serving.repository.batch_work import ClaimedLine, Outcome

log = Log(__name__)

MOST_FAILURES = 5  #: A line at which servers have failed so often gets their last answer as its result
TIMEOUT_S = 3_600.0
AWAY_S = 5.0
UNKNOWN_S = 30.0  #: Before a line is sent again after an answer that says the router does not know the model, or us
NO_ROOM = frozenset({429, 503})
FAILED = frozenset({500, 502, 504})


@dataclass(frozen=True)
class Sent:
    """What came of sending a line; ``retry_after_s`` is None unless the place had no room for it."""

    outcome: Outcome
    retry_after_s: float | None = None


class Sender:
    """Sends lines to the router."""

    def __init__(self, session: aiohttp.ClientSession, router_url: str, tokens: Outgoing) -> None:
        self._session = session
        self._url = router_url.rstrip("/")
        self._tokens = tokens

    async def send(self, line: ClaimedLine, endpoint: str, caller: Identity, place: str) -> Sent:
        """Return what became of a line that a place may answer; it never raises, except when cancelled."""
        headers = {"content-type": "application/json", **self._tokens.headers(caller)}
        headers |= {BATCH_HEADER: place, BATCH_MODEL_HEADER: line.model}
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with self._session.post(
                self._url + endpoint, data=line.body.encode(), headers=headers, timeout=timeout
            ) as answer:
                content = await answer.read()
                return _read(line, answer.status, answer.headers, content)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.warning("batches.router_away", error=str(error) or type(error).__name__)
            was_sent = not isinstance(error, aiohttp.ClientConnectorError)
            return Sent(Outcome(line, "waiting", is_unknown=was_sent), AWAY_S)


def _read(line: ClaimedLine, status: int, headers: Mapping[str, str], content: bytes) -> Sent:
    """Return what an answer says of a line; ``headers`` ignore case."""
    if status in NO_ROOM:
        after = headers.get("retry-after", "1")
        return Sent(Outcome(line, "waiting"), _number(after, 1.0))
    if status in (401, 404) and "x-wattshift-location" not in headers:  # else it is a server that says so
        log.warning(
            "batches.line_not_known", line=line.id, status=status, answer=content[:200].decode(errors="replace")
        )
        return Sent(Outcome(line, "waiting"), UNKNOWN_S)
    if status in FAILED and line.failures + 1 < MOST_FAILURES:
        return Sent(Outcome(line, "waiting", has_failed=True))
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        body, status = {"error": {"message": "The answer is not JSON.", "code": "upstream_failed"}}, max(status, 502)
    request_id = headers.get("x-request-id", "").encode(errors="replace").decode()
    response = {"status_code": status, "request_id": request_id, "body": body}
    outcome = Outcome(
        line,
        "succeeded" if status == 200 else "failed",
        _result(line, response, None),
        energy_j=_number(headers.get("x-wattshift-wh")) * J_PER_KWH / 1e3,
        carbon_gco2=_number(headers.get("x-wattshift-gco2")),
    )
    return Sent(outcome)


def not_stored(line: ClaimedLine) -> Outcome:
    """Return the outcome of a line whose answer the database refuses."""
    error = {"code": "answer_not_stored", "message": "The answer cannot be stored."}
    return Outcome(line, "failed", _result(line, None, error))


def _result(line: ClaimedLine, response: Mapping[str, Any] | None, error: Mapping[str, str] | None) -> str:
    result = {"id": new_id("batch_req"), "custom_id": line.custom_id, "response": response, "error": error}
    return orjson.dumps(result).decode()


def _number(value: str | None, default: float = 0.0) -> float:
    """Return a header's number; the default if it has none."""
    try:
        return found if math.isfinite(found := float(value or "")) and found >= 0.0 else default
    except ValueError:
        return default


FIRST, LEAST = 4.0, 1.0
FREE_SHARE = 0.5
"""Of a place's capacity, taken to be free until the first refusal says otherwise."""
USUAL_LINE_S = 10.0
NEW_SHARE = 0.1
LONGEST_PAUSE_S = 60.0


class Room:
    """What one place has free for the lines of a model: more after each answer, half after a refusal."""

    def __init__(self, capacity: int, line_s: float | None = None) -> None:
        self.capacity = capacity  #: Requests that its servers take at once
        self.in_flight = 0  #: Lines that are under way there
        self.line_s = line_s or USUAL_LINE_S  #: How long a line takes, seconds
        self._most = FIRST
        self._was_refused = False
        self._not_before_s = 0.0

    def free(self, now_s: float) -> int:
        """Return how many more lines may be sent now."""
        return 0 if now_s < self._not_before_s else max(0, int(min(self._most, self.capacity)) - self.in_flight)

    @property
    def lines_per_s(self) -> float:
        """How many lines the place is expected to answer in a second, if it is given as many as fit."""
        most = self._most if self._was_refused else max(self._most, FREE_SHARE * self.capacity)
        return min(most, self.capacity) / max(self.line_s, 1e-3)

    def answered(self, took_s: float) -> None:
        """Note an answer: one more line may be under way, as long as none was refused for each."""
        self._most = min(self._most + (1.0 / self._most if self._was_refused else 1.0), max(self.capacity, LEAST))
        self.line_s += NEW_SHARE * (took_s - self.line_s)

    def refused(self, now_s: float, retry_after_s: float) -> None:
        """Note a refusal; those of one moment count once."""
        if now_s >= self._not_before_s:
            self._was_refused = True
            self._most = max(LEAST, min(self._most, float(self.in_flight)) / 2)
            self._not_before_s = now_s + min(max(retry_after_s, 1.0), LONGEST_PAUSE_S)


def limits_at(resolve: Resolve) -> Callable[[str], Awaitable[KeyLimits]]:
    """Return a function that asks what the key with an id may do; one that is not known may name no model."""

    async def limits_of(key_id: str) -> KeyLimits:
        key = await resolve(key_id)
        return KeyLimits(models=[]) if key is None else key.key_limits

    return limits_of


def mean_intensity(servers: Iterable[RoutedServer]) -> float | None:
    """Return the mean of the places' intensities now, gCO2/kWh at the meter, PUE included; None if none is known."""
    known = {each.location: each.gco2_per_kwh * each.pue for each in servers if each.gco2_per_kwh is not None}
    return sum(known.values()) / len(known) if known else None
