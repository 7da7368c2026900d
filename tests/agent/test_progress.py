"""Progress by file, log and post, from jobs that may write anything at all."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import aiohttp
import pytest

from gpu_agent import progress
from gpu_agent.progress import FileReader, LogReader, ProgressReader, Report, parse_report, search_within
from services.contracts.jobs import Progress
from tests.agent.conftest import Node, eventually
from tests.agent.stand_in import headers_to
from tests.agent.test_ranks import SLEEP

RUNAWAY = r"(a+)+$(?P<done>\d)"


@pytest.mark.parametrize(
    ("line", "report"),
    [
        (b'{"done": 3}', Report(3.0)),
        (b'{"done": "4.5", "total": 10, "gpu_load": 7}', Report(4.5, 10.0, 1.0)),
        (b'{"gpu_load": 0.25}', Report(None, None, 0.25)),
        (
            b'{"saved_at": 5, "save_s": 2, "saves_when_asked": true}',
            Report(None, saved_at=5, save_s=2, saves_when_asked=True),
        ),
        (b'{"done": 1, "saved_at": "x", "save_s": -1, "saves_when_asked": 1}', Report(1.0)),
        (b'{"done": -1}', None),
        (b'{"done": true}', None),
        (b'{"done": NaN}', None),
        (b'{"done": 1e400}', None),
        (b'{"done": "nan"}', None),
        (b'{"done": {}}', None),
        (b"[1]", None),
        (b"\xff\xfe", None),
        (b"", None),
    ],
)
def test_one_line_says_something_or_nothing(line: bytes, report: Report | None) -> None:
    assert parse_report(line) == report


def test_the_last_complete_line_counts(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    reader = FileReader(path)
    assert reader.read() is None
    path.write_bytes(b'{"done": 1}\n{"done": 2}\nnonsense\n{"done": 3')
    assert reader.read() == Report(2.0)
    assert reader.read() is None, "nothing new"
    with path.open("ab") as file:
        file.write(b"}\n")
    assert reader.read() == Report(3.0)
    path.write_bytes(b"x" * 300_000 + b'\n{"done": 4}\n')
    assert reader.read() == Report(4.0), "however long the line before it"
    path.unlink()
    path.write_bytes(b'{"done": 5}\n')
    assert reader.read() == Report(5.0)


def test_what_is_not_a_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "real").write_bytes(b'{"done": 1}\n')
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name in ("pipe", "link"):
        assert FileReader(tmp_path / name).read() is None


def test_the_newest_match_in_the_log_counts(tmp_path: Path) -> None:
    log = tmp_path / "stdout"
    log.write_text("epoch 1/9\nepoch 2/9\nnoise\nepoch 3")
    reader = LogReader(log, r"epoch (?P<done>\d+)/(?P<total>\d+)")
    assert reader.read() == Report(2.0, 9.0)
    assert reader.read() is None
    with log.open("a") as file:
        file.write("/9\n")
    assert reader.read() == Report(3.0, 9.0), "a line written in two pieces"


def test_a_flood_of_output_is_not_run_after(tmp_path: Path) -> None:
    log = tmp_path / "stdout"
    reader = LogReader(log, r"epoch (?P<done>\d+)")
    with log.open("ab") as file:
        file.write(b"x" * 5_000_000 + b"\n")
        file.write(b"".join(b"line %d\n" % number for number in range(300_000)) + b"epoch 7\n")
    began = time.thread_time()
    assert reader.read() == Report(7.0)
    assert time.thread_time() - began < 0.2


def test_a_line_without_an_end_is_searched_once(tmp_path: Path) -> None:
    log = tmp_path / "stdout"
    log.write_bytes(b"epoch 1 " + b"x" * 100_000)
    reader = LogReader(log, r"epoch (?P<done>\d+)")
    assert [reader.read() for _ in range(20)].count(Report(1.0)) == 1
    with log.open("ab") as file:
        file.write(b"epoch 2\nepoch 3\n")
    assert reader.read() == Report(3.0)


def test_a_search_without_an_end_is_broken_off() -> None:
    began = time.thread_time()
    with pytest.raises(TimeoutError):
        search_within(re.compile(RUNAWAY), "a" * 60 + "b", 0.05)
    assert time.thread_time() - began < 0.5


def test_the_time_of_other_threads_is_not_the_searchs(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([0.0, 0.01, 0.02, 1.0])
    monkeypatch.setattr(progress, "thread_time", lambda: next(looks))
    with pytest.raises(TimeoutError):
        search_within(re.compile(RUNAWAY), "a" * 60 + "b", 0.05)
    assert list(looks) == [], "the timer went off before the time of this thread was over, and was set again"


def test_a_pattern_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    log = tmp_path / "stdout"
    reader = ProgressReader(Progress(source="log", pattern=RUNAWAY), tmp_path / "progress", log)
    with log.open("ab") as file:
        for _ in range(3):
            file.write(b"a" * 60 + b"b\n")
            file.flush()
            assert reader.poll() is False
    assert "too long" in reader.problem


def test_all_lines_of_a_read_share_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, took_s, log = 0.0, 0.0, tmp_path / "stdout"

    def takes_6_ms(_pattern: re.Pattern[str], _line: str, seconds: float) -> None:
        nonlocal now_s, took_s
        spent_s = min(0.006, max(seconds, 0))
        now_s, took_s = now_s + spent_s, took_s + spent_s
        if seconds < 0.006:
            raise TimeoutError

    monkeypatch.setattr(progress, "thread_time", lambda: now_s)
    monkeypatch.setattr(progress, "search_within", takes_6_ms)
    log.write_bytes(b"")
    reader = LogReader(log, r"epoch (?P<done>\d+)")
    for number in range(1, 4):  # no line alone takes long
        with log.open("ab") as file:
            file.write(b"a\n" * 100)
        assert not reader.problem
        assert reader.read() is None
        assert took_s == pytest.approx(number * 0.02), "what a read may take, and no more"
        now_s += 100
    assert "too long" in reader.problem
    with log.open("ab") as file:
        file.write(b"epoch 1\n")
    assert reader.read() is None
    assert took_s == pytest.approx(0.06)


@pytest.mark.parametrize("left_s", [-1.0, 0.0, 1e-9])
def test_without_time_left_nothing_is_searched(left_s: float) -> None:
    with pytest.raises(TimeoutError):
        search_within(re.compile("a"), "a", left_s)


async def test_an_agent_outlives_a_runaway_pattern(node: Node) -> None:
    await node.start()
    progress = {"source": "log", "pattern": RUNAWAY}
    command = "while :; do echo aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab; sleep 0.1; done"
    gang = await node.run("sh", "-c", command, progress=progress)
    await eventually(lambda: (rank := node.plane.rank(gang)) is not None and "too long" in (rank.detail or ""))
    assert node.plane.state(gang) == "running"


async def test_progress_is_reported_at_once_and_survives_the_agent(node: Node) -> None:
    node.plane.heartbeat_interval_s = 0.5
    await node.start()
    by_file = await node.run("sh", "-c", "echo '{\"done\": 5}' > $WATTSHIFT_PROGRESS_FILE; sleep 600", devices=[0])
    progress = {"source": "log", "pattern": r"step (?P<done>\d+) of (?P<total>\d+)"}
    by_log = await node.run("sh", "-c", "echo step 6 of 10; sleep 600", progress=progress, devices=[1])
    await eventually(lambda: (_done(node, by_file), _done(node, by_log)) == (5.0, 6.0))
    node.kill()
    await node.start()
    await eventually(lambda: (_done(node, by_file), _done(node, by_log)) == (5.0, 6.0))


async def test_a_job_may_post_its_progress(node: Node) -> None:
    await node.start()
    gang = await node.run(
        "sh", "-c", "echo $WATTSHIFT_PROGRESS_URL; sleep 600", progress={"source": "http"}, devices=[0]
    )
    other = await node.run(*SLEEP, devices=[1])
    await eventually(lambda: node.plane.state(gang) == "running" and node.plane.state(other) == "running")
    await eventually(lambda: (node.rank_dir(gang) / "stdout").read_text())
    url = (node.rank_dir(gang) / "stdout").read_text().strip()
    async with aiohttp.ClientSession() as session:
        for body, status in (({"done": 8}, 204), ({"done": "x"}, 422), ({}, 422)):
            async with session.post(url, json=body) as answer:
                assert answer.status == status
        async with session.post(url[:-1] + ("A" if url[-1] == "_" else "_"), json={"done": 9}) as answer:
            assert answer.status == 404
        not_by_post = json.loads((node.rank_dir(other) / "gang.json").read_text())["token"]
        async with session.post(f"{url.rpartition('/')[0]}/{not_by_post}", json={"done": 9}) as answer:
            assert answer.status == 404
        assert url.startswith(f"http://127.0.0.1:{node.progress_port}/v1/progress/")
        earlier = url.replace(str(node.progress_port), str(node.port))  # as an earlier release told its jobs
        async with session.post(earlier, json={"done": 8}) as answer:
            assert answer.status == 204
        door = f"http://127.0.0.1:{node.progress_port}"
        for path in ("/healthz", "/v1/state", f"/v1/allocations/{gang}/logs", "//v1/progress/x"):
            headers = headers_to(node.id) | {"host": f"127.0.0.1:{node.port}"}
            async with session.get(door + path, headers=headers) as answer:
                assert (answer.status, "operation at this port" in await answer.text()) == (404, True), path
    await eventually(lambda: _done(node, gang) == 8.0)
    node.kill()
    await node.start()
    assert _done(node, gang) == 8.0


def _done(node: Node, gang: str) -> float | None:
    rank = node.plane.rank(gang)
    return rank.progress_done if rank else None


def test_a_save_counts_whatever_lines_follow_it(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    reader = ProgressReader(Progress(), path, tmp_path / "stdout")
    path.write_bytes(b'{"done": 1, "saved_at": 100.5, "save_s": 3}\n{"done": 2}\n')
    assert reader.poll() is True
    assert (reader.last, reader.saved and (reader.saved.saved_at, reader.saved.save_s)) == (Report(2.0), (100.5, 3.0))
    with path.open("ab") as file:
        file.write(b'{"done": 2, "saved_at": 1e12, "saves_when_asked": true}\n')
    assert reader.poll() is False, "a save is no progress"
    assert (reader.saved and reader.saved.saved_at, reader.saves_when_asked) == (100.5, True), "none in the future"
