"""Make `.venv`, then become `tools/demo.py` or pytest: what `./run` and `./test` start.

It runs by its file path under the system's Python, before anything is installed, so it imports only the standard
library. `./run` installs what runs (`deploy/standalone.lock`), `./test` adds the rest of `requirements.lock` and the
lab. A stamp in `.venv` says what the environment was made from. A second run takes milliseconds; the environment is
made again if its lock, Python or the checkout's path has changed, or if there is no stamp because an earlier run was
interrupted.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOCK = ROOT / "deploy" / "standalone.lock"
TESTS_LOCK = ROOT / "requirements.lock"
INSTALLER_LOCK = ROOT / "deploy" / "installer.lock"
PROJECTS = (ROOT / "clients" / "python", ROOT)
"""What is installed from the checkout, in this order: the client of users first. In an environment of a release in
which the whole project had the client's name, pip removes that and its command before it makes the new one."""
LAB = ROOT / "lab"
"""The distribution wattshift-lab, for tests alone. It is not installed as "compat", which would put this folder itself
on the path: its folders would be modules of their own."""
STAMP = VENV / "wattshift-stamp"
ALL_TESTS = ("--workers", "3") if sys.platform == "linux" else ("-n", "3", "--dist", "loadfile")
"""Tests wait for processes half of their time: three at a time keep two cores busy. The order is that of
`tests/support/order.py`: what takes longest comes first, so that no worker is left alone with it at the end. macOS does
not let a process that has loaded its frameworks fork."""


class SetupError(Exception):
    """The environment cannot be made; the message is one line that says what to do."""


def main(argv: Sequence[str]) -> NoReturn:
    """Run `argv`: `run` or `test`, and the arguments of that command."""
    try:
        {"run": _run, "test": _test}[argv[0]](list(argv[1:]))
    except SetupError as error:
        sys.exit(f"wattshift: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def _run(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="run",
        description="Set up Wattshift in .venv if need be, then start everything on this machine with example work. "
        "All options except --setup are those of tools/demo.py.",
    )
    parser.add_argument("--setup", action="store_true", help="only set up")
    parser.add_argument("--exit", action="store_true", help="stop again when the demonstration is over")
    parser.add_argument("--port", metavar="N", help="port of the gateway and dashboard (default 8000, else a free one)")
    parser.add_argument("--nodes", metavar="NxG[:MODEL][@ZONE]", help="simulated nodes x GPUs (2x4:A100-SXM4-40GB)")
    parser.add_argument("--data-dir", metavar="DIR", help="where all state is kept (default .wattshift)")
    options, _ = parser.parse_known_args(arguments)
    set_up()
    if not options.setup:
        _become([PYTHON, "-P", ROOT / "tools" / "demo.py", *arguments])


def _test(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="test",
        description="Set up Wattshift in .venv if need be, then run ruff, and the tests with pyright beside them: all "
        "but the live and the slow ones. Other arguments are passed to pytest; if they name tests, those alone run "
        "(slow ones only with --slow), and neither ruff nor pyright does.",
    )
    parser.add_argument("--setup", action="store_true", help="only set up, the lab included")
    parser.add_argument(
        "--live", action="store_true", help="also run the live tests: whole installations, a browser, engines of others"
    )
    parser.add_argument("--slow", action="store_true", help="run every test, measure coverage, and do --mutants")
    parser.add_argument(
        "--chaos",
        action="store_true",
        help="run the campaign of faults instead: --seed N, --minutes M (10), --storm-seconds S",
    )
    parser.add_argument(
        "--changed",
        nargs="?",
        const="HEAD",
        metavar="COMMIT",
        help="run the tests alone that can reach what has changed since a commit (HEAD), by what imports what",
    )
    parser.add_argument(
        "--lab", action="store_true", help="also run the lab's tests where neither the lab nor the core has changed"
    )
    parser.add_argument("--bench", action="store_true", help="run the benchmarks instead (all, or those named)")
    parser.add_argument(
        "--mutants", action="store_true", help="do a mutation run instead (`python -m tests.mutation --help`)"
    )
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="search schedules of the asyncio parts instead: --seed N, --minutes M (1), --token TOKEN",
    )
    options, rest = parser.parse_known_args(arguments)
    set_up(for_tests=True)
    if options.setup:
        return
    os.chdir(ROOT)
    # Tests start some hundred processes, each of which would compile the project anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if options.changed:
        _become([PYTHON, "-m", "tests.changed", options.changed, *rest])
    if options.bench:
        _become([PYTHON, "-m", "tests.benchmarks", *rest])
    if options.mutants:
        _become([PYTHON, "-m", "tests.mutation", *rest])
    if options.chaos:
        _become([PYTHON, "-m", "tests.chaos", *rest])
    if options.simulate:
        _become([PYTHON, "-m", "tests.simulation", *rest])
    is_mixed = any(Path(each).name == "attacks" for each in rest)  # quick tests and live ones in one folder
    runs_live = options.live or (bool(rest) and not is_mixed)
    selected = [] if options.slow else ["-m", "not slow" if runs_live else "not slow and not live"]
    if rest:
        _become([PYTHON, "-m", "pytest", *selected, *rest])
    wanted = (("--cov", options.slow), ("--lab", options.slow or options.live or options.lab))
    more = [word for word, is_wanted in wanted if is_wanted]
    _become([PYTHON, "-m", "tests.gates", *more, *selected, *ALL_TESTS])


def set_up(*, for_tests: bool = False) -> None:
    """Make `.venv` as the locks say, unless that is done already; safe to call from several processes at once.

    Raises:
        SetupError: there is no ensurepip, the checkout is not writable, or the packages cannot be installed.
    """
    if _wanted(for_tests) <= _made_from():
        return
    if not os.access(VENV if VENV.exists() else ROOT, os.W_OK):
        raise SetupError(f"cannot write {VENV}; run this as its owner, or get write permission")
    with _one_at_a_time():
        made_from, wanted = _made_from(), _wanted(for_tests)
        if wanted <= made_from:  # another process made it while this one waited
            return
        is_new = not any(line.startswith("packages ") for line in made_from & wanted)
        if is_new:
            made_from = set()
            _make_venv()
        missing = wanted - made_from
        with _installer() as install:
            STAMP.unlink(missing_ok=True)
            for line, lock in (("packages", LOCK), ("tests", TESTS_LOCK)):
                if any(each.startswith(f"{line} ") for each in missing):
                    print(f"wattshift: installing {lock.relative_to(ROOT)}", file=sys.stderr, flush=True)
                    # The locks are complete. Without --no-deps, older pips look for the newest release of a package
                    # that another one asks for with an extra, past the lock's version of it.
                    install("--no-deps", "--require-hashes", "--only-binary=:all:", "--requirement", str(lock))
                    if lock == LOCK:
                        _leave_out_tests()
            if any(each.startswith("project ") for each in missing):
                # "compat" puts the whole checkout on the path, folders added later included.
                mode = "--config-settings=editable_mode=compat"
                for project in PROJECTS:
                    install("--no-deps", "--no-index", "--no-build-isolation", mode, "--editable", str(project))
            if any(each.startswith("lab ") for each in missing):
                install("--no-deps", "--no-index", "--no-build-isolation", "--editable", str(LAB))
        if is_new:
            compile_imported()
        kept = {line for line in made_from if line.startswith(("tests ", "lab ")) and not for_tests}
        STAMP.write_text("".join(f"{line}\n" for line in sorted(kept | _wanted(for_tests))))


def _made_from() -> set[str]:
    return set(STAMP.read_text().splitlines()) if STAMP.is_file() else set()


def _wanted(for_tests: bool) -> set[str]:
    """Return what `.venv` should be made from: its packages, those of the tests, and the projects installed in it (the
    lab's only for tests).
    """
    usable = os.access(PYTHON, os.X_OK)  # false too where the Python that made it was removed
    version = subprocess.check_output([PYTHON, "-c", "import sys; print(sys.version)"]) if usable else b""
    made_of = {"packages": [LOCK.read_bytes(), str(VENV).encode(), version]}
    made_of["project"] = [(project / "pyproject.toml").read_bytes() for project in PROJECTS]
    if for_tests:
        made_of["tests"] = [TESTS_LOCK.read_bytes(), *made_of["packages"]]
        made_of["lab"] = [(LAB / name).read_bytes() for name in ("pyproject.toml", "setup.py")]
    return {f"{name} {hashlib.sha256(bytes(0).join(parts)).hexdigest()}" for name, parts in made_of.items()}


def _make_venv() -> None:
    print(f"wattshift: setting up {VENV} (once, about half a minute)", file=sys.stderr, flush=True)
    shutil.rmtree(VENV, ignore_errors=True)
    # pip is in the lock, and its own module that makes environments takes seconds to install an older one
    made = subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(VENV)], close_fds=False)
    if made.returncode != 0:
        raise SetupError(f"{sys.executable} -m venv {VENV} failed")


def _leave_out_tests() -> None:
    """Remove packages' own tests, 31 MB of what `./run` installs, which nothing imports."""
    for tests in [*VENV.glob("lib/python*/site-packages/**/tests")]:
        shutil.rmtree(tests, ignore_errors=True)


@contextlib.contextmanager
def _installer() -> Iterator[Callable[..., None]]:
    """Yield the command that installs packages in `.venv`: uv, which takes a tenth of pip's CPU time, else pip.

    uv is taken from PATH, or fetched for this run. It does not read pip's configuration: if it fails for lack of a
    mirror that pip knows, pip does the work.
    """
    with tempfile.TemporaryDirectory(prefix="installer-", dir=VENV) as folder:  # uv links from there: no copies
        uv = shutil.which("uv") or _fetch_uv(folder)
        environment = {**os.environ, "UV_CACHE_DIR": f"{folder}/cache", "UV_LINK_MODE": "hardlink"}

        def install(*what: str) -> None:
            if uv:
                command = [uv, "--quiet", "--no-progress", "pip", "install", "--python", str(PYTHON), *what]
                if subprocess.run(command, env=environment, capture_output=True, close_fds=False).returncode == 0:
                    return
            if not _has_pip(PYTHON):
                _need_ensurepip()
                subprocess.run([PYTHON, "-m", "ensurepip", "--upgrade"], stdout=subprocess.DEVNULL, close_fds=False)
            _pip(PYTHON, "install", *what)

        yield install


def _fetch_uv(folder: str) -> str | None:
    """Return a uv fetched by this Python's pip; None if there is no pip, or uv cannot be fetched."""
    if not _has_pip(sys.executable):
        return None
    words = ["install", "--no-deps", "--require-hashes", "--only-binary=:all:", "--no-compile", "--target", folder]
    try:
        _pip(sys.executable, *words, "--requirement", str(INSTALLER_LOCK))
    except SetupError:
        return None
    found = Path(folder) / "bin" / "uv"
    return str(found) if found.exists() else None


def _has_pip(python: str | Path) -> bool:
    return subprocess.run([python, "-c", "import pip"], capture_output=True, close_fds=False).returncode == 0


def compile_imported(*later: str) -> None:
    """Compile what processes import, once: otherwise all of them would do so at their first start.

    What is not installed, as nearly all is in the image of an agent, is left out. ``later`` are modules that are not
    imported at a start; where nothing can be written, as in a container, they would be compiled at each use.
    """
    code = (
        "import contextlib, importlib, sys\n"
        "from services.standalone.forks import imported_by\n"
        "from services.standalone.processes import AGENT, SERVICES, WORKERS\n"
        "names = (AGENT.module, 'services.cli.main', 'services.standalone.stack', 'services.engines.kueue.app',\n"
        "         *imported_by((*SERVICES, AGENT), WORKERS), 'optimizer_service.tasks', 'services.simulator.tasks',\n"
        "         *sys.argv[1:])\n"
        "for name in names:\n"
        "    with contextlib.suppress(ImportError, SystemExit): importlib.import_module(name)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([PYTHON, "-c", code, *later], env=environment, cwd=ROOT, capture_output=True, close_fds=False)


def _pip(python: str | Path, *arguments: str) -> None:
    environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore", "PIP_USER": "0"}
    command = [python, "-m", "pip", "-qq", *arguments]
    if subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, close_fds=False).returncode != 0:
        raise SetupError("pip could not install what the lock names; the lines above say why")


def _need_ensurepip() -> None:
    """Install `ensurepip` if run by root, else hint at it: Debian and Ubuntu split it off into its own package."""
    probe = [sys.executable, "-c", "import ensurepip, venv"]
    if subprocess.run(probe, capture_output=True).returncode == 0:
        return
    package = f"python3.{sys.version_info.minor}-venv"
    if os.geteuid() == 0 and shutil.which("apt-get"):
        install = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", package]
        print(f"wattshift: {' '.join(install)}", file=sys.stderr, flush=True)
        quiet = {"stdout": subprocess.DEVNULL, "env": os.environ | {"DEBIAN_FRONTEND": "noninteractive"}}
        if subprocess.run(install, **quiet).returncode != 0:  # a fresh image has no package lists yet
            subprocess.run(["apt-get", "update", "--quiet"], **quiet)
            subprocess.run(install, **quiet)
        if subprocess.run(probe, capture_output=True).returncode == 0:
            return
    raise SetupError(f"this Python has no ensurepip: sudo apt-get install {package}")


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    # The lock's own file is held: no further file. Network file systems want it open for writing: do that if we may.
    with LOCK.open("r+" if os.access(LOCK, os.W_OK) else "r") as held:
        os.set_inheritable(held.fileno(), True)  # a pip that outlives us, killed, still keeps the next one waiting
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _become(command: Sequence[str | Path]) -> NoReturn:
    words = [str(word) for word in command]
    sys.stdout.flush()
    os.execv(words[0], words)


if __name__ == "__main__":
    main(sys.argv[1:])
