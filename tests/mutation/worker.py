"""One worker: for each mutant that it reads, put it into its copy of the sources and run the tests it names.

A program of its own, run by its path inside the copy, so that all it imports comes from there. It speaks JSON, a line
each: in `{"name", "path", "source", "tests": {id: seconds it may take}}`, out `{"name", "killed_by", "seconds"}`. For
every mutant it forks: the child starts with pytest and the packages of others already imported, which saves seconds.
"""

import contextlib
import ctypes
import importlib
import itertools
import json
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

_PR_SET_CHILD_SUBREAPER = 36
MEMORY_BYTES = 8 * 2**30
GRACE_S = 30.0
_SECONDS = itertools.count(1_000_000_000)
OUT_OF_TIME = "(out of time)"


def main() -> None:
    """Answer until there is no more to read."""
    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), str(Path(__file__).parent)])
    sys.path[:0] = [os.getcwd()]
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what a killed test leaves behind becomes ours, and is ended
    for module in json.loads(sys.argv[1]):
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    for line in sys.stdin:
        print(json.dumps(_judge(json.loads(line))), flush=True)


def _judge(work: dict[str, Any]) -> dict[str, Any]:
    started_s = time.monotonic()
    path = Path(work["path"])
    original, stat = path.read_bytes(), path.stat()
    path.write_text(work["source"])
    # A whole second of its own, or Python would take the compiled file of another mutant for this one's.
    os.utime(path, (stat.st_atime, next(_SECONDS)))
    try:
        killed_by = _run(work["tests"])
    finally:
        path.write_bytes(original)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return {"name": work["name"], "killed_by": killed_by, "seconds": round(time.monotonic() - started_s, 2)}


def _run(tests: dict[str, float]) -> str | None:
    """Return what failed: a test's id, or a word for what went wrong; None if all passed."""
    here = Path(f".mutation-{os.getpid()}")
    answer, running, plan, output = (here.with_suffix(end) for end in (".answer", ".running", ".plan", ".out"))
    answer.unlink(missing_ok=True)
    running.unlink(missing_ok=True)
    plan.write_text(json.dumps({"tests": tests, "answer": str(answer.resolve()), "running": str(running.resolve())}))
    child = os.fork()
    if child == 0:
        os.setsid()
        os.environ["MUTATION_PLAN"] = str(plan.resolve())
        _redirect(output)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        files = list(dict.fromkeys(name.partition("::")[0] for name in tests))
        quick = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "mutation_hooks"]
        quick += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plugins that were imported before
        code: int = 3
        with contextlib.suppress(BaseException):
            code = int(pytest.main([*quick, *files]))
        os._exit(code)
    status = _wait(child, GRACE_S + sum(tests.values()))
    _end_leftovers()
    if answer.exists() or running.exists():
        return (answer if answer.exists() else running).read_text()
    if status is None:
        return OUT_OF_TIME
    if os.waitstatus_to_exitcode(status) in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        return None
    return f"pytest ended with {os.waitstatus_to_exitcode(status)}: {output.read_text()[-300:]}"


def _redirect(output: Path) -> None:
    target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(target, 1)
    os.dup2(target, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)


def _wait(child: int, within_s: float) -> int | None:
    """Wait for the child; None if it had to be killed."""
    handle = os.pidfd_open(child)
    try:
        ended, _, _ = select.select([handle], [], [], within_s)
    finally:
        os.close(handle)
    if not ended:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    return status if ended else None


def _end_leftovers() -> None:
    for left in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


if __name__ == "__main__":
    main()
