"""The optimizer is asked for a plan's solve as often as it takes, under one key, and not longer than there is time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from aiohttp import web

from services.contracts.background import WorkState
from services.contracts.codes import ProblemCode
from services.contracts.identity import Identity
from services.contracts.optimize import Solve
from services.contracts.pools import PoolsProblem, PoolsRequest, PoolsResult
from services.contracts.serving import PLANNER
from services.core.domain.solving import Backend, SolveStatus
from services.kit.credentials import Credential, roots_of
from services.kit.http import ServiceClient, new_session
from services.kit.problems import ProblemError
from services.kit.tokens import Incoming
from services.serving.solver import NotSolvedError, PlanSolver
from tests.gateway.peer import a_peer
from tests.support.servers import ROOT
from tests.support.tokens import TOKEN, tokens

REQUEST = PoolsRequest.model_validate_json((ROOT / "examples/pools/freesh-first.json").read_text())


class Optimizer:
    """Answers with these statuses and then accepts; the solve is in these states, one after the other."""

    def __init__(self, *statuses: int, states: tuple[WorkState, ...]) -> None:
        self.statuses = list(statuses)
        self.states = list(states)
        self.asked: list[tuple[str, str]] = []
        self.submitted: list[tuple[str | None, Identity | None]] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append((request.method, request.path))
        if request.method == "POST":
            headers = request.headers
            self.submitted.append((headers.get("idempotency-key"), identity_of(headers)))
            if self.statuses and (status := self.statuses.pop(0)) != 202:
                problem = {"type": "about:blank", "title": "t", "status": status, "detail": "No.", "code": "conflict"}
                return web.json_response(problem, status=status)
        if request.method == "DELETE":
            return web.json_response({})
        is_accepted = request.method == "POST"
        state = self.states[0] if is_accepted or len(self.states) == 1 else self.states.pop(0)
        result = PoolsResult(status=SolveStatus.OPTIMAL, solver=Backend.HIGHS, partition="a")
        solve = Solve(
            id="solve_1",
            kind="pools",
            tenant_id="installation",
            state=state,
            submitted_at=datetime.now(UTC),
            problem=PoolsProblem.model_validate(REQUEST.model_dump()),
            result=result if state is WorkState.SUCCEEDED else None,
        )
        shown = solve.model_dump_json(exclude={"problem", "result"} if is_accepted else None)
        return web.Response(text=shown, content_type="application/json")


def identity_of(headers: Mapping[str, str]) -> Identity | None:
    incoming = Incoming.of(Credential.derived("optimizer", roots_of(TOKEN)))
    return incoming.caller(headers["authorization"], "POST", "/v1/optimize/pools").identity


@asynccontextmanager
async def a_solver(optimizer: Optimizer) -> AsyncIterator[PlanSolver]:
    async with a_peer(optimizer.answer) as url, new_session() as session:
        yield PlanSolver(ServiceClient(session, url, "The optimizer", tokens=tokens("optimizer", issuer="serving")))


async def test_an_optimizer_that_is_away_or_full_is_asked_again_under_the_same_key() -> None:
    states = (WorkState.QUEUED, WorkState.RUNNING, WorkState.SUCCEEDED)
    optimizer = Optimizer(503, 429, 500, 202, states=states)
    async with a_solver(optimizer) as solver:
        solve = await solver.solve("plan_1", REQUEST, 60)
    assert isinstance(solve.result, PoolsResult)
    assert set(optimizer.submitted) == {("plan_1", PLANNER)}
    assert optimizer.asked[-2:] == [("GET", "/v1/optimize/solve_1")] * 2


async def test_a_refused_problem_is_not_asked_for_again() -> None:
    optimizer = Optimizer(422, states=(WorkState.QUEUED,))
    async with a_solver(optimizer) as solver:
        with pytest.raises(ProblemError) as refusal:
            await solver.solve("plan_1", REQUEST, 60)
    assert (refusal.value.status, refusal.value.problem_code) == (422, ProblemCode.CONFLICT)
    assert optimizer.asked == [("POST", "/v1/optimize/pools")]


async def test_a_solve_without_an_answer_in_time_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[asyncio.Timeout] = []

    def timeout(within_s: float) -> asyncio.Timeout:
        limits.append(asyncio.timeout(within_s))
        return limits[-1]

    async def time_is_over(_: float) -> None:
        limits[0].reschedule(asyncio.get_running_loop().time())
        await asyncio.Event().wait()

    monkeypatch.setattr("services.serving.solver.asyncio", SimpleNamespace(timeout=timeout, sleep=time_is_over))
    optimizer = Optimizer(states=(WorkState.RUNNING,))
    async with a_solver(optimizer) as solver:
        with pytest.raises(NotSolvedError):
            await solver.solve("plan_1", REQUEST, 60)
        assert [method for method, _ in optimizer.asked] == ["POST", "GET", "DELETE"]
        await solver.cancel()
        assert len(optimizer.asked) == 3, "it is cancelled once"


async def test_the_request_survives_being_kept_with_the_plan() -> None:
    kept = PoolsRequest.model_validate(json.loads(json.dumps(REQUEST.model_dump(mode="json"))))
    assert kept.model_dump_json() == REQUEST.model_dump_json(), "else the same key would stand for another body"
