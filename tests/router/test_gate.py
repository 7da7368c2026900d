"""What every request to the router passes, whatever becomes of it."""

from typing import Any

import pytest

from services.contracts.codes import ProblemCode
from services.kit.edge.exchange import ClientGoneError, Exchange
from services.kit.problems import ProblemError
from services.router.gate import Gate
from services.router.openai import DoorError
from services.router.settings import RouterSettings
from tests.support.tokens import TOKEN


@pytest.fixture
def gate() -> Gate:
    return Gate(
        RouterSettings.model_construct(max_requests_per_tenant=1, max_buffered_bytes=1, service_token=TOKEN),
        keys=None,  # pyright: ignore
    )


def an_exchange() -> Exchange:
    async def no_one(*_: Any) -> Any:
        raise AssertionError("the gate itself neither reads nor sends")

    return Exchange.open({"type": "http", "path": "/v1/models", "headers": []}, no_one, no_one)


async def refusals(gate: Gate, exchange: Exchange, error: Exception) -> list[Exception]:
    found: list[Exception] = []

    async def handle(exchange: Exchange) -> None:
        assert gate.in_flight == 1
        raise error

    async def refuse(exchange: Exchange, error: Exception) -> None:
        found.append(error)

    await gate.pass_in(exchange, handle, refuse)
    return found


async def test_a_door_gets_its_own_errors_and_problems_to_refuse(gate: Gate) -> None:
    for error in (DoorError(404, "none", "none"), ProblemError(401, ProblemCode.UNAUTHENTICATED, "no key")):
        assert await refusals(gate, an_exchange(), error) == [error]


async def test_what_no_door_foresaw_is_an_internal_problem_that_names_its_type_alone(gate: Gate) -> None:
    (problem,) = await refusals(gate, an_exchange(), KeyError("secret"))
    assert isinstance(problem, ProblemError)
    assert (problem.status, problem.problem_code) == (500, ProblemCode.INTERNAL)
    assert problem.detail == "The router failed: KeyError."


async def test_an_answer_that_has_begun_is_not_refused(gate: Gate) -> None:
    begun = an_exchange()
    begun.has_begun = True
    assert await refusals(gate, begun, DoorError(404, "none", "none")) == []
    with pytest.raises(KeyError):  # so that the server breaks the connection off
        await refusals(gate, begun, KeyError())


@pytest.mark.parametrize("error", [ClientGoneError(), DoorError(404, "none", "none"), KeyError()])
async def test_the_gate_is_empty_once_its_last_request_has_ended(gate: Gate, error: Exception) -> None:
    async def close_and_fail(exchange: Exchange) -> None:
        gate.close()
        assert not gate.is_empty.is_set()
        raise error

    async def refuse(exchange: Exchange, error: Exception) -> None:
        assert not gate.is_empty.is_set()

    await gate.pass_in(an_exchange(), close_and_fail, refuse)
    assert gate.is_empty.is_set()
