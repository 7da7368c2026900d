"""Files of a job that has ended: read as its account, as it saw them, for as long as they are there."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp
import pytest

from gpu_agent import kept_files, trees
from gpu_agent.kept_files import KeptFiles
from gpu_agent.ranks import RankFolder
from gpu_agent.settings import AgentSettings
from services.contracts.commands import StartGang
from services.contracts.jobs import JobSpec
from services.contracts.sources import Source
from services.kit.problems import ProblemError
from tests.agent.conftest import Node, eventually
from tests.agent.test_exec import SLEEP, headers
from tests.agent.test_spaces import Host, host

__all__ = ["host"]

SECRET = "of another tenant"


def read_events(body: bytes) -> tuple[bytes, bytes, int | None]:
    """Return standard output, standard error and exit status."""
    events: list[dict[str, Any]] = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: ")]
    assert events[0]["type"] == "started"
    found = {
        stream: b"".join(base64.b64decode(event["data"]) for event in events if event.get("stream") == stream)
        for stream in ("stdout", "stderr")
    }
    return found["stdout"], found["stderr"], events[-1].get("code")


def files_of(archive: bytes) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        return {each.name: file.read().decode() for each in members if (file := members.extractfile(each))}


async def read(node: Node, gang: str, path: str) -> tuple[int, bytes]:
    url = f"http://127.0.0.1:{node.port}/v1/allocations/{gang}/files"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json={"path": path}, headers=headers(node)) as answer,
    ):
        return answer.status, await answer.read()


def limits(sessions: int = 1) -> AgentSettings:
    return AgentSettings(node_id="n0", exec_sessions=sessions, exec_idle_s=60.0, exec_longest_s=60.0)


async def test_what_a_job_leaves_is_read_after_its_end(node: Node) -> None:
    await node.start()
    gang = await node.run("sh", "-c", "mkdir -p results/deep; echo loss >results/deep/log; echo x >-rf; exit 3")
    await eventually(lambda: node.plane.state(gang) == "exited")
    for is_released in (False, True):
        if is_released:
            node.plane.named.clear()
            await eventually(lambda: node.plane.rank(gang) is None)
        status, body = await read(node, gang, "results/")
        archive, said, code = read_events(body)
        assert (status, files_of(archive), said, code) == (200, {"results/deep/log": "loss\n"}, b"", 0)
        assert files_of(read_events((await read(node, gang, "results/deep/log"))[1])[0]) == {"log": "loss\n"}
        assert files_of(read_events((await read(node, gang, "-rf"))[1])[0]) == {"-rf": "x\n"}
    _, said, code = read_events((await read(node, gang, "nothing"))[1])
    assert code == 2
    assert b"nothing: Cannot stat: No such file or directory" in said


async def test_a_large_file_comes_whole_and_a_reader_that_leaves_frees_its_place(node: Node) -> None:
    await node.start(GPU_AGENT_EXEC_SESSIONS="1")
    gang = await node.run("sh", "-c", "head -c 30000000 /dev/zero | tr '\\0' x >big")
    await eventually(lambda: node.plane.state(gang) == "exited")
    url = f"http://127.0.0.1:{node.port}/v1/allocations/{gang}/files"
    async with aiohttp.ClientSession() as session:
        answer = await session.post(url, json={"path": "big"}, headers=headers(node))
        await answer.content.readline()
        assert (await read(node, gang, "big"))[0] == 429
        answer.close()
    archive = b""

    async def whole() -> bool:
        nonlocal archive
        status, body = await read(node, gang, "big")
        archive = read_events(body)[0] if status == 200 else b""
        return status == 200

    async with asyncio.timeout(60):
        while not await whole():
            pass
    assert files_of(archive) == {"big": "x" * 30_000_000}


async def test_a_reader_that_leaves_before_the_first_event_frees_its_place(host: Host) -> None:
    rank, start = ended(host, "job", "sh", "-c", "head -c 1000000 /dev/zero >big")
    files = KeptFiles(host.launcher, limits())
    with patch.object(kept_files, "read_start", lambda _: start):
        await files.open(rank, "big")  # of which nothing is taken
        gc.collect()
        await eventually(lambda: not files._reading)  # pyright: ignore[reportPrivateUsage]
        archive = b"".join([event async for event in await files.open(rank, "big")])
    assert len(files_of(read_events(archive)[0])["big"]) == 1_000_000


async def test_files_are_not_read_while_the_job_runs_nor_where_there_are_none(node: Node) -> None:
    await node.start()
    gang = await node.run(*SLEEP)
    await eventually(lambda: node.plane.state(gang) == "running")
    status, body = await read(node, gang, "x")
    assert (status, json.loads(body)["code"]) == (409, "conflict")
    assert "have not ended" in json.loads(body)["detail"]
    assert (await read(node, "..", "x"))[0] in (403, 404)
    for name in (".hidden", "job_none.1"):
        status, body = await read(node, name, "x")
        assert status == 409
    assert (
        "no longer has the folder of this job. `wattshift submit --follow --results PATH`" in json.loads(body)["detail"]
    )
    for path in ("", "/", "//"):
        assert (await read(node, gang, path))[0] == 422


def ended(host: Host, name: str, *command: str, **spec: Any) -> tuple[RankFolder, StartGang]:
    rank, process = host.start(name, *command, **spec)
    process.wait()
    start = StartGang(
        allocation_id=name,
        job_id=name,
        generation=1,
        tenant_id="t",
        spec=JobSpec.model_validate({"name": "x", "command": list(command), **spec}),
        devices=[0],
        node_rank=0,
        nnodes=1,
        world_size=1,
        rank_offset=0,
        master_addr="127.0.0.1",
        master_port=29_500,
    )
    return rank, start


async def got(host: Host, rank: RankFolder, start: StartGang, path: str) -> tuple[dict[str, str], str, int | None]:
    files = KeptFiles(host.launcher, limits())
    with patch.object(kept_files, "read_start", lambda _: start):
        body = b"".join([event async for event in await files.open(rank, path)])
    archive, said, code = read_events(body)
    return files_of(archive) if archive else {}, said.decode(), code


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
async def test_only_what_the_job_itself_could_read_is_read(host: Host) -> None:
    closed = host.folder / "data" / "closed"
    closed.mkdir(mode=0o700)
    (closed / "secret").write_text(SECRET)
    other, _ = ended(host, "other", "sh", "-c", f"echo '{SECRET}' >mine; chmod 644 mine")
    script = f"ln -s {closed} link; ln -s {other.path}/scratch beside; echo own >own; ls /tmp | wc -l >/tmp/there"
    rank, start = ended(host, "job", "sh", "-c", script)

    assert await got(host, rank, start, "own") == ({"own": "own\n"}, "", 0)
    for path in ("link/secret", f"{closed}/secret", "beside/mine", f"{other.path}/scratch/mine", "/etc/shadow"):
        files, said, code = await got(host, rank, start, path)
        assert (files, code) == ({}, 2), path
        assert "No such file" in said or "Permission denied" in said
    assert (await got(host, rank, start, "/tmp/there"))[2] == 2, "its temporary folder went with its processes"
    whole = await got(host, rank, start, str(rank.path / "scratch"))
    assert SECRET not in str(whole)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
async def test_a_folder_of_its_user_is_read_wherever_it_is(host: Host) -> None:
    work = host.folder / "work"
    work.mkdir(mode=0o777)
    work.chmod(0o777)
    rank, start = ended(host, "job", "sh", "-c", "echo 1 >result", working_dir=str(work))

    assert await got(host, rank, start, "result") == ({"result": "1\n"}, "", 0)
    trees.remove(work)
    with pytest.raises(ProblemError, match=f"working folder {work} is gone. `wattshift submit"):
        await got(host, rank, start, "result")


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
async def test_what_a_job_was_submitted_with_is_said_to_be_gone(host: Host) -> None:
    rank, start = ended(host, "job", "true")
    start = start.model_copy(update={"spec": start.spec.model_copy(update={"source": Source(upload="0" * 64)})})

    with pytest.raises(ProblemError, match=r"uploaded or cloned folder is removed .* --results PATH"):
        await got(host, rank, start, "x")


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
async def test_of_a_container_only_what_was_of_the_host_is_there(host: Host, tmp_path: Path) -> None:
    work = host.folder / "work"
    work.mkdir()
    work.chmod(0o777)
    rank, start = ended(host, "job", "sh", "-c", f"echo 1 >result; ln -s {tmp_path} out", working_dir=str(work))
    (tmp_path / "file").write_text("world-readable")
    start = start.model_copy(update={"spec": start.spec.model_copy(update={"image": "any"})})

    assert await got(host, rank, start, "result") == ({"result": "1\n"}, "", 0)
    for path in ("out/file", "/etc/hostname", "../data/x"):
        with pytest.raises(ProblemError, match="was in the job's container, which is gone"):
            await got(host, rank, start, path)
