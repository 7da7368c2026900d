"""A rank of which the kernel killed a process for memory says so, and whose limit it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_agent import shim
from gpu_agent.ranks import Exit, Launch, Process, RankFolder
from services.contracts.nodes import OUT_OF_MEMORY, EndedBy

GIB = 2**30
V2_OWN = {"memory.events": "low 0\nhigh 0\nmax 90\noom 1\noom_kill 1\noom_group_kill 0\n"}
V2_OTHER = {"memory.events": "low 0\nhigh 0\nmax 90\noom 0\noom_kill 1\noom_group_kill 0\n"}
V2_NONE = {"memory.events": "low 0\nhigh 0\nmax 90\noom 1\noom_kill 0\noom_group_kill 0\n"}
V2 = {"memory.max": f"{3 * GIB}\n", "memory.peak": f"{5 * GIB // 2}\n"}
V1_CONTROL = {"memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"}
V1_NONE = {"memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n", "memory.failcnt": "105\n"}
V1 = {"memory.limit_in_bytes": f"{3 * GIB}\n", "memory.max_usage_in_bytes": f"{5 * GIB // 2}\n"}
OWN = f"because it {OUT_OF_MEMORY} of 3.0 GiB (peak 2.5 GiB)."
OTHER = "because its node was short of memory; its own limit was not reached (peak 2.5 GiB)."
KILLED = "kill -9 $$"


def _ended(folder: Path, files: dict[str, str], command: str, processes: tuple[str, ...] = ()) -> Exit:
    """Run a rank in groups of which the one for memory has these files, and return how it ended."""
    entries: list[tuple[str, str]] = []
    for controller, written in (("pids", {}), ("memory", files)):
        (folder / controller).mkdir()
        for name, text in ({"cgroup.procs": ""} | written).items():
            (folder / controller / name).write_text(text)
        entries.append(("confine", f"cgroup {folder / controller / 'cgroup.procs'}"))
    rank = RankFolder(folder / "rank")
    rank.path.mkdir()
    several = [Process(name, {}) for name in processes]
    launch = Launch(["sh", "-c", command], {"PATH": "/usr/bin:/bin"}, "/", 1.0, processes=several, confinement=entries)
    rank.launch(launch, shim.clock() + 60, 60).wait()
    ended = rank.exit()
    assert ended is not None
    return ended


@pytest.mark.parametrize(
    ("files", "command", "words"),
    [
        (V2 | V2_OWN, KILLED, f"It was killed {OWN}"),
        (V1 | V1_CONTROL | {"memory.failcnt": "105\n"}, KILLED, f"It was killed {OWN}"),
        (V2 | V2_OTHER, KILLED, f"It was killed {OTHER}"),
        (V1 | V1_CONTROL | {"memory.failcnt": "0\n"}, KILLED, f"It was killed {OTHER}"),
        (V2 | V2_NONE, KILLED, "ended by SIGKILL"),
        (V1 | V1_NONE, KILLED, "ended by SIGKILL"),
        ({}, KILLED, "ended by SIGKILL"),
        (V2 | V2_OWN, "exit 1", f"One of its processes was killed {OWN}"),
        (V2_OWN | {"memory.max": V2["memory.max"]}, KILLED, f"It was killed {OWN.replace('2.5 GiB', 'unknown')}"),
        (V2 | V2_OWN, "exit 0", ""),
    ],
)
def test_why_a_rank_was_killed(tmp_path: Path, files: dict[str, str], command: str, words: str) -> None:
    ended = _ended(tmp_path, files, command)
    assert (ended.detail, ended.ended_by) == (words, EndedBy.ITSELF)


def test_of_several_processes_the_one_is_named(tmp_path: Path) -> None:
    ended = _ended(tmp_path, V2 | V2_OWN, KILLED, ("rank 4",))
    assert ended.detail == f"The process of rank 4 was ended by SIGKILL. One of its processes was killed {OWN}"
