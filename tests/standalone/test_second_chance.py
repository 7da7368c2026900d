"""What `./test` does with a few tests that failed beside all others, and with the lab's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import gates

TESTS = """
import pathlib

def test_unsteady():
    seen = pathlib.Path("seen")
    is_second = seen.exists()
    seen.touch()
    assert is_second

def test_broken():
    assert {works}
"""


def run(folder: Path, text: str) -> None:
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(text)
    assert subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=folder, stdout=subprocess.DEVNULL).returncode == 1


@pytest.mark.parametrize("works", [True, False])
def test_what_fails_again_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], works: bool
) -> None:
    run(tmp_path, TESTS.format(works=works))
    monkeypatch.chdir(tmp_path)
    assert gates._failed_again([]) == (not works)
    told = capsys.readouterr().out
    assert "UNSTEADY test_it.py::test_unsteady" in told
    assert "UNSTEADY test_it.py::test_broken" not in told


def test_many_failures_get_no_second_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, TESTS.format(works=True) + "".join(f"\ndef test_{n}(): assert 0\n" for n in range(3)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", pytest.fail)
    assert gates._failed_again([]) == 1


def test_a_test_that_ends_its_worker_fails_once_and_is_named(tmp_path: Path) -> None:
    """The worker had finished files before, and others wait: one of a single test, too. A child of it lives on."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for file, tests in enumerate((2, 3, 4, 1, 2)):
        leaves = "child = os.fork() or time.sleep(600)\n        print(child, file=open('ends', 'a'))"
        ends = f"    if n == 1:\n        {leaves}\n        os._exit(1)\n" * (file == 2)
        (tmp_path / f"test_{file}.py").write_text(
            "import os\nimport time\nimport pytest\n\n"
            f"@pytest.mark.parametrize('n', range({tests}))\ndef test_n(n):\n    pass\n{ends}"
        )
    arguments = ("-q", "--workers", "1", "-p", "tests.support.workers")
    said, ends = tmp_path / "said", tmp_path / "ends"
    try:
        with said.open("w") as file:
            subprocess.run(
                [sys.executable, "-m", "pytest", *arguments, "--rootdir", str(tmp_path)],
                cwd=tmp_path,
                env=os.environ | {"PYTHONPATH": str(Path(gates.__file__).parents[1])},
                stdout=file,
                timeout=120,
            )
    finally:
        (child,) = ends.read_text().split()
        os.kill(int(child), signal.SIGKILL)
    assert "1 failed, 11 passed" in said.read_text()
    assert "\ntest_2.py::test_n[1] ended its worker\n" in said.read_text()


def test_the_labs_tests_run_where_the_lab_or_the_core_has_changed(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)

    def change(name: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")

    assert gates.lab_changed(tmp_path), "there is no repository that could say"
    git("init", "--initial-branch=main")
    change("services/core/a.py")
    git("add", ".")
    git("commit", "-m", "a")
    git("checkout", "-b", "topic")
    change("services/router/b.py")
    assert not gates.lab_changed(tmp_path)
    change("lab/c.py")
    assert gates.lab_changed(tmp_path), "not even added"
    git("add", ".")
    git("commit", "-m", "c")
    assert gates.lab_changed(tmp_path), "committed on the branch"
    git("checkout", "main")
    assert not gates.lab_changed(tmp_path)
    git("branch", "--move", "trunk")
    git("branch", "--delete", "--force", "topic")
    assert gates.lab_changed(tmp_path), "nobody knows what the branch is to join"
