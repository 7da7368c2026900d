"""Every scenario under some thousand schedules: always the same ones, others each day, and those that failed once."""

from __future__ import annotations

import asyncio
import datetime
import itertools
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from services.router.lanes import Lane, Ticket
from tests.mutation.mutants import Mutant
from tests.simulation import faults, statements
from tests.simulation import search as shortening
from tests.simulation.loop import Simulation
from tests.simulation.scenarios import SCENARIOS
from tests.simulation.search import play_once, search, unpack
from tests.support.servers import ROOT

FIXED, TODAYS = 200, 100_000
CPU_S = 16.0
"""Of all searches here together; the rest of a minute is for the system and for the tests of the search itself."""
TOKENS: list[dict[str, str]] = tomllib.loads((Path(__file__).parent / "tokens.toml").read_text())["found"]


def scenario(each: dict[str, str]) -> str:
    """Return the scenario of what was found."""
    return each["token"].partition(":")[0]


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_no_schedule_breaches_anything(name: str) -> None:
    today = datetime.datetime.now(datetime.UTC).date().toordinal() * TODAYS
    for seeds in (range(FIXED), range(today, today + TODAYS)):
        found = search(name, SCENARIOS[name], seeds, cpu_s=CPU_S / len(SCENARIOS) / 2)
        assert found is None, f"{found.breach}\n./test --simulate --token {found.token}"


@pytest.mark.parametrize(
    "each", [each for each in TOKENS if scenario(each) in SCENARIOS], ids=lambda each: each["found"]
)
def test_a_schedule_that_failed_once_does_not_any_more(each: dict[str, str]) -> None:
    name, _, packed = each["token"].partition(":")
    _, breach = play_once(SCENARIOS[name], unpack(packed))
    assert breach is None


def end(simulation: Simulation) -> list[Any]:
    """Return what a schedule came to, to the last choice and step."""
    return [simulation.loop.steps, simulation.loop.time(), simulation.choices.made]


def test_a_schedule_repeats_to_the_last_step_in_any_process() -> None:
    code = (
        "import json, logging; logging.disable(logging.CRITICAL)\n"
        "from tests.simulation.scenarios import SCENARIOS\nfrom tests.simulation.search import play_once\n"
        "played = {name: play_once(play, 1)[0] for name, play in SCENARIOS.items()}\n"
        "end = lambda each: (each.loop.steps, each.loop.time(), each.choices.made)\n"
        "print(json.dumps({name: end(each) for name, each in played.items()}))"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "1"},  # pytest has another one
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    for name, other in json.loads(elsewhere).items():
        assert end(play_once(SCENARIOS[name], other[2])[0]) == other, name


def withdraw_without_giving_back(self: Lane, ticket: Ticket) -> None:
    """Forget that a place may have been given in the same turn."""
    self.queue.remove(ticket.request.id)


def test_a_planted_fault_is_found_and_its_token_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lane, "_withdraw", withdraw_without_giving_back)
    monkeypatch.setattr(shortening, "MOST_CPU_S", 1.5)
    found = search("router", SCENARIOS["router"], range(2_000))
    assert found is not None
    name, _, packed = found.token.partition(":")
    simulation, breach = play_once(SCENARIOS[name], unpack(packed))
    assert breach is not None
    assert (breach.name, simulation.loop.steps) == (found.breach.name, found.steps)
    assert found.steps < 200, "shortened"


def test_a_breach_that_needs_no_fault_is_no_find(capsys: pytest.CaptureFixture[str]) -> None:
    async def breached(simulation: Simulation) -> None:
        await asyncio.sleep(0)
        simulation.check("nothing is odd", False)

    mutant, source = next(faults.known(ROOT))
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(SCENARIOS, "router", breached)
        assert faults.look_for(mutant, source, 0, {}, 5.0).breach is None
    assert "WITHOUT THE FAULT, TOO: router:" in capsys.readouterr().err


async def forgetful(simulation: Simulation) -> None:
    """Forget an await."""
    asyncio.sleep(1.0)  # pyright: ignore[reportUnusedCoroutine]
    await asyncio.sleep(0)


async def forgetful_in_a_circle(simulation: Simulation) -> None:
    """Forget what only a circle of references still has."""
    circle: list[Any] = [asyncio.sleep(1.0)]
    circle.append(circle)


async def killed(simulation: Simulation) -> None:
    """Kill a process before its task has begun."""
    process = simulation.process()
    process.start(asyncio.sleep(1.0))
    process.kill()
    await asyncio.sleep(2.0)


def test_a_coroutine_that_is_not_awaited_is_a_breach_which_says_where() -> None:
    _, breach = play_once(forgetful, 0)
    assert breach is not None
    assert str(breach).startswith("every coroutine is awaited: sleep (")
    assert f" is forgotten by forgetful ({__file__}:" in str(breach)
    _, breach = play_once(forgetful_in_a_circle, 0)
    assert breach is not None
    assert breach.name == "every coroutine is awaited"
    assert [play_once(killed, seed)[1] for seed in range(20)] == [None] * 20


@pytest.mark.parametrize("at", range(len(faults.KNOWN)), ids=lambda at: faults.KNOWN[at][0])
def test_a_fault_that_no_campaign_of_chaos_found_is_found(at: int) -> None:
    mutant, source = list(faults.known(ROOT))[at]
    assert faults.look_for(mutant, source, at, {}, 60.0).breach is not None


PICKER, METER, ANSWERS = "services/router/picking/picker.py", "gpu_agent/meter.py", "services/router/answers.py"
REGISTRAR, REPORTING = "services/engines/kueue/servers.py", "gpu_agent/reporting.py"
CHOOSES = "a request goes where its lane's rules say", "services/router/lanes.py"
RULE = "choose_server(free, ticket.work, left_s, now_s, ticket.network_s, self._point_gco2_per_kwh)"
BY_HAND = (
    (*CHOOSES, RULE, "free[0]"),
    (*CHOOSES, RULE, "min(free, key=lambda each: each.gco2_per_kwh or 1e9)"),
    (*CHOOSES, RULE, "min(free, key=lambda each: each.costs.end_s(ticket.work, now_s, 0.0))"),
    (*CHOOSES, "self._turns.choose(loads)", "max(loads, key=lambda each: (each.weight, each.id))"),
    (*CHOOSES, "self._passing(ticket, now_s) if each.held < each.limit]", "self._passing(ticket, now_s)]"),
    (
        "no server sees a client's key",
        PICKER,
        "dropped = OURS & self._sent_by_client",
        "dropped = set() & self._sent_by_client",
    ),
    ("a gateway is told what it takes", PICKER, "has_trailers=self._has_request_trailers)", "has_trailers=False)"),
    ("a gateway is told one server", PICKER, "self._told = connection", "self._told = None"),
    (
        "a gateway is told a server that it reaches",
        PICKER,
        "to_server(server.origin.authority",
        "to_server(b'10.0.0.1:1'",
    ),
    (
        "what is registered is what there is",
        REGISTRAR,
        "self._read_at_s + KNOWN_S:",
        "self._read_at_s + 1e9:",
    ),
    (
        "of what others have registered, nothing is touched",
        REGISTRAR,
        "each.name.startswith(prefix)",
        "each.name != 'mine'",
    ),
    ("where a pool cannot be read nothing is removed", REGISTRAR, "} if are_known else ():", "} if True else ():"),
    ("it is told when an answer began", ANSWERS, "turn.first_s = piece_s - received.at_s", "turn.first_s = piece_s"),
    (
        "a request is charged once",
        ANSWERS,
        "        self._outcomes.end(turn, server, 499,",
        "        for _ in '12': self._outcomes.end(turn, server, 499,",
    ),
    (
        "who leaves a server leaves it to who waits",
        "services/router/lanes.py",
        "stuck = self.queue.serve(self.in_service, self._give, time.monotonic())",
        "stuck = set()\n        while (head := self.queue.peek()) and self._give(head):\n            pass",
    ),
    ("a request is counted once", ANSWERS, "finally:\n            now_s", "if True:\n            now_s"),
    (
        "a connection is used again if it is open and nothing is on it",
        "services/router/upstream.py",
        "self.reusable &= not self.complete",
        "pass",
    ),
    (
        "who failed a request is asked last",
        "services/router/apps/queue.py",
        "if ticket.excluded and not any(",
        "if ticket.excluded or any(",
    ),
    (
        "a group has who waits, and as many as it may",
        "gateway/gather.py",
        "if not first.answer.done():",
        "if True:",
    ),
    (
        "an interval ends where GPUs are cut anew",
        METER,
        "self._close(self._owners, self._guests)\n            self._devices =",
        "asyncio.sleep(0)\n            self._devices =",
    ),
    (
        "a connection that may be used again is kept",
        "services/router/upstream.py",
        "if self.complete and self.is_open and not",
        "if self.error and self.is_open and not",
    ),
    (
        "a node is charged for what it drew",
        METER,
        "index, energy_j, source, 1.0, basis)",
        "index, 0.9 * energy_j, source, 1.0, basis)",
    ),
    (
        "a gang is charged for what its devices drew",
        METER,
        "await self._close(owners, guests or {})\n\n    async def recut",
        "await self._close(self._owners, {})\n\n    async def recut",
    ),
    (
        "what was not measured is said to be modelled",
        METER,
        "if booked.fault and elapsed_s > 0:",
        "if booked.fault and elapsed_s < 0:",
    ),
    (
        "a counter that is right is believed",
        METER,
        "if not (booked.fault or by_power.fault or sample.estimated):",
        "if True:",
    ),
    (
        "who is to end hears of it",
        "gpu_agent/ranks.py",
        "if started is not None and self.is_held():",
        "if started is None and self.is_held():",
    ),
    (
        "nothing fails unseen",
        "gpu_agent/gangs.py",
        "except OSError as error:  # a full disk: the next",
        "except KeyError as error:  # the next",
    ),
    (
        "whoever is gone for good is disabled",
        "services/admission/webhooks/sending.py",
        "elif outcome.status == GONE:",
        "elif outcome.status == 411:",
    ),
    (
        "who does not answer in time is stopped",
        "services/serving/controller/advance.py",
        "total_seconds() > probes.ready_timeout_s",
        "total_seconds() > 1e9",
    ),
    ("the log says what is so, and once", "services/kit/command_stream.py", "if not self.problem:", "if True:"),
    ("who has an instance is given no other", "services/router/apps/queue.py", "if is_told:", "if True:"),
    (
        "nobody answers for a server that was asked",
        PICKER,
        "if connection is not None and not connection.status:",
        "if False:",
    ),
    ("a node says what its devices do", REPORTING, "devices=self._readings(),", "devices=self._readings()[:1],"),
    (
        "a GPU is tried as soon as it may be",
        REPORTING,
        "await self._probe_due()",
        "await asyncio.sleep(self.settings.health_interval_s), await self._probe_due()",
    ),
    ("who is cancelled goes no further", "services/kit/tasks.py", "    if is_cancelled:", "    if False:"),
    (
        "a lease is of a gang that has its devices",
        "gpu_agent/gangs.py",
        "if gang.holding:\n                    self._r",
        "if True:\n                    self._r",
    ),
    (
        "every pod has an owner",
        "services/serving/clusters.py",
        "sum(classes.values()) - classes.get(None, 0)",
        "sum(classes.values())",
    ),
    (
        "who uses devices has the state folder",
        "gpu_agent/reporting.py",
        "        await self.meter.close()\n        self.driver.close()\n",
        "        self.driver.close()\n        await self.meter.close()\n",
    ),
    (
        "what is no answer is told",
        "gateway/gather.py",
        'log.exception("submissions.not_carried", entries=len(group))',
        "pass",
    ),
    (
        "what is refused for good is not asked again",
        "services/kit/background/worker.py",
        "if not self._is_away(error) or",
        "if",
    ),
)
"""What must hold, and a fault that was thought of with it: a file, what stands there, what takes its place."""
FIRST = {
    "a counter that is right is believed": 67,
    "who leaves a server leaves it to who waits": 338,
    "where a pool cannot be read nothing is removed": 65,
    "every pod has an owner": 8,
    "nothing fails unseen": 24,
}
"""The seed with which a search begins that would else take longer."""


@pytest.mark.parametrize("planted", BY_HAND, ids=lambda planted: planted[0])
def test_what_must_hold_does_not_where_a_fault_is_planted(planted: tuple[str, str, str, str]) -> None:
    name, *fault = planted

    def first_breaches() -> set[str]:
        mutant, source = faults.by_hand(ROOT, *fault)
        faults.plant(mutant, source)
        found: set[str] = set()
        first = FIRST.get(name, 0)
        for seed, scenario_ in itertools.product(range(first, first + 1_000), faults.SCENARIOS_OF[mutant.path]):
            _, breach = play_once(SCENARIOS[scenario_], seed)
            found |= {breach.name} if breach else set()
            if name in found:
                break
        return found

    assert name in faults.apart(first_breaches)


def test_any_number_of_drawn_faults_has_each_rooms_share(monkeypatch: pytest.MonkeyPatch) -> None:
    few = ("services/kit/tasks.py", "services/kit/edge/keys.py", "services/kit/worker_pulse.py")
    monkeypatch.setattr(faults, "SCENARIOS_OF", {path: faults.SCENARIOS_OF[path] for path in few})

    def drawn(seed: int) -> list[Mutant]:
        return [mutant for mutant, _ in itertools.islice(faults.in_order(ROOT, "services/kit", seed), 12)]

    five = drawn(5)
    assert {faults.ROOM_OF[each.path] for each in five} == {"agent", "edge", "work"}
    names = [each.name for each in five]
    assert len(set(names)) == 12
    assert names != [each.name for each in drawn(6)]


def test_what_is_judged_equivalent_is_still_there() -> None:
    for path, within, _, what in faults.JUDGED:
        lines = map(str.strip, (ROOT / path).read_text().splitlines())
        assert what in lines, within
        assert f"def {within.rpartition('.')[2]}(" in (ROOT / path).read_text() or not within, within
        assert path in {*faults.SCENARIOS_OF, *(path for paths in statements.ROOMS.values() for path in paths)}
