"""``job_submit.lua``: which jobs it gives a begin time, by the Lua that Slurm itself is linked to."""

from __future__ import annotations

import asyncio
import ctypes
import ctypes.util
import time
from pathlib import Path
from typing import Any

import pytest

from services.contracts.engines import EngineMode
from services.kit.problems import ProblemError
from tests.engines.test_slurm_arrays import Site
from tests.support.servers import ROOT

SCRIPT = ROOT / "deploy" / "slurm" / "job_submit.lua"
LIBRARY = ctypes.util.find_library("lua5.1")
JOB = {"script": "#!/bin/sh", "tres_per_node": "gres:gpu:h200:2", "partition": "batch", "comment": ""}
PRELUDE = """
slurm = {{ SUCCESS = 0, NO_VAL = 4294967294 }}
{script}
local job = {{ {job} }}
slurm_job_submit(job, {{}}, 0)
return job.admin_comment and tostring(job.begin_time - os.time()) .. " " .. job.admin_comment or "starts at once"
"""

pytestmark = pytest.mark.skipif(LIBRARY is None, reason="Lua 5.1 is not here")


def submitted(alive: Path | None, **fields: Any) -> str:
    """Return what becomes of a new job: how far ahead its begin time is, and its admin comment."""
    script = SCRIPT.read_text().replace("PARTITIONS = {}", "PARTITIONS = { batch = true }")
    script = script.replace("LEAVE_QOS = {}", "LEAVE_QOS = { urgent = true }")
    script = script.replace('"/run/wattshift-slurm/alive"', f'"{alive}"' if alive else "nil")
    body, _, _ = script.rpartition("return slurm.SUCCESS")
    job = ", ".join(f"{name} = {value!r}" for name, value in (JOB | fields).items() if value is not None)
    lua = ctypes.CDLL(LIBRARY)
    lua.luaL_newstate.restype = lua.lua_tolstring.restype = ctypes.c_void_p
    state = ctypes.c_void_p(lua.luaL_newstate())
    try:
        lua.luaL_openlibs(state)
        failed = lua.luaL_loadstring(state, PRELUDE.format(script=body, job=job).encode())
        failed = failed or lua.lua_pcall(state, 0, 1, 0)
        said = ctypes.string_at(lua.lua_tolstring(state, -1, None)).decode()
        assert not failed, said
        return said
    finally:
        lua.lua_close(state)


@pytest.fixture
def alive(tmp_path: Path) -> Path:
    """A bridge's word that it steers, and is heard."""
    file = tmp_path / "alive"
    file.write_text(f"{time.time() + 60:.0f}\n")
    return file


def test_what_the_bridge_steers_waits_for_its_plan(alive: Path) -> None:
    ahead, mark = submitted(alive).split()
    assert int(ahead) in (29, 30)
    assert mark.startswith("wattshift-hold:")
    assert submitted(alive, array_inx="0-9").startswith((ahead, "29"))
    assert submitted(alive, partition="private,batch", admin_comment="mine").endswith(" mine")


@pytest.mark.parametrize(
    "fields",
    [
        {"script": None},
        {"dependency": "afterok:1"},
        {"reservation": "course"},
        {"begin_time": 1},
        {"priority": 0},
        {"het_job_offset": 0},
        {"comment": "wattshift:off"},
        {"qos": "urgent"},
        {"partition": "private"},
        {"tres_per_node": None},
        {"tres_per_node": "gres:gpu:1g.10gb:2"},
        {"tres_per_node": "gres/gpu:a100_3g.20gb:1"},
        {"tres_per_node": "gres:shard:4"},
    ],
    ids=str,
)
def test_what_the_bridge_leaves_alone_starts_at_once(alive: Path, fields: dict[str, Any]) -> None:
    assert submitted(alive, **fields) == "starts at once"


@pytest.mark.parametrize("word", ["", "nonsense", "0", "1700000000", None])
def test_without_a_bridge_that_is_heard_nothing_waits(tmp_path: Path, word: str | None) -> None:
    file = tmp_path / "alive"
    if word is not None:
        file.write_text(word)
    assert submitted(file) == "starts at once"
    assert submitted(None) != "starts at once", "where the site has no such file"


async def test_the_bridge_says_until_when_new_jobs_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it steers and is heard; a dry run says nothing, and neither does one whose control plane is silent."""
    file = tmp_path / "run" / "alive"
    site = Site(alive_file=file)
    site.plane.silent = True
    with pytest.raises(ProblemError):
        await site.look()
    await Site(alive_file=file, mode=EngineMode.DRY_RUN).look()
    assert not file.exists()
    assert submitted(file) == "starts at once"
    site.plane.silent = False
    await site.look()
    assert submitted(file) != "starts at once"

    async def end(_: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(site.bridge._talk, "keep_looking", end)
    with pytest.raises(asyncio.CancelledError):
        await site.bridge.run()
    assert submitted(file) == "starts at once"


async def test_a_file_that_cannot_be_written_stops_nothing() -> None:
    site = Site(alive_file=Path("/proc/no/alive"))
    site.slurm.submit("0-1")
    await site.look()
    assert len(site.plane.reports) > 0
