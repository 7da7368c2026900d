"""Lines on their way: to the router, as requests that come after all others, and what their answers say."""

from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
import orjson

from services.contracts.batches import BATCH_HEADER, BATCH_MODEL_HEADER
from services.contracts.identity import Identity
from services.core.domain.units import J_PER_KWH
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
        return Sent(Outcome(line, "waiting"), float(after) if after.isdigit() else 1.0)
    if status in (401, 404):
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
    response = {"status_code": status, "request_id": headers.get("x-request-id", ""), "body": body}
    result = {"id": new_id("batch_req"), "custom_id": line.custom_id, "response": response, "error": None}
    outcome = Outcome(
        line,
        "succeeded" if status == 200 else "failed",
        orjson.dumps(result).decode(),
        energy_j=_number(headers.get("x-wattshift-wh")) * J_PER_KWH / 1e3,
        carbon_gco2=_number(headers.get("x-wattshift-gco2")),
    )
    return Sent(outcome)


def _number(value: str | None) -> float:
    return 0.0 if value is None else float(value)
