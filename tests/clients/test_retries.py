"""What the client repeats, and what it does not."""

import json
from collections.abc import Callable, Iterator

import httpx
import pytest

import wattshift.client
from wattshift import ApiError, Client, UnreachableError

JOB = {"id": "job_1", "name": "a", "state": "queued", "submitted_at": "2026-11-20T19:36:20Z"}
EVENT = {"id": "1-1", "job_id": "job_1", "at": "2026-11-20T19:36:20Z", "type": "job.running", "data": {}}
Script = Callable[[httpx.Request], httpx.Response]


@pytest.fixture
def pauses_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that the client would have made."""
    made: list[float] = []
    monkeypatch.setattr(wattshift.client.time, "sleep", made.append)
    return made


class Server:
    """Answers each request with the next of its answers; an exception is raised instead."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.requests: list[httpx.Request] = []
        self._answers = iter(answers)

    def client(self, retries: int = 4) -> Client:
        """Return a client that talks to it."""
        return Client("http://gateway", "ws_x", retries=retries, transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


def problem(status: int, code: str, **headers: str) -> httpx.Response:
    document = {"status": status, "code": code, "detail": "no", "title": "no", "type": "x", "request_id": "r1"}
    return httpx.Response(status, json=document, headers=headers)


def test_a_submission_is_repeated_under_one_key(pauses_s: list[float]) -> None:
    server = Server(
        httpx.ReadError("broken"),
        problem(503, "unavailable"),
        problem(429, "rate_limited"),
        httpx.Response(201, json=JOB),
    )

    with server.client() as client:
        assert client.submit(["true"]).id == "job_1"

    keys = {request.headers["idempotency-key"] for request in server.requests}
    assert (len(server.requests), len(keys)) == (4, 1)
    assert len({request.content for request in server.requests}) == 1
    assert len(pauses_s) == 3


def test_what_may_have_been_done_is_not_done_again(pauses_s: list[float]) -> None:
    for answer in (httpx.ReadError("broken"), problem(503, "unavailable")):
        server = Server(answer)
        with server.client() as client, pytest.raises((UnreachableError, ApiError)):
            client.hold("job_1")
        assert len(server.requests) == 1

    refused = Server(problem(429, "rate_limited"), httpx.ConnectError("no"), problem(409, "invalid_transition"))
    with refused.client() as client, pytest.raises(ApiError) as caught:
        client.hold("job_1")
    assert (len(refused.requests), caught.value.code) == (3, "invalid_transition")


def test_it_waits_as_long_as_it_is_asked_to(pauses_s: list[float]) -> None:
    server = Server(problem(429, "rate_limited", **{"retry-after": "7"}), httpx.Response(200, json={"items": []}))
    with server.client() as client:
        assert list(client.jobs()) == []

    assert pauses_s == [7]


def test_it_does_not_wait_for_hours(pauses_s: list[float]) -> None:
    server = Server(problem(503, "unavailable", **{"retry-after": "3600"}))
    with server.client() as client, pytest.raises(ApiError) as caught:
        client.job("job_1")
    assert (caught.value.status, pauses_s) == (503, [])


def test_it_gives_up_at_last(pauses_s: list[float]) -> None:
    server = Server(*(problem(503, "unavailable") for _ in range(9)))
    with server.client(retries=3) as client, pytest.raises(ApiError) as caught:
        client.job("job_1")

    assert (caught.value.status, caught.value.request_id, len(server.requests)) == (503, "r1", 4)
    assert pauses_s == sorted(pauses_s)


def test_a_refusal_is_not_repeated(pauses_s: list[float]) -> None:
    server = Server(problem(422, "invalid_request"))
    with server.client() as client, pytest.raises(ApiError):
        client.submit(["true"])

    assert (len(server.requests), pauses_s) == (1, [])


def test_an_answer_of_something_else_is_an_error_without_a_code(pauses_s: list[float]) -> None:
    server = Server(httpx.Response(502, text="<html>Bad Gateway</html>"))
    with server.client() as client, pytest.raises(ApiError, match="GET /v1/jobs/job_1: HTTP 502") as caught:
        client.job("job_1")

    assert caught.value.code == ""


def test_an_event_stream_goes_on_after_its_last_event(pauses_s: list[float]) -> None:
    ended = {**EVENT, "id": "1-2", "type": "job.succeeded"}
    server = Server(Broken(event_text(EVENT)).answer(), httpx.Response(200, text=f": alive\n\n{event_text(ended)}"))
    with server.client() as client:
        found = [event.id for event in client.events("job_1")]

    assert found == ["1-1", "1-2"]
    assert server.requests[1].headers["last-event-id"] == "1-1"
    assert "last-event-id" not in server.requests[0].headers


def test_output_goes_on_where_it_broke_off(pauses_s: list[float]) -> None:
    text = "grün\n".encode()
    first = Broken(text[:3]).answer({"x-wattshift-log-generation": "2"})  # in the middle of a character
    server = Server(first, httpx.Response(200, content=text[3:]))
    with server.client() as client:
        assert "".join(client.logs("job_1", follow=True)) == "grün\n"

    assert [request.url.params.get("generation") for request in server.requests] == [None, "2"]
    assert [request.url.params["offset"] for request in server.requests] == ["0", "3"]


def test_a_stream_that_never_opens_is_given_up(pauses_s: list[float]) -> None:
    server = Server(*(httpx.ConnectError("no") for _ in range(9)))
    with server.client(retries=2) as client, pytest.raises(UnreachableError):
        list(client.events("job_1"))

    assert len(server.requests) == 3


def event_text(event: dict[str, object]) -> str:
    return f"id: {event['id']}\nevent: {event['type']}\ndata: {json.dumps(event)}\n\n"


class Broken(httpx.SyncByteStream):
    """A body whose connection breaks at its end."""

    def __init__(self, body: str | bytes) -> None:
        self._body = body if isinstance(body, bytes) else body.encode()

    def __iter__(self) -> Iterator[bytes]:
        yield self._body
        raise httpx.ReadError("broken")

    def answer(self, headers: dict[str, str] | None = None) -> httpx.Response:
        """Return it as an answer."""
        return httpx.Response(200, stream=self, headers=headers)
