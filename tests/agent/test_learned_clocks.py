"""What a node has learned of its model servers survives its agent."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from gpu_agent.latency_clocks import LatencyClocks, Measured
from gpu_agent.learned_clocks import MOST_KINDS, SAVE_EVERY, LearnedClocks, ServerKind
from services.contracts.clocks import ClockPolicy
from services.core.domain.serving import LatencyLimits
from services.core.policies.freesh.clock_model import MEMORY, ClockSample
from services.core.policies.freesh.miad import LatencyReport
from tests.agent.conftest import Node, eventually
from tests.agent.test_latency_clocks import (
    CLOCKS,
    SERVER,
    TERMS,
    Run,
    a_gang,
    a_report,
    clocks_of,
    devices,
    reporting,
    serving,
    step_under_load_s,
)

KIND = ServerKind(("serve", "--key", "hush"), None, (), 2, "A100", "nvml", LatencyLimits(0.3, 0.15, 7.0))
LEARNED = TERMS.model_copy(update={"policy": ClockPolicy.LEARNED})


def samples(count: int = 60) -> list[ClockSample]:
    found: list[ClockSample] = []
    for at in range(count):
        clock, batch = float(CLOCKS[3 + 7 * (at % 9)]), 1.0 + at % 5
        report = LatencyReport(SERVER.prefill_s(0, clock), SERVER.step_s(batch, clock), 4.0 if at % 2 else None)
        found.append(ClockSample(clock, batch, report, SERVER.power_w(clock, is_busy=True), 0.01, 90.0, 50.0, 1.0))
    return found


async def taught(folder: Path, count: int = 60) -> LearnedClocks:
    learned = LearnedClocks(folder)
    for each in samples(count):
        learned.learner(KIND, each)
    await learned.save()
    return learned


async def test_the_next_agent_knows_what_the_last_one_learned(tmp_path: Path) -> None:
    before = (await taught(tmp_path)).learner(KIND)
    after = LearnedClocks(tmp_path).learner(KIND)

    assert after.samples == before.samples
    assert after.fitted == before.fitted is not None
    assert LearnedClocks(tmp_path).learner(replace(KIND, driver="simulated")).known == 0


async def test_unknown_powers_stay_unknown(tmp_path: Path) -> None:
    learned = LearnedClocks(tmp_path)
    learned.learner(KIND, ClockSample(600.0, 2.0, LatencyReport(tbt_s=0.05)))
    await learned.save(everything=True)

    [found] = LearnedClocks(tmp_path).learner(KIND).samples
    assert found.power_w != found.power_w
    assert (found.report, found.tokens_per_request) == (LatencyReport(tbt_s=0.05), None)


async def test_files_are_written_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    learned = await taught(tmp_path / "new", SAVE_EVERY - 1)
    assert not (tmp_path / "new").exists()
    await learned.save(everything=True)
    [file] = (tmp_path / "new").iterdir()
    assert len(json.loads(file.read_bytes())["samples"]) == SAVE_EVERY - 1
    assert b"hush" not in file.read_bytes()
    assert file.stat().st_mode & 0o077 == 0

    file.unlink()
    await learned.save(everything=True)
    assert not file.exists(), "nothing is new"


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-20],
        lambda content: b"",
        lambda content: b"[]",
        lambda content: b'{"version": 1}',
        lambda content: b'{"version": 1, "samples": [[1, 2, 3]]}',
        lambda content: b'{"version": 1, "samples": 7}',
        lambda content: content.replace(b'"version":1', b'"version":2'),
        lambda content: orjson.dumps({"version": 1, "samples": [[600, 1, None, -0.1, None, 1, 0, None, 0, 1]]}),
        lambda content: orjson.dumps({"version": 1, "samples": [[600, 1, None, None, None, 1, 0, None, 0, 1]]}),
        lambda content: orjson.dumps({"version": 1, "samples": json.loads(content)["samples"] * MEMORY}),
        lambda content: content + b" " * 2**20,
    ],
)
async def test_a_broken_file_is_ignored_and_overwritten(tmp_path: Path, damage: Any) -> None:
    await taught(tmp_path)
    [file] = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))

    learned = LearnedClocks(tmp_path)
    assert learned.learner(KIND).known == 0
    for each in samples():
        learned.learner(KIND, each)
    await learned.save()
    assert LearnedClocks(tmp_path).learner(KIND).known == 60


async def test_a_folder_that_cannot_be_written_loses_no_clock(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    learned = await taught(tmp_path / "file")

    assert learned.learner(KIND).fitted is not None


async def test_the_kinds_written_last_are_kept(tmp_path: Path) -> None:
    learned = LearnedClocks(tmp_path)
    for gpus in range(MOST_KINDS + 3):
        kind = replace(KIND, gpus=gpus)
        learned.learner(kind, samples()[0])
        await learned.save(everything=True)
        os.utime(tmp_path / f"{kind.digest}.json", ns=(gpus, gpus))

    found = {path.stem for path in tmp_path.glob("*.json")}
    assert found == {replace(KIND, gpus=gpus).digest for gpus in range(3, MOST_KINDS + 3)}


def under_load(clock: float, busy: bool = True) -> dict[str, Any]:
    """Return a second of 200 tokens, or of 10."""
    tokens, tbt_s = (200, step_under_load_s(clock)) if busy else (10, SERVER.step_s(1, clock))
    ttft = {"first_tokens": 2, "mean_ttft_ms": 1e3 * SERVER.prefill_s(0.0, clock), "mean_wait_ms": 0.0}
    return {"tbt_ms": 1e3 * tbt_s, "tokens": tokens, **ttft}


def after_learning(folder: Path) -> LearnedClocks:
    """Return what a node has learned in a minute, read from its files."""
    learned = LearnedClocks(folder)
    run, clock = Run(learned=learned), float(CLOCKS[-1])
    for _ in range(60):
        run.measured = Measured(SERVER.power_w(clock, is_busy=True))
        [found] = run.second(a_report(terms=LEARNED, **under_load(clock)))
        assert found is not None
        clock = found
    asyncio.run(learned.save(everything=True))
    return LearnedClocks(folder)


def test_the_learned_clock_is_there_with_the_first_report_after_a_restart(tmp_path: Path) -> None:
    now, fresh = Run(learned=after_learning(tmp_path)), Run()
    for run in (now, fresh):
        run.measured = Measured(SERVER.power_w(1_410, is_busy=True))

    [known], [unknown] = (run.second(a_report(terms=LEARNED, **under_load(1_410))) for run in (now, fresh))

    assert unknown == 1_305, "MIAD's first step"
    assert known is not None
    assert known < 1_000
    assert now.clocks.describe(now.now_s)[0]["model"]["unused"] is None
    assert fresh.clocks.describe(fresh.now_s)[0]["model"]["unused"] == "few_samples"


def test_a_dry_run_shows_the_learned_clock_where_the_model_is_known(tmp_path: Path) -> None:
    terms = LEARNED.model_copy(update={"dry_run": True})
    now, fresh = Run(learned=after_learning(tmp_path)), Run()
    for run in (now, fresh):
        for _ in range(40):
            run.measured = Measured(SERVER.power_w(1_410, is_busy=True), 1_410)
            assert run.second(a_report(terms=terms, **under_load(1_410))) == []

    assert (now.clocks.wanted_mhz(0) or 9_999) < 1_000
    assert fresh.clocks.wanted_mhz(0) == 1_305
    model = fresh.clocks.describe(fresh.now_s)[0]["model"]
    assert (model["samples"], model["clocks"], model["unused"]) == (40, 1, "few_clocks")


def test_a_dry_run_learns_from_clocks_that_busy_devices_chose_themselves() -> None:
    """Devices below their power limit change their clock by themselves; idle ones have one that says nothing."""
    terms = LEARNED.model_copy(update={"dry_run": True})
    run = Run()
    for second in range(40):
        clock = CLOCKS[-1 - 10 * (second % 5)]
        run.measured = Measured(SERVER.power_w(clock, is_busy=True), clock + 3)
        run.second(a_report(terms=terms, **under_load(clock)))
        run.measured = Measured(60.0, 210)
        run.second(a_report(terms=terms, **under_load(1_410, busy=False)))
        run.measured = Measured(60.0)
        run.second(a_report(terms=terms, **under_load(clock)))

    model = run.clocks.describe(run.now_s)[0]["model"]
    assert (model["samples"], model["clocks"]) == (40, 5)
    assert model["error"] < 0.01


def test_servers_of_one_pool_share_what_they_learn_and_those_with_another_environment_do_not() -> None:
    def gang(job: str, **environment: str) -> Any:
        found = a_gang(job, (0,))
        assert found.start is not None
        spec = found.start.spec.model_copy(update={"environment": environment})
        return replace(found, start=found.start.model_copy(update={"spec": spec}))

    own = {"WATTSHIFT_INSTANCE": "i2"}
    run = Run(gang("job_1", MODEL="a"), gang("job_2", MODEL="a", **own), gang("job_3", MODEL="b"))
    run.second(*(a_report(job=job, terms=LEARNED, **under_load(1_410)) for job in ("job_1", "job_2", "job_3")))

    found = {each["job_id"]: each["model"]["samples"] for each in run.clocks.describe(run.now_s)}
    assert found == {"job_1": 1, "job_2": 2, "job_3": 1}


def test_a_device_of_which_nothing_is_read_teaches_no_power(tmp_path: Path) -> None:
    learned = LearnedClocks(tmp_path)
    clocks = LatencyClocks(devices(CLOCKS, CLOCKS), "nvml", learned, "on", stale_s=5.0)
    clocks.take(a_report(terms=LEARNED), 0.0)
    clocks.decide([a_gang()], lambda _: Measured(float("nan")), 0.0)

    assert clocks.describe(0.0)[0]["model"]["samples"] == 1


async def test_an_agent_goes_on_with_what_the_one_before_it_learned(node: Node) -> None:
    async def learns() -> int:
        """Let an agent decide twice; return the samples on disk once it has ended."""
        await node.start()
        await eventually(lambda: node.plane.state(f"{job}.1") == "running")
        async with reporting(node, job, {"terms": LEARNED}):
            await eventually(lambda: clocks_of(node)[0] == 1200)
        await node.stop()
        [file] = (node.state_dir / "learned-clocks").iterdir()
        return len(json.loads(file.read_bytes())["samples"])

    await node.start()
    job = await serving(node)
    await node.stop()
    first = await learns()
    assert first >= 2
    assert await learns() >= first + 2
