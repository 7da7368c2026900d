"""The command line's way to the gateway, which is the users' own client."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

import wattshift.client
from services.cli.client import Gateway
from services.cli.commands import EXIT_NOT_FOUND, EXIT_REFUSED, EXIT_UNAVAILABLE, EXIT_USAGE, CliError
from services.cli.main import app
from services.cli.site import grid
from services.contracts.codes import ProblemCode

Answers = list[tuple[int, object]]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """What the server answers, in order; the client does not pause."""
    monkeypatch.setattr(wattshift.client.time, "sleep", lambda _: None)
    return []


@pytest.fixture
def gateway(answers: Answers) -> Iterator[Gateway]:
    """Before a server that answers ``answers``."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            status, document = answers.pop(0)
            body = b"" if document is None else json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_DELETE = answer  # noqa: N815

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    found = Gateway(f"http://127.0.0.1:{server.server_port}", "ws_x")
    yield found
    found.close()
    server.shutdown()
    serving.join()
    server.server_close()


def problem(status: int, code: str, *errors: dict[str, str]) -> tuple[int, object]:
    return status, {"status": status, "code": code, "detail": "It is so.", "errors": list(errors)}


def test_a_submission_is_repeated_and_nothing_else(gateway: Gateway, answers: Answers) -> None:
    answers += [problem(503, "unavailable"), (201, {"id": "job_1"}), problem(503, "unavailable")]

    made = gateway.call("POST", "/v1/jobs", body={}, key="k")
    with pytest.raises(CliError) as caught:
        gateway.get("/v1/jobs/job_1")

    assert made == {"id": "job_1"}
    assert (caught.value.exit_code, caught.value.code, answers) == (EXIT_UNAVAILABLE, ProblemCode.UNAVAILABLE, [])


@pytest.mark.parametrize("words", ["grid order --cut 35%", "reserve --gpus 1"])
def test_an_order_and_a_reservation_are_repeated(
    words: str, gateway: Gateway, answers: Answers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(grid, "Gateway", lambda: gateway)
    answers += [problem(503, "unavailable"), (201, {"id": "made_1"})]

    app([*words.split(), "--for", "3h", "--json"], standalone_mode=False)

    assert json.loads(capsys.readouterr().out) == {"id": "made_1"}


def test_a_refusal_says_which_field_and_has_an_exit_code(gateway: Gateway, answers: Answers) -> None:
    field = {"pointer": "/gpus/min", "detail": "must be at least 1"}
    answers += [problem(422, "invalid_request", field), problem(404, "not_found"), problem(418, "of_a_later_release")]
    caught: list[CliError] = []
    for _ in range(3):
        with pytest.raises(CliError) as refused:
            gateway.get("/v1/jobs")
        caught.append(refused.value)

    assert [error.exit_code for error in caught] == [EXIT_REFUSED, EXIT_NOT_FOUND, EXIT_REFUSED]
    assert [error.code for error in caught] == [ProblemCode.INVALID_REQUEST, ProblemCode.NOT_FOUND, None]
    assert str(caught[0]) == "It is so. (invalid_request)\n  /gpus/min: must be at least 1"


def test_an_answer_without_a_body_is_none(gateway: Gateway, answers: Answers) -> None:
    answers.append((204, None))

    assert gateway.call("DELETE", "/v1/keys/key_1") is None


def test_a_gateway_that_is_away_is_said_to_be() -> None:
    with pytest.raises(CliError, match=r"at http://127\.0\.0\.1:1 does not answer \(.+\); is it running\?") as caught:
        Gateway("http://127.0.0.1:1", "ws_x").get("/v1/jobs")

    assert caught.value.exit_code == EXIT_UNAVAILABLE


def test_a_word_in_a_path_cannot_cut_it_short(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def request(method: str, path: str, **_: object) -> httpx.Response:
        asked.append(path)
        return httpx.Response(204)

    monkeypatch.setattr(gateway._client, "request", request)  # pyright: ignore[reportPrivateUsage]
    for name in ("web#old", "web?x=1", "50%"):
        gateway.call("DELETE", f"/v1/pools/{name}")
    assert asked == ["/v1/pools/web%23old", "/v1/pools/web%3Fx=1", "/v1/pools/50%25"], "else the pool web were deleted"


@pytest.mark.parametrize(("there", "said"), [(2, ""), (3, "wattshift: only the newest 2 are shown\n")])
def test_a_list_that_is_cut_off_says_so(
    gateway: Gateway, answers: Answers, capsys: pytest.CaptureFixture[str], there: int, said: str
) -> None:
    answers.append((200, {"items": list(range(there)), "next_cursor": None}))
    assert gateway.newest("/v1/audit", 2) == [0, 1]
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("url", "key", "said"),
    [
        ("http://[::1", "ws_x", "'http://[::1' is not the address of a gateway"),
        ("http://127.0.0.1:x", "ws_x", "'http://127.0.0.1:x' is not the address of a gateway"),
        ("http://127.0.0.1:1", "ws_\xe9", "the API key is none"),
    ],
)
def test_what_cannot_be_asked_is_one_line(url: str, key: str, said: str) -> None:
    with pytest.raises(CliError) as refused:
        Gateway(url, key)
    assert (str(refused.value).startswith(said), refused.value.exit_code) == (True, EXIT_USAGE)
