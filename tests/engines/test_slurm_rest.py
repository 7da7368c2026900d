"""slurmrestd of a version that cannot be had here, by its published description; and one that lies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from services.engines.slurm.rest import Rest
from services.engines.slurm.steering import Changes
from tests.engines.test_slurm_lies import JOB, NODE, lies, say
from tests.engines.test_slurm_reading import NEW_JOB, number

assert lies  # the fixture
NEW_NODE = NODE | {"state": ["IDLE"]}


class Restd:
    """A slurmrestd: what it answers, and what it was asked."""

    def __init__(self) -> None:
        self.paths = [f"/slurm/v0.0.{version}/jobs/" for version in (39, 41, 99)]
        self.answers: dict[str, tuple[int, bytes]] = {
            "jobs": (200, orjson.dumps({"jobs": [NEW_JOB], "meta": {"slurm": {"release": "24.05.1"}}, "errors": []})),
            "nodes": (200, orjson.dumps({"nodes": [NEW_NODE]})),
        }
        self.asked: list[tuple[str, str, Any]] = []
        self.tokens: set[str] = set()
        self.hangs = False

    async def answer(self, request: web.Request) -> web.Response:
        """Answer anything."""
        if self.hangs:
            await asyncio.sleep(60)
        if request.path == "/openapi/v3":
            return web.json_response({"paths": {path: {} for path in self.paths}})
        self.tokens.add(request.headers["X-SLURM-USER-TOKEN"])
        body = await request.read()
        self.asked.append((request.method, request.path, orjson.loads(body) if body else None))
        status, content = self.answers.get(request.path.split("/", 3)[3], (200, b'{"errors": []}'))
        return web.Response(status=status, body=content)


@pytest.fixture
async def restd() -> AsyncIterator[tuple[Restd, str]]:
    found, app = Restd(), web.Application()
    app.router.add_route("*", "/{path:.*}", found.answer)
    async with TestServer(app) as server:
        yield found, f"http://127.0.0.1:{server.port}"


@pytest.fixture
def rest(restd: tuple[Restd, str], lies: Path) -> Rest:
    """A client whose commands have another job than slurmrestd."""
    say(lies, {"job_id": 8})
    (lies / "token").write_text("SLURM_JWT=secret\n")
    return Rest(restd[1], user="root", token_file=lies / "token", timeout_s=5)


async def test_the_newest_version_that_both_know_is_spoken(restd: tuple[Restd, str], rest: Rest, lies: Path) -> None:
    (job,), version = await rest.jobs()
    (node,) = await rest.nodes()
    assert (job.number, version, node.name, node.partitions) == ("7", "24.05.1", "gpu1", ("batch",))
    fields = (("admincomment", "wattshift:7@1"), ("comment", "a 'b'"))
    timed = (("gres", "gpu:h200:4"), ("starttime", "2026-11-24T12:00:00"))
    refused = await rest.change(Changes([(("7",), fields), (("9",), timed)], (), (), ["7"], ["11"]))

    assert refused == {}
    assert sorted(restd[0].asked[2:]) == [
        ("DELETE", "/slurm/v0.0.41/job/11", None),
        ("POST", "/slurm/v0.0.41/job/7", {"admin_comment": "wattshift:7@1", "comment": "a 'b'"}),
        ("POST", "/slurm/v0.0.41/job/9", {"tres_per_node": "gres/gpu:h200:4", "begin_time": number(1_795_521_600)}),
    ]
    assert restd[0].tokens == {"secret"}
    assert (lies / "calls").read_text() == "scontrol \nrequeue incomplete 7\n"  # what no version can


@pytest.mark.parametrize(("version", "wanted"), [(39, 1_795_521_600), (40, number(1_795_521_600))])
async def test_a_begin_time_has_the_type_of_its_version(
    restd: tuple[Restd, str], rest: Rest, version: int, wanted: Any
) -> None:
    restd[0].paths = [f"/slurm/v0.0.{version}/jobs/"]
    await rest.jobs()
    assert await rest.change(Changes([(("7",), (("starttime", "2026-11-24T12:00:00"),))])) == {}
    assert restd[0].asked[1:] == [("POST", f"/slurm/v0.0.{version}/job/7", {"begin_time": wanted})]


async def test_what_slurm_refuses_is_said_and_what_slurmrestd_cannot_is_done_by_commands(
    restd: tuple[Restd, str], rest: Rest, lies: Path
) -> None:
    await rest.jobs()
    said = orjson.dumps({"errors": [{"error": "Job is no longer pending execution", "error_number": 2021}]})
    unknown = orjson.dumps({"errors": [{"error": "Unknown key", "error_number": 9001}]})
    restd[0].answers |= {"job/7": (500, said), "job/8": (200, unknown), "job/9": (502, b"<html>")}
    updates = [(("7", "8", "9"), (("comment", "c"),))]

    assert await rest.change(Changes(updates)) == {"7": "Job is no longer pending execution"}
    assert (lies / "calls").read_text() == "scontrol \nupdate jobid=8,9 comment=c\n"


async def test_many_changes_are_made_by_commands_together(restd: tuple[Restd, str], rest: Rest, lies: Path) -> None:
    await rest.jobs()
    await rest.change(Changes([(tuple(map(str, range(1, 151))), (("comment", "c"),))]))
    assert len(restd[0].asked) == 1
    assert (lies / "calls").read_text().count("update jobid=") == 1


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (200, b'{"jobs": ['),
        (200, b'{"jobs": [], "errors": [{"error": "half of it is missing"}]}'),
        (200, b"[]"),
        (200, b""),
        (401, b'{"errors": [{"error": "Protocol authentication error"}]}'),
        (500, b"<html>"),
    ],
)
async def test_a_slurmrestd_that_lies_is_not_asked_again_for_a_while(
    restd: tuple[Restd, str], rest: Rest, status: int, answer: bytes
) -> None:
    restd[0].answers["jobs"] = (status, answer)
    assert [job.number for job in (await rest.jobs())[0]] == [str(JOB["job_id"] + 1)]
    restd[0].asked.clear()
    assert [job.number for job in (await rest.jobs())[0]] == ["8"]
    assert restd[0].asked == []


async def test_without_a_known_version_or_an_answer_commands_do_everything(
    restd: tuple[Restd, str], rest: Rest, lies: Path
) -> None:
    restd[0].paths = ["/slurm/v0.0.35/jobs/"]
    assert [job.number for job in (await rest.jobs())[0]] == ["8"]
    restd[0].hangs = True
    fresh = Rest(restd[1], user="root", token_file=None, timeout_s=2)
    assert [job.number for job in (await fresh.jobs())[0]] == ["8"]
    gone = Rest(f"unix:{lies}/none", user="root", token_file=lies / "none", timeout_s=5)
    assert [node.name for node in await gone.nodes()] == ["gpu1"]
