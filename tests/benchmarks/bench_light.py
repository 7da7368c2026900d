"""What an installation costs: to set up, to start, at rest; of this checkout, and of commits before it.

`./test --bench light`, or `python -m tests.benchmarks.bench_light COMMIT ...`. Each commit is cloned, set up afresh and
measured in the same run, one after the other. Figures are CPU seconds, sizes and shares, which other work on the
machine changes little; how fast the machine is says the time of ten million turns of ``s += i * i`` in bare Python.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil

from tests.benchmarks.results import write_result
from tests.support.servers import ROOT, scratch_folder

REST_S = 60.0
SETTLES_S = 30.0
CALLS = 5
NOW = {
    "set-up, CPU s": 115.0,
    "set-up, packages": 179,
    "set-up, MB": 1_600,
    "first up to ready, CPU s": 44.0,
    "up to ready, CPU s": 44.0,
    "at rest, processes": 58,
    "at rest, MB": 1_300,
    "at rest, % of a core": 16.0,
    "--version, CPU s": 0.19,
    "jobs, CPU s": 0.43,
    "agent alone, MB installed": 106,
    "agent alone, MB": 73,
    "agent alone, % of a core": 1.0,
}
"""Measured when the loop took 1.5 s; the last two, and the command line's, later, when it took 1.7 s."""
GOALS = {
    "set-up, CPU s": 20.0,
    "set-up, packages": 80,
    "set-up, MB": 400,
    "first up to ready, CPU s": 10.0,
    "up to ready, CPU s": 10.0,
    "at rest, processes": 30,
    "at rest, MB": 450,
    "at rest, % of a core": 1.5,
    "--version, CPU s": 0.25,
    "jobs, CPU s": 0.25,
    "agent alone, MB installed": 80,
    "agent alone, MB": 60,
    "agent alone, % of a core": 0.5,
}


def main(commits: tuple[str, ...] = ()) -> int:
    """Measure, print the table and write it; 1 if a goal is missed."""
    loop_s, columns = _loop_s(), dict[str, dict[str, float]]()
    for name in (*commits, "HEAD"):
        columns[name] = measure(name)
        write_result("light", {"loop_s": round(loop_s, 2), "columns": columns})  # a run takes long, and may be cut off
    print(f"ten million turns of `s += i * i`: {loop_s:.2f} s")
    print(f"{'':28}{'now':>10}{'goal':>10}" + "".join(f"{name[:12]:>14}" for name in columns))
    for what, goal in GOALS.items():
        row = "".join(f"{figures[what]:14.2f}" for figures in columns.values())
        print(f"{what:28}{NOW[what]:10.2f}{goal:10.2f}{row}")
    return int(any(columns["HEAD"][what] > goal for what, goal in GOALS.items()))


def measure(commit: str) -> dict[str, float]:
    """Return every figure of a commit, measured in a clone of it."""
    figures: dict[str, float] = {}
    with scratch_folder() as folder:
        clone, data = folder / "clone", folder / "data"
        subprocess.run(["git", "clone", "-q", "--no-checkout", ROOT, clone], check=True)
        subprocess.run(["git", "-C", clone, "checkout", "-q", commit], check=True)
        figures["set-up, CPU s"] = _cpu_s_of(["./run", "--setup"], clone)
        packages = next(clone.glob(".venv/lib/python*/site-packages"))
        figures["set-up, packages"] = len(list(packages.glob("*.dist-info")))
        figures["set-up, MB"] = _mb(clone / ".venv")
        for name in ("first up to ready, CPU s", "up to ready, CPU s"):
            with _up(clone, data) as (supervisor, cpu_s):
                figures[name] = cpu_s
                if name.startswith("up"):
                    figures |= {f"at rest, {what}": value for what, value in _at_rest(supervisor).items()}
        for words in ("--version", "jobs"):
            command = [".venv/bin/python", "-m", "services.cli.main", words]
            figures[f"{words}, CPU s"] = min(_cpu_s_of(command, clone, may_fail=True) for _ in range(CALLS))
        figures |= {f"agent alone, {what}": value for what, value in _agent(clone, folder / "agent").items()}
    return {name: round(value, 2) for name, value in figures.items()}


def _loop_s() -> float:
    began_s, total = time.process_time(), 0
    for number in range(10_000_000):
        total += number * number
    return time.process_time() - began_s


def _cpu_s_of(command: list[str], folder: Path, *, may_fail: bool = False) -> float:
    before = os.times()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} if may_fail else {}
    subprocess.run(command, cwd=folder, check=not may_fail, env=_environment(), **quiet)
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


def _environment(**more: str) -> Mapping[str, str]:
    """Return that of somebody who sets up: without this run's own, and without writing bytecode."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL", "PYTEST"))}
    return {**kept, "PYTHONDONTWRITEBYTECODE": "1", **more}


def _mb(folder: Path) -> float:
    return int(subprocess.check_output(["du", "-sk", folder]).split()[0]) / 1_000


@contextlib.contextmanager
def _up(clone: Path, data: Path) -> Iterator[tuple[psutil.Process, float]]:
    wattshift = [str(clone / ".venv/bin/wattshift")]
    try:
        of_up_s = _cpu_s_of([*wattshift, "up", "--data-dir", str(data), "--nodes", "2x4"], clone)
        supervisor = psutil.Process(int((data / "lock").read_text()))
        ended = supervisor.cpu_times()
        yield supervisor, of_up_s + sum(_cpu_s(each) for each in _tree(supervisor)) + ended[2] + ended[3]
    finally:
        subprocess.run([*wattshift, "down", "--data-dir", str(data)], cwd=clone, check=False, env=_environment())


def _tree(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def _of_each(process: psutil.Process, of_one: Callable[[psutil.Process], float]) -> dict[int, float]:
    found: dict[int, float] = {}
    for each in _tree(process):
        with contextlib.suppress(psutil.Error):  # it has just ended
            found[each.pid] = of_one(each)
    return found


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
        return times.user + times.system
    except psutil.Error:
        return 0.0


def _at_rest(process: psutil.Process) -> dict[str, float]:
    time.sleep(SETTLES_S)
    before = _of_each(process, _cpu_s)
    began_s = time.monotonic()
    time.sleep(REST_S)
    after = _of_each(process, _cpu_s)
    used_s = {pid: cpu_s - before.get(pid, 0.0) for pid, cpu_s in after.items()}
    past_s = time.monotonic() - began_s
    pss = _of_each(process, lambda each: each.memory_full_info().pss)
    for pid, spent_s in sorted(used_s.items(), key=lambda each: -each[1])[:25]:
        with contextlib.suppress(psutil.Error):
            shown = " ".join(psutil.Process(pid).cmdline())[-60:] or psutil.Process(pid).name()
            print(f"{100 * spent_s / past_s:8.2f} %{pss.get(pid, 0) / 1e6:8.1f} MB  {shown}")
    return {"processes": len(after), "MB": sum(pss.values()) / 1e6, "% of a core": 100 * sum(used_s.values()) / past_s}


def _agent(clone: Path, folder: Path) -> dict[str, float]:
    """Install an agent alone from the checkout, as a node's operator does, and run it without a control plane."""
    python = str(folder / "bin/python")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    source = folder.parent / "source"
    shutil.copytree(clone, source, ignore=shutil.ignore_patterns(".venv", ".git"))
    pip = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check", "--python", python, "install"]
    subprocess.run([*pip, "--no-compile", source / "clients/python", f"{source}[agent]"], check=True)
    shutil.rmtree(source)
    subprocess.run([python, "-c", "import gpu_agent.app"], check=True, cwd=folder)  # what it runs is compiled
    figures = {"MB installed": _mb(folder)}
    environment = _environment(
        GPU_AGENT_DRIVER="simulated",
        GPU_AGENT_NODE_ID="alone",
        GPU_AGENT_STATE_DIR=str(folder / "state"),
        GPU_AGENT_PORT="18970",
        WATTSHIFT_NODE_JOIN_TOKEN="of-a-control-plane-that-is-away",
    )
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([python, "-m", "gpu_agent.app"], cwd=folder, env=environment, **quiet) as agent:
        try:
            found = _at_rest(psutil.Process(agent.pid))
        finally:
            agent.terminate()
    return figures | {name: found[name] for name in ("MB", "% of a core")}


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:])))
