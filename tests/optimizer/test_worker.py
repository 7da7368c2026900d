"""The worker and the sweeper by themselves, on a real database."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Callable
from types import MappingProxyType
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from optimizer_service import worker as worker_module
from optimizer_service.kinds import KINDS
from optimizer_service.repository.lengths import solve_repository
from optimizer_service.settings import OptimizerSettings
from optimizer_service.worker import solve_worker
from services.contracts.background import Draft, WorkProblem
from services.contracts.identity import Identity, Role
from services.contracts.pools import PoolsProblem
from services.contracts.serving import PLANNER
from services.core.domain.errors import DomainError
from services.core.domain.solving import Progress, Report
from services.db.background import WorkRepository
from services.db.engine import create_engine
from services.kit.background import work_queue
from services.kit.background.work_queue import Sweeper, WorkQueue
from services.kit.background.worker import PROGRESS_S
from services.kit.ids import new_id
from tests.optimizer.problems import a_plan

OBJECTIVE = 3 * 3_600_000 * 100
"""Of the plan that is stored by default: three instances for an hour, joules times gCO2/kWh."""


class Messages:
    """A queue that notes what is sent; ``lost`` is how many of it the broker has lost."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.lost = 0
        self.works = True

    async def send(self, solve_id: str) -> bool:
        self.sent += [solve_id] if self.works else []
        return self.works

    async def waiting(self) -> int:
        return len(self.sent) - self.lost


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(database_url)
    async with engine.begin() as connection:
        await connection.execute(text("DELETE FROM solves"))
    yield engine
    await engine.dispose()


@pytest.fixture
def repository(engine: AsyncEngine) -> WorkRepository:
    return solve_repository(engine)


@pytest.fixture
def sweeper(repository: WorkRepository) -> tuple[Sweeper, Messages]:
    messages = Messages()
    settings = OptimizerSettings(WATTSHIFT_SERVICE_TOKEN="x" * 16, resend_s=1e-9, max_attempts=2, keep_days=1 / 86_400)
    return Sweeper("solve", repository, messages, settings), messages  # type: ignore[arg-type]


async def stored(repository: WorkRepository, *qps: float, key_id: str = "key", tenant: str = "acme") -> str:
    problem = PoolsProblem.model_validate(a_plan(*qps))
    draft = Draft(
        id=new_id("solve"),
        tenant_id=tenant,
        key_id=key_id,
        problem=WorkProblem(
            problem.model_dump(mode="json"),
            problem.model_dump_json().encode()[-100:] + repr(qps).encode(),
            {"kind": "pools"},
        ),
        idempotency_key=None,
        body_sha256=b"",
    )
    return (await repository.submit(draft, max_pending=100)).id


async def run(database_url: str, solve_id: str, lease_s: float = 30, lost: Callable[[], None] = lambda: None) -> None:
    """Run a worker's task as the pool does: in a thread that has no event loop."""

    def work() -> None:
        # The worker's engine belongs to the worker's own loop.
        engine = create_engine(database_url, pool_size=1)
        worker = solve_worker(engine, lease_s, on_lost_claim=lost)
        worker.run(solve_id)
        worker.close(engine.dispose())

    await asyncio.to_thread(work)


async def held_for(repository: WorkRepository, seconds: float) -> None:
    """Return once the only running solve's lease has been extended that far."""
    reached = text("SELECT lease_until > started_at + make_interval(secs => :seconds) FROM solves")
    async with asyncio.timeout(20), repository._engine.connect() as connection:
        while not (await connection.execute(reached, {"seconds": seconds})).scalar_one():
            await connection.rollback()
            await asyncio.sleep(0.02)


def solve_by(monkeypatch: pytest.MonkeyPatch, function: Callable[[Any, Report], Any]) -> None:
    kind = dataclasses.replace(KINDS["pools"], solve=function)
    monkeypatch.setattr(worker_module, "KINDS", MappingProxyType({"pools": kind}))


async def test_a_message_delivered_twice_is_worked_off_once(database_url: str, repository: WorkRepository) -> None:
    solve_id = await stored(repository)
    await asyncio.gather(run(database_url, solve_id), run(database_url, solve_id))
    await run(database_url, solve_id)
    row = await repository.find(solve_id, "acme")
    assert row is not None
    assert (row.state, row.attempts, row.columns["objective"]) == ("succeeded", 1, OBJECTIVE)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SoftTimeLimitExceeded(), "time_limit"),
        (DomainError("no such thing"), "invalid_problem"),
        (ZeroDivisionError("secret"), "internal"),
    ],
)
async def test_what_goes_wrong_is_written_down(
    database_url: str, repository: WorkRepository, monkeypatch: pytest.MonkeyPatch, error: Exception, code: str
) -> None:
    def broken(_: Any, __: Report) -> Any:
        raise error

    solve_by(monkeypatch, broken)
    solve_id = await stored(repository)
    await run(database_url, solve_id)
    row = await repository.summary(solve_id)
    assert row.failure is not None
    assert (row.state, row.failure.code) == ("failed", code)
    assert "secret" not in row.failure.detail
    assert await stored(repository) != solve_id, "a problem that failed may be tried again"


async def test_a_claim_is_kept_while_a_solve_takes_its_time_and_noticed_when_lost(
    database_url: str, repository: WorkRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, may_go_on, was_lost = threading.Event(), threading.Event(), threading.Event()
    result = KINDS["pools"].solve

    def slow(problem: Any, report: Report) -> Any:
        started.set()
        assert may_go_on.wait(20)
        return result(problem, report)

    solve_by(monkeypatch, slow)
    solve_id = await stored(repository)
    working = asyncio.create_task(run(database_url, solve_id, lease_s=1, lost=was_lost.set))
    assert await asyncio.to_thread(started.wait, 20)
    await held_for(repository, 2.0)
    assert await repository.release_abandoned(max_attempts=5, lease_s=60) == []
    async with repository._engine.begin() as connection:
        await connection.execute(text("UPDATE solves SET claim = 'another'"))
    assert await asyncio.to_thread(was_lost.wait, 60)
    may_go_on.set()
    await working
    row = await repository.summary(solve_id)
    assert (row.state, row.columns["status"]) == ("running", None), "the answer of a lost claim is not written"


async def test_tenants_take_turns_however_much_one_of_them_has_waiting(repository: WorkRepository) -> None:
    many = [await stored(repository, at, tenant="acme") for at in (100.0, 200.0, 300.0)]
    few = [await stored(repository, at, tenant="umbra") for at in (400.0, 500.0)]
    of_plan = await stored(repository, 600.0, key_id=PLANNER.key_id, tenant="planner")
    taken: list[str] = []
    for message in [*many, *few]:
        taken.append(await repository.fairest(message))
        assert await repository.claim(taken[-1], "claim", lease_s=60)
    assert taken == [many[0], few[0], many[1], few[1], many[2]]
    assert await repository.fairest(many[0]) == many[0], "none waits: it is claimed in vain"
    assert await repository.fairest(of_plan) == of_plan


async def test_a_worker_solves_what_is_next_in_turn(database_url: str, repository: WorkRepository) -> None:
    served = await stored(repository, 100.0, tenant="acme")
    await run(database_url, served)
    message, next_in_turn = await stored(repository, 200.0), await stored(repository, 300.0, tenant="umbra")
    await run(database_url, message)
    assert (await repository.summary(next_in_turn)).state == "succeeded"
    assert (await repository.summary(message)).state == "queued"


async def test_of_one_tenants_work_that_has_ended_only_so_much_is_kept(
    repository: WorkRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_queue, "MOST_KEPT", 3)
    queue = WorkQueue("solve", repository, Messages(), 100)  # type: ignore[arg-type]
    caller = Identity(tenant_id="acme", role=Role.USER, key_id="key")
    live, others = await stored(repository, 1.0), await stored(repository, 2.0, tenant="umbra")
    ended = [await stored(repository, 10.0 + at) for at in range(5)]
    for each in (*ended, others):
        assert await repository.cancel(each, Identity(tenant_id="ops", role=Role.ADMIN, key_id="key"))

    async def problem() -> WorkProblem:
        return WorkProblem({}, b"of its own", {"kind": "pools"})

    last, is_new = await queue.submit(caller, None, b"", problem)
    assert is_new
    left = {row.id for row in await repository.page(None, (), None, 100)}
    assert left == {live, others, *ended[2:], last.id}


async def test_a_lease_taken_while_the_clock_was_ahead_ends_in_its_time(repository: WorkRepository) -> None:
    solve_id = await stored(repository)
    assert await repository.claim(solve_id, "killed", lease_s=3_600)
    assert await repository.release_abandoned(max_attempts=5, lease_s=0.05) == []
    await asyncio.sleep(0.1)
    assert [row.id for row in await repository.release_abandoned(max_attempts=5, lease_s=0.05)] == [solve_id]


@pytest.mark.parametrize("is_sent", [True, False])
async def test_a_message_of_a_time_when_the_clock_was_ahead_is_sent_again(
    repository: WorkRepository, is_sent: bool
) -> None:
    solve_id = await stored(repository)
    if is_sent:
        await repository.mark_enqueued(solve_id)
    assert await repository.queued(60) == []
    async with repository._engine.begin() as connection:
        await connection.execute(
            text("UPDATE solves SET submitted_at = now() + interval '1 h', enqueued_at = enqueued_at + interval '1 h'")
        )
    assert await repository.queued(60) == [solve_id]


async def test_progress_is_written_while_it_changes_but_no_oftener_than_once_a_second(
    database_url: str, repository: WorkRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, written_twice, renewals = threading.Event(), threading.Event(), list[Any]()
    renew, result = WorkRepository.renew, KINDS["pools"].solve

    async def counted(self: WorkRepository, work_id: str, claim: str, lease_s: float, **columns: Any) -> bool:
        renewals.append(columns)
        stands = await renew(self, work_id, claim, lease_s, **columns)
        if len(renewals) == 2:
            written_twice.set()
        return stands

    def tells(problem: Any, report: Report) -> Any:
        report(Progress(0.5, "halfway", 7.0))
        for at in range(1_000_000):
            report(Progress(0.25, f"step {at}"))
            if may_end.wait(0.001):
                break
        return result(problem, report)

    solve_by(monkeypatch, tells)
    monkeypatch.setattr(WorkRepository, "renew", counted)
    solve_id = await stored(repository)
    began_s = time.monotonic()
    working = asyncio.create_task(run(database_url, solve_id, lease_s=3_600))
    assert await asyncio.to_thread(written_twice.wait, 60)
    running = await repository.summary(solve_id)
    may_end.set()
    await working
    took_s = time.monotonic() - began_s

    assert running.columns["progress"]["share"] == 0.5, "what is shown does not fall"
    assert running.columns["progress"]["doing"].startswith("step")
    assert len(renewals) <= took_s / PROGRESS_S
    ended = await repository.summary(solve_id)
    assert ended.columns["progress"] == {"share": 1.0, "doing": "done", "best": OBJECTIVE}


async def test_an_abandoned_solve_is_queued_again_until_it_has_cost_too_many_workers(
    repository: WorkRepository, sweeper: tuple[Sweeper, Messages]
) -> None:
    sweep, messages = sweeper
    solve_id = await stored(repository)
    for _ in range(2):
        assert await repository.claim(solve_id, "lost", lease_s=-1)
        await sweep.sweep()
    row = await repository.summary(solve_id)
    assert (row.state, row.attempts, row.failure.code) == ("failed", 2, "worker_lost")
    assert messages.sent == [solve_id]


async def test_only_lost_messages_are_sent_again(repository: WorkRepository, sweeper: tuple[Sweeper, Messages]) -> None:
    sweep, messages = sweeper
    made = [await stored(repository, float(n)) for n in range(3)]
    messages.works = False
    await sweep.sweep()
    assert messages.sent == []
    messages.works = True
    await sweep.sweep()
    assert messages.sent == made
    await sweep.sweep()
    assert messages.sent == made, "they wait in the queue"
    messages.lost = 1
    await sweep.sweep()
    assert messages.sent == [*made, made[0]], "messages are taken in order: the oldest is the lost one"


async def test_what_ended_long_ago_is_deleted(
    database_url: str, repository: WorkRepository, sweeper: tuple[Sweeper, Messages]
) -> None:
    old, waiting = await stored(repository), await stored(repository, 1.0)
    await run(database_url, old)
    async with repository._engine.begin() as connection:
        await connection.execute(text("UPDATE solves SET ended_at = ended_at - interval '1 hour'"))
    await sweeper[0].sweep()
    assert await repository.find(old, None) is None
    assert (await repository.summary(waiting)).state == "queued"


async def test_solves_of_plans_are_swept_into_their_own_queue(engine: AsyncEngine) -> None:
    sweepers: dict[bool, tuple[Sweeper, Messages]] = {}
    settings = OptimizerSettings(WATTSHIFT_SERVICE_TOKEN="x" * 16, resend_s=1e-9)
    for of_plans in (False, True):
        messages = Messages()
        store = solve_repository(engine, of_plans=of_plans)
        sweepers[of_plans] = Sweeper("solve", store, messages, settings), messages  # type: ignore[arg-type]
    made = {of_plans: await stored(solve_repository(engine), float(of_plans), key_id="serving" if of_plans else "key")
            for of_plans in (False, True)}  # fmt: skip
    for of_plans, (sweep, messages) in sweepers.items():
        await sweep.sweep()
        assert messages.sent == [made[of_plans]]
        assert await solve_repository(engine).claim(made[of_plans], "lost", lease_s=-1)
    for of_plans, (sweep, messages) in sweepers.items():
        messages.lost = 1  # taken by the worker that was lost
        await sweep.sweep()
        assert messages.sent == [made[of_plans]] * 2, "its worker was lost, and the other queue's sweeper left it alone"
