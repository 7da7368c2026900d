"""The lock holds hashes and no addresses; `./run --setup` makes an environment anywhere, for anyone, more than once."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.servers import ROOT, scratch_folder
from tools import bootstrap

ALL = [*bootstrap.ALL_TESTS]
LOCK = (ROOT / "requirements.lock").read_text()
LOCKS = ("requirements.lock", "deploy/standalone.lock", "deploy/installer.lock")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize(("name", "least"), [*zip(LOCKS, (120, 60, 1), strict=True)])
def test_a_lock_pins_by_hash_and_names_no_place(name: str, least: int) -> None:
    lock = (ROOT / name).read_text()
    assert not re.search(r"://|^\s*-(?!-hash=)|@", lock, re.MULTILINE)
    blocks = re.split(r"\n(?=\S)", lock.strip())
    assert len(blocks) >= least
    for block in blocks:
        assert re.fullmatch(r"[\w.\-\[\],]+==[\w.]+( ; [^\\]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+", block), block[
            :80
        ]


@pytest.mark.parametrize("python", ["3.11.4", "3.12.0", "3.13.0"])
def test_the_lock_satisfies_the_project(python: str) -> None:
    lines = [Requirement(line.rstrip(" \\")) for line in LOCK.splitlines() if not line.startswith(" ")]
    pinned = [pin for pin in lines if pin.marker is None or pin.marker.evaluate({"python_full_version": python})]
    project = PYPROJECT["project"]
    installed = project["optional-dependencies"].values()
    for wanted in sum(installed, project["dependencies"] + PYPROJECT["dependency-groups"]["dev"]):
        requirement = Requirement(wanted)
        if requirement.name == PYPROJECT["project"]["name"]:
            continue
        found = [pin for pin in pinned if canonicalize_name(pin.name) == canonicalize_name(requirement.name)]
        assert len(found) == 1, requirement.name
        assert requirement.specifier.contains(str(found[0].specifier).removeprefix("=="))


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command that would have replaced this process."""
    words: list[str] = []

    def become(command: list[object]) -> None:
        words.extend(map(str, command))
        raise SystemExit

    monkeypatch.setattr(bootstrap, "set_up", lambda **_: None)
    monkeypatch.setattr(bootstrap, "_become", become)
    monkeypatch.setattr(os, "chdir", lambda path: None)
    return words


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ([], ["-m", "tests.gates", "-m", "not slow and not live", *ALL]),
        (["--live"], ["-m", "tests.gates", "--lab", "-m", "not slow", *ALL]),
        (["tests/kit"], ["-m", "pytest", "-m", "not slow", "tests/kit"]),
        (["tests/attacks"], ["-m", "pytest", "-m", "not slow and not live", "tests/attacks"]),
        (["--live", "tests/attacks"], ["-m", "pytest", "-m", "not slow", "tests/attacks"]),
        (["tests/attacks/test_x.py"], ["-m", "pytest", "-m", "not slow", "tests/attacks/test_x.py"]),
        (["--lab"], ["-m", "tests.gates", "--lab", "-m", "not slow and not live", *ALL]),
        (["--slow"], ["-m", "tests.gates", "--cov", "--lab", *ALL]),
        (["--slow", "-x", "tests/kit"], ["-m", "pytest", "-x", "tests/kit"]),
        (["--chaos", "--seed", "7"], ["-m", "tests.chaos", "--seed", "7"]),
        (["--bench", "solver"], ["-m", "tests.benchmarks", "solver"]),
        (["--simulate", "--seed", "2"], ["-m", "tests.simulation", "--seed", "2"]),
        (["--mutants", "--seed", "2"], ["-m", "tests.mutation", "--seed", "2"]),
    ],
)
def test_what_test_runs(handed_over: list[str], arguments: list[str], command: list[str]) -> None:
    with pytest.raises(SystemExit):
        bootstrap._test(arguments)
    assert handed_over == [str(ROOT / ".venv" / "bin" / "python"), *command]


def test_test_only_sets_up_where_no_more_is_asked(handed_over: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(bootstrap, "set_up", lambda *, for_tests: asked.append(for_tests))

    bootstrap._test(["--setup"])

    assert (asked, handed_over) == ([True], [])


def test_run_hands_everything_on(handed_over: list[str]) -> None:
    bootstrap._run(["--setup"])
    assert not handed_over
    with pytest.raises(SystemExit):
        bootstrap._run(["--exit", "--nodes", "2x4"])
    assert handed_over == [*map(str, (bootstrap.PYTHON, "-P", ROOT / "tools" / "demo.py")), "--exit", "--nodes", "2x4"]


def test_no_python_is_said_clearly(tmp_path: Path) -> None:
    for name in ("dirname", "readlink", "sh"):
        (tmp_path / name).symlink_to(shutil.which(name))
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = subprocess.run([ROOT / "run"], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "needs Python 3.11 or newer" in done.stderr


def test_no_ensurepip_is_said_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(bootstrap.SetupError, match=r"sudo apt-get install python3\.\d+-venv"):
        bootstrap._need_ensurepip()


def test_the_lock_is_complete() -> None:
    """Set-up installs what the lock names and resolves nothing: what it forgot would be missing."""
    check = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    assert check.returncode == 0, check.stdout + check.stderr


def test_only_what_has_changed_is_installed_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is installed, as the locks and the project change: nothing twice, and the tests' packages only for tests."""
    done: list[str] = []

    own_tests = tmp_path / ".venv" / "lib" / "python3" / "site-packages" / "package" / "part" / "tests"

    def install(*words: str) -> None:
        done.append(Path(words[-1]).name)
        if words[-1].endswith(".lock"):
            own_tests.mkdir(parents=True, exist_ok=True)
            (own_tests / "test_part.py").touch()

    @contextlib.contextmanager
    def installer() -> Iterator[Callable[..., None]]:
        yield install

    for name in ("LOCK", "TESTS_LOCK"):
        monkeypatch.setattr(bootstrap, name, tmp_path / f"{name.lower()}.lock")
        (tmp_path / f"{name.lower()}.lock").write_text(name)
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text("first")
    lab = tmp_path / "lab"
    lab.mkdir()
    for name in ("pyproject.toml", "setup.py"):
        (lab / name).write_text("first")
    monkeypatch.setattr(bootstrap, "LAB", lab)
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(bootstrap, "PROJECTS", (project,))
    monkeypatch.setattr(bootstrap, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(bootstrap, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr(bootstrap, "PYTHON", tmp_path / "python")
    monkeypatch.setattr(bootstrap, "_make_venv", lambda: done.append("venv"))
    monkeypatch.setattr(bootstrap, "compile_imported", lambda: done.append("compiled"))
    monkeypatch.setattr(bootstrap, "_installer", installer)

    def after(*, for_tests: bool = False) -> list[str]:
        done.clear()
        bootstrap.set_up(for_tests=for_tests)
        return list(done)

    assert after() == ["venv", "lock.lock", "project", "compiled"]
    assert own_tests.parent.exists()
    assert not own_tests.exists()
    assert after() == []
    assert after(for_tests=True) == ["tests_lock.lock", "lab"]
    assert after() == after(for_tests=True) == []
    (lab / "pyproject.toml").write_text("second")
    assert after() == []
    assert after(for_tests=True) == ["lab"]
    (project / "pyproject.toml").write_text("second")
    assert after() == ["project"]
    assert after(for_tests=True) == []
    (tmp_path / "tests_lock.lock").write_text("newer")
    assert after() == []
    assert after(for_tests=True) == ["tests_lock.lock"]
    (tmp_path / "lock.lock").write_text("newer")
    assert after() == ["venv", "lock.lock", "project", "compiled"]
    assert after(for_tests=True) == ["tests_lock.lock", "lab"]


@pytest.mark.slow
def test_set_up_from_nothing(tmp_path: Path) -> None:
    """As this user, and as an ordinary one where root runs it: in a path with spaces, through a link, killed, twice."""
    with scratch_folder() as folder:
        checkout = folder / "a check out"
        checkout.mkdir()
        files = ("run", "test", "pyproject.toml", "services/kit/release.py", *LOCKS)
        for name in (*files, "tools", "services/standalone", "clients/python", "lab"):
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, checkout / name)
        (folder / "link").symlink_to(checkout / "run")
        options: dict[str, object] = {"cwd": "/", "env": {"PATH": os.environ["PATH"], "HOME": str(folder)}}
        if os.geteuid() == 0:
            options |= {"user": 65534, "group": 65534, "extra_groups": []}
            options["env"] = {"PATH": os.defpath, "HOME": str(checkout)}
            subprocess.run(["chown", "-R", "65534:65534", checkout], check=True)
        killed = subprocess.Popen([folder / "link", "--setup"], **options)
        while not (checkout / ".venv" / "bin" / "python").exists():
            assert killed.poll() is None
            time.sleep(0.05)
        killed.kill()
        killed.wait()
        subprocess.run([folder / "link", "--setup"], check=True, **options)
        began_s = time.monotonic()
        subprocess.run([checkout / "run", "--setup"], check=True, **options)
        assert time.monotonic() - began_s < 3
        version = subprocess.run(
            [checkout / "test", "--version"], check=True, capture_output=True, text=True, **options
        )
        assert version.stdout.startswith("pytest ")
        assert (checkout / ".venv" / "bin" / "wattshift").exists()
        for module in ("wattshift.client", "lab.policies"):
            subprocess.run([checkout / ".venv" / "bin" / "python", "-c", f"import {module}"], check=True, **options)
