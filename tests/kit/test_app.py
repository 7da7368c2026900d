"""The shape every service has: problems, the token, the body limit, health."""

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Annotated

import httpx
import pytest
from fastapi import FastAPI, Query
from starlette.types import ASGIApp

from services.contracts.codes import ProblemCode
from services.contracts.problems import MEDIA_TYPE, Problem
from services.contracts.schema import Message
from services.core.domain.errors import PolicyConfigError, TransitionError
from services.kit.app import add_basics, create_service
from services.kit.credentials import Credential, roots_of
from services.kit.problems import ProblemError, not_found
from services.kit.settings import SharedSettings
from services.kit.tokens import Incoming
from tests.support.crowds import a_guest, asked_by
from tests.support.tokens import signed

TOKEN = "a-token-of-sixteen-and-more"
SECRETS = Credential.derived("carbon", roots_of(TOKEN)).secrets


class Order(Message):
    name: str
    count: int


@asynccontextmanager
async def nothing(_: FastAPI):
    yield


def a_service(readiness_error: Exception | None = None) -> FastAPI:
    async def readiness() -> None:
        if readiness_error:
            raise readiness_error

    settings = SharedSettings(WATTSHIFT_SERVICE_TOKEN=TOKEN)
    incoming = Incoming("carbon", SECRETS)
    app = create_service(
        "a service", settings, lifespan=nothing, readiness=readiness, max_body_bytes=1_000, incoming=incoming
    )

    @app.post("/v1/orders")
    async def take(order: Order, limit: Annotated[int, Query(ge=1)] = 1) -> dict[str, int]:
        return {"count": order.count * limit}

    failures: dict[str, Exception] = {
        "missing": not_found("order"),
        "transition": TransitionError("no way"),
        "policy": PolicyConfigError("too small", "/mu"),
        "bug": RuntimeError("a secret"),
    }

    @app.get("/v1/fail/{kind}")
    async def fail(kind: str) -> None:
        raise failures[kind]

    return app


def from_the_gateway(audience: str = "carbon") -> str:
    """Return a token; made for each test, as it ends after minutes and a run of all tests takes longer."""
    return signed(audience, root=TOKEN)


def client(app: ASGIApp, make_token: Callable[[], str] | None = from_the_gateway) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {make_token()}"} if make_token else {}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://service", headers=headers)


def problem_of(answer: httpx.Response) -> Problem:
    assert answer.headers["content-type"] == MEDIA_TYPE
    problem = Problem.model_validate_json(answer.content)
    assert problem.status == answer.status_code
    return problem


@pytest.mark.parametrize(
    "make_token",
    [None, lambda: "wrong", lambda: TOKEN, lambda: from_the_gateway() + "x", lambda: from_the_gateway("scheduler")],
    ids=["none", "wrong", "the root itself", "changed", "for another service"],
)
async def test_only_the_other_services_get_in(make_token: Callable[[], str] | None) -> None:
    async with client(a_service(), make_token) as caller:
        assert problem_of(await caller.get("/v1/fail/missing")).code == ProblemCode.UNAUTHENTICATED
        assert (await caller.get("/healthz")).status_code == 200


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("missing", 404, ProblemCode.NOT_FOUND),
        ("transition", 409, ProblemCode.INVALID_TRANSITION),
        ("policy", 422, ProblemCode.INVALID_POLICY_PARAMETERS),
        ("bug", 500, ProblemCode.INTERNAL),
    ],
)
async def test_every_exception_leaves_as_a_problem(kind: str, status: int, code: ProblemCode) -> None:
    async with client(a_service()) as caller:
        problem = problem_of(await caller.get(f"/v1/fail/{kind}", headers={"x-request-id": "r-1"}))
    assert (problem.status, problem.code, problem.request_id) == (status, code, "r-1")
    assert "secret" not in problem.detail


async def test_a_bad_parameter_is_named_in_the_sentence_too() -> None:
    async with client(a_service()) as caller:
        problem = problem_of(await caller.get("/v1/fail/policy"))
    assert problem.detail == "/parameters/mu: too small"
    assert [error.pointer for error in problem.errors] == ["/parameters/mu"]


async def test_a_wrong_field_is_pointed_at() -> None:
    async with client(a_service()) as caller:
        answer = await caller.post("/v1/orders?limit=0", json={"name": "x", "count": "many", "extra/~": 1})
    problem = problem_of(answer)
    assert problem.code == ProblemCode.INVALID_REQUEST
    assert {error.pointer for error in problem.errors} == {"?limit", "/count", "/extra~1~0"}


async def test_what_is_not_json_is_said_to_be_so() -> None:
    async with client(a_service()) as caller:
        answer = await caller.post("/v1/orders", content=b'{"name": ', headers={"content-type": "application/json"})
    assert problem_of(answer).code == ProblemCode.BODY_NOT_JSON


@pytest.mark.parametrize("announced", [True, False])
async def test_a_large_body_is_refused(announced: bool) -> None:
    async def chunks():
        for _ in range(30):
            yield b"x" * 100

    content = b"x" * 3_000 if announced else chunks()
    async with client(a_service()) as caller:
        answer = await caller.post("/v1/orders", content=content, headers={"content-type": "application/json"})
    assert problem_of(answer).code == ProblemCode.BODY_TOO_LARGE


async def test_unknown_paths_and_methods_are_problems_too() -> None:
    async with client(a_service()) as caller:
        assert problem_of(await caller.get("/v1/nowhere")).code == ProblemCode.NOT_FOUND
        assert problem_of(await caller.put("/v1/orders")).code == ProblemCode.METHOD_NOT_ALLOWED


async def test_readiness_tells_what_is_missing() -> None:
    async with client(a_service(ConnectionError("no database"))) as caller:
        answer = await caller.get("/readyz")
    assert (answer.status_code, answer.json()["detail"]) == (503, "no database")


async def test_a_stranger_learns_no_more_than_that_something_is_missing() -> None:
    """The reason may name addresses, accounts and files, and who asks has shown no key."""
    app = a_service(ConnectionError("Connect call failed ('10.0.0.5', 5432)"))
    transport = httpx.ASGITransport(app, client=("192.0.2.7", 40_000))
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as stranger:
        answer = await stranger.get("/readyz")
    assert (answer.status_code, answer.json()) == (503, {"status": "not ready"})


async def test_one_check_answers_all_who_ask_for_readiness_at_once() -> None:
    """Whoever asks needs no key, and one check of a gateway asks every service."""
    checks, go_on = 0, asyncio.Event()

    async def readiness() -> None:
        nonlocal checks
        checks += 1
        await go_on.wait()

    app = FastAPI()
    add_basics(app, readiness)
    async with client(app, None) as caller:
        asked = [asyncio.create_task(caller.get("/readyz")) for _ in range(50)]
        await asyncio.wait(asked, timeout=0.1)
        go_on.set()
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
    assert checks == 1


def test_a_problem_error_is_its_document() -> None:
    document = ProblemError(409, ProblemCode.CONFLICT, "Taken.").document()
    assert (document.type, document.title) == ("/problems/conflict", "Conflict")


@pytest.mark.parametrize(
    ("path", "make_token", "is_known"),
    [
        ("/v1/fail/missing", from_the_gateway, True),
        ("/v1/fail/missing", lambda: "made-up", False),
        ("/healthz", None, False),
        ("/own/right", None, True),
        ("/own/wrong", None, False),
    ],
)
async def test_a_connection_is_known_by_a_valid_token_or_by_the_answer_of_a_path_that_asks_itself(
    path: str, make_token: Callable[[], str] | None, is_known: bool
) -> None:
    async def readiness() -> None: ...

    app = create_service(
        "a service",
        SharedSettings(WATTSHIFT_SERVICE_TOKEN=TOKEN),
        lifespan=nothing,
        readiness=readiness,
        open_prefixes=("/own/",),
        incoming=Incoming("carbon", SECRETS),
    )

    @app.get("/own/{word}")
    async def own(word: str) -> None:
        if word != "right":
            raise not_found("right word")

    with a_guest() as guest:
        async with client(asked_by(guest, app), make_token) as caller:
            await caller.get(path)
        assert guest.is_known is is_known
