"""The system in one loop, and the database under it, whose statements read virtual time and wait without the loop."""

from __future__ import annotations

import asyncio
import datetime
import gc
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from typing import Any

import asyncpg
import pytest
from asyncpg.exceptions import DeadlockDetectedError, LockNotAvailableError

from services.db.database import CONNECTION_ERRORS, Database, connect
from services.db.engine import create_engine
from services.standalone.process import StackError
from tests.simulation import faults, system
from tests.simulation.loop import Choices, Simulation
from tests.simulation.postgres import NO_LOSSES, URL, Losses, Server, SimulatedPostgres, server_at
from tests.simulation.scenarios import ALL, SCENARIOS
from tests.simulation.search import play_once, search, unpack
from tests.simulation.test_schedules import TOKENS, scenario
from tests.support.servers import ROOT

SERVES, CHEAP = 9, 2
"""Seeds of short schedules; a model server becomes ready in the first one."""
CPU_S = 4.0
BEGAN = datetime.datetime.fromtimestamp(1_700_000_000, datetime.UTC)

LEFT_OVER = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Connections of processes that were killed end when Python clears away, and say so."""


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """The server of the tests' process, also for the scenario."""
    try:
        url: str = request.getfixturevalue("postgres_url")
    except (StackError, PackageNotFoundError) as error:
        pytest.skip(f"there is no PostgreSQL: {error}")
    found = server_at(url)
    logging.disable(logging.CRITICAL)  # to keep what is said of each loss takes longer than the run
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(system, "server", lambda: found)
        yield found
    logging.disable(logging.NOTSET)


opened: list[asyncpg.Connection] = []
"""Kept until a run is over, as a process does that is killed."""


@pytest.fixture(autouse=True)
def _clear_away() -> Iterator[None]:
    """Have what killed processes have left end with the test that killed them, and begin nothing in another loop."""
    asked: list[str] = []

    def get_event_loop(_: Any) -> None:
        asked.append("".join(traceback.format_stack(limit=12)))
        raise RuntimeError("no loop runs")

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patching:
        patching.setattr(asyncio.DefaultEventLoopPolicy, "get_event_loop", get_event_loop)
        yield
        opened.clear()
        warnings.simplefilter("ignore")
        patching.setattr(sys, "unraisablehook", lambda _: None)
        gc.collect()
    assert not asked, asked[0]


async def connection_of(name: str, **settings: str) -> asyncpg.Connection:
    opened.append(await connect(URL, application_name=name, **settings))
    return opened[-1]


def run(
    server: Server,
    play: Callable[[Simulation, SimulatedPostgres], Coroutine[Any, Any, None]],
    seed: int | None = None,
) -> Simulation:
    """Run something on a database of its own, as an ordinary loop would or with a seed."""
    simulation = Simulation(Choices([] if seed is None else seed))

    async def whole() -> None:
        opened.clear()
        database = SimulatedPostgres(simulation, server)
        try:
            await play(simulation, database)
        finally:
            database.close()

    simulation.run(whole())
    return simulation


def test_what_connects_on_its_way_out_leaves_nothing_to_another_loop(server: Server) -> None:
    async def play(simulation: Simulation, _: SimulatedPostgres) -> None:
        engine = create_engine(URL, application_name="test")

        async def work() -> None:
            try:
                while True:
                    with suppress(asyncio.CancelledError):
                        await asyncio.Event().wait()
            finally:
                async with engine.connect():
                    pass

        process = simulation.process()
        process.start(work())
        await asyncio.sleep(1)
        process.kill()

    run(server, play)


def test_sql_tells_virtual_time_also_in_defaults(server: Server) -> None:
    told: list[Any] = []

    async def play(simulation: Simulation, database: SimulatedPostgres) -> None:
        connection = await connection_of("test")
        await asyncio.sleep(5)
        async with connection.transaction():
            await connection.execute("INSERT INTO tenants (id, limits) VALUES ('t', '{}')")
            await asyncio.sleep(60)
            told.extend(*await connection.fetch("SELECT now(), clock_timestamp(), statement_timestamp()"))
        told.append(await connection.fetchval("SELECT created_at FROM tenants"))
        database.clock.ahead_s = -3_600
        told.append(await connection.fetchval("SELECT now()"))

    run(server, play)
    assert [(each - BEGAN).total_seconds() for each in told] == [5, 65, 65, 5, 65 - 3_600]


def test_a_statement_that_waits_for_a_lock_suspends_its_task_alone(server: Server) -> None:
    order: list[Any] = []

    async def play(simulation: Simulation, _: SimulatedPostgres) -> None:
        database = await Database.open(URL, size=2)

        async def second() -> None:
            async with database.transaction() as connection:
                await connection.execute("UPDATE tenants SET accepted_jobs = accepted_jobs + 1")
                order.append(("second", simulation.loop.time()))

        async with database.connection() as connection:
            await connection.execute("INSERT INTO tenants (id, limits) VALUES ('t', '{}')")
        async with database.transaction() as connection:
            await connection.execute("UPDATE tenants SET accepted_jobs = accepted_jobs + 1")
            waiting = asyncio.create_task(second())
            await asyncio.sleep(3)
            order.append(("first", simulation.loop.time()))
        await waiting
        async with database.connection() as connection:
            order.append(await connection.fetchval("SELECT accepted_jobs FROM tenants"))

    run(server, play)
    assert order == [("first", 3.0), ("second", 3.0), 2]


def test_a_circle_of_locks_is_broken(server: Server) -> None:
    failed: list[str] = []

    async def play(_: Simulation, __: SimulatedPostgres) -> None:
        database = await Database.open(URL, size=2)

        async def lock(first: int, second: int) -> None:
            try:
                async with database.transaction() as connection:
                    await connection.execute("SELECT pg_advisory_xact_lock($1)", first)
                    await asyncio.sleep(1)
                    await connection.execute("SELECT pg_advisory_xact_lock($1)", second)
            except DeadlockDetectedError:
                failed.append(f"{first}, then {second}")

        await asyncio.gather(lock(1, 2), lock(2, 1))

    run(server, play)
    assert len(failed) == 1, "whoever closed the circle, and nobody else"


@pytest.mark.parametrize("limit", ["command", "lock"])
def test_a_wait_for_a_lock_ends_when_its_time_is_over(server: Server, limit: str) -> None:
    raised: list[str] = []

    async def play(simulation: Simulation, _: SimulatedPostgres) -> None:
        holder = await connection_of("holder")
        waits = await connection_of("waits", **({"lock_timeout": "5s"} if limit == "lock" else {}))
        await holder.execute("SELECT pg_advisory_lock(1)")
        try:
            await waits.execute("SELECT pg_advisory_lock(1)")
        except (TimeoutError, LockNotAvailableError) as error:
            raised.append(type(error).__name__)
        assert await waits.fetchval("SELECT 1") == 1
        simulation.check("time", simulation.loop.time() == (5 if limit == "lock" else 30), str(simulation.loop.time()))

    run(server, play)
    assert raised == ["LockNotAvailableError" if limit == "lock" else "TimeoutError"]


def test_what_a_killed_process_had_open_is_undone(server: Server) -> None:
    async def play(simulation: Simulation, database: SimulatedPostgres) -> None:
        async def work() -> None:
            connection = await connection_of("killed")
            await connection.execute("SELECT pg_advisory_lock(7)")
            async with connection.transaction():
                await connection.execute("INSERT INTO tenants (id, limits) VALUES ('t', '{}')")
                await asyncio.Event().wait()

        process = simulation.process()
        process.start(work())
        await asyncio.sleep(1)
        process.kill()
        database.died(process)
        other = await connection_of("other")
        await other.execute("SELECT pg_advisory_lock(7)")
        await other.execute("INSERT INTO tenants (id, limits) VALUES ('t', '{}')")

    run(server, play)


def test_connections_are_counted_until_they_are_closed_and_known_for_unused(server: Server) -> None:
    seen: list[Any] = []

    async def play(simulation: Simulation, database: SimulatedPostgres) -> None:
        connection = await connection_of("test")
        await asyncio.sleep(30)
        seen.append(database.unused(20))
        await connection.execute("SELECT 1")
        seen.append(database.unused(20))
        began_s = simulation.loop.time()
        await connection.close()
        seen.append(database.most["test"])
        await connection_of("test")
        seen.append(database.most["test"])
        simulation.check("a server ends what says goodbye at once", simulation.loop.time() - began_s < 1)

    run(server, play)
    assert seen == [["test"], [], 1, 1]


def test_the_answer_to_a_commit_may_be_lost_before_and_after_it_took_effect(server: Server) -> None:
    outcomes: set[tuple[bool, bool]] = set()

    async def play(_: Simulation, database: SimulatedPostgres) -> None:
        for number in range(20):
            database.losses = NO_LOSSES
            connection = await connection_of("test")
            database.losses = Losses(commit=0.8)
            is_answered = True
            try:
                async with connection.transaction():
                    await connection.execute(f"INSERT INTO tenants (id, limits) VALUES ('t{number}', '{{}}')")
            except CONNECTION_ERRORS:
                is_answered = False
            outcomes.add((is_answered, bool(database.rows(f"SELECT 1 FROM tenants WHERE id = 't{number}'"))))

    run(server, play, seed=1)
    assert outcomes == {(True, True), (False, False), (False, True)}


@LEFT_OVER
@pytest.mark.parametrize(("name", "seeds"), [("system", [SERVES]), ("batches", range(200)), ("cells", range(200))])
def test_no_schedule_breaches_anything(server: Server, name: str, seeds: Sequence[int]) -> None:
    found = search(name, ALL[name], seeds, cpu_s=CPU_S)
    assert found is None, f"{found.breach}\n./test --simulate --token {found.token}"


@LEFT_OVER
@pytest.mark.parametrize("each", [it for it in TOKENS if scenario(it) not in SCENARIOS], ids=lambda each: each["found"])
def test_a_schedule_that_failed_once_does_not_any_more(server: Server, each: dict[str, str]) -> None:
    _, breach = play_once(ALL[scenario(each)], unpack(each["token"].partition(":")[2]))
    assert breach is None


@LEFT_OVER
@pytest.mark.parametrize(
    ("name", "before", "planted"),
    [
        ("the ledger has what devices drew", "amounts = usage.gpu", "amounts = 2 * usage.gpu"),
        ("a node's time is in the ledger once", "in sorted(distinct.items())", "in sorted(distinct.items())[:1]"),
    ],
)
def test_what_must_hold_of_the_ledger_does_not_where_a_fault_is_planted(
    server: Server, monkeypatch: pytest.MonkeyPatch, name: str, before: str, planted: str
) -> None:
    def first_breach() -> str | None:
        mine = server.again()
        monkeypatch.setattr(system, "server", lambda: mine)
        faults.plant(*faults.by_hand(ROOT, "services/telemetry/ledger.py", before, planted))
        _, breach = play_once(system.play, CHEAP)
        return breach and breach.name

    assert faults.apart(first_breach) == name


@LEFT_OVER
def test_a_schedule_of_the_system_repeats_to_the_last_step(server: Server) -> None:
    once, breach = play_once(system.play, CHEAP)
    assert breach is None
    again, _ = play_once(system.play, once.choices.made)
    assert once.choices.made == again.choices.made
    assert (once.loop.steps, once.loop.time()) == (again.loop.steps, again.loop.time())
