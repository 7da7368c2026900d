"""Whether the account that jobs run as can reach what they are submitted with, and what to type if it cannot."""

from __future__ import annotations

import errno
import getpass
import json
import os
import pwd
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.cli.commands import CliError
from services.cli.jobs import reach, submit
from services.cli.jobs.reach import Runner, closed_folders, lacks, runner_of
from services.cli.jobs.submit import check_folders
from services.cli.main import app
from services.contracts.jobs import JobSpec
from services.contracts.nodes import RUNS_AS
from tests.support.servers import scratch_folder

TENANT = Runner("tenant-t", 2_000_000_001, 2_000_000_001, ())
STRANGER = Runner("somebody", 2_000_000_002, 2_000_000_002, ())
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="running something as another account takes root")


class FakeGateway:
    """Jobs of its caller run as ``nobody``."""

    url = "http://127.0.0.1:8000"

    def get(self, path: str) -> dict[str, Any]:
        assert path == "/v1/whoami"
        return {"account": "nobody", "tenant_id": "default"}


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that everybody may enter."""
    with scratch_folder() as folder:
        yield folder


@pytest.fixture(autouse=True)
def _lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system has no access lists, by which a folder of root's would be opened (see ``test_opening``)."""

    def refuse(*_: Any, **__: Any) -> bool:
        raise OSError(errno.EOPNOTSUPP, "no access lists")

    monkeypatch.setattr(submit, "open_to", refuse)
    monkeypatch.setattr(submit, "has_lists", lambda _: False)


def made(path: Path, mode: int) -> Path:
    """Make a folder with this mode."""
    path.mkdir(parents=True)
    path.chmod(mode)
    return path


def a_job(folder: Path | None, *command: str, **fields: Any) -> JobSpec:
    """Return a job that runs there."""
    return JobSpec(name="a", command=list(command) or ["true"], working_dir=folder and str(folder), **fields)


def check(*specs: JobSpec, **options: Any) -> None:
    """Check jobs as submissions are checked."""
    check_folders(FakeGateway(), list(specs), **options)  # type: ignore[arg-type]


def lines_of(error: BaseException) -> list[str]:
    """Return the lines that an error says to type."""
    return [line.strip() for line in str(error).splitlines()[1:]]


def as_nobody(folder: Path, program: str) -> int:
    """Run something in a folder as a job of nobody would; return its status."""
    entry = pwd.getpwnam("nobody")
    command = ["/bin/sh", "-c", f'cd -P -- "$0" && {program}', str(folder)]
    return subprocess.run(command, user=entry.pw_uid, group=entry.pw_gid, extra_groups=[], check=False).returncode


@as_root
@pytest.mark.parametrize(
    ("outer", "inner", "what"),
    [
        (0o700, 0o777, "cannot enter {outer}, on the way to the working folder {inner}"),
        (0o700, 0o700, "cannot enter {outer}, on the way to the working folder {inner}"),
        (0o711, 0o700, "cannot enter {inner}"),
        (0o711, 0o755, "cannot write to the working folder {inner}"),
        (0o711, 0o733, "cannot read the working folder {inner}"),
        (0o711, 0o711, "cannot read the working folder {inner}"),
    ],
)
def test_a_folder_that_the_account_cannot_use_is_refused_with_lines_that_open_it(
    place: Path, outer: int, inner: int, what: str
) -> None:
    above = made(place / "above", outer)
    folder = made(above / "it's here", inner)
    (folder / "train.py").touch()
    assert as_nobody(folder, "ls >/dev/null && touch made") != 0

    with pytest.raises(CliError) as refused:
        check(a_job(folder), typed=["--workdir", str(folder), "--", "true"])

    first, *lines = str(refused.value).splitlines()
    assert first == f"jobs run as the account nobody, which {what.format(outer=above, inner=folder)}: type one of"
    by_upload, *_, by_mode = map(str.strip, lines)
    assert shlex.split(by_upload) == ["wattshift", "submit", "--upload", str(folder), "--", "true"]
    subprocess.run(["/bin/sh", "-c", by_mode], check=True)
    check(a_job(folder))
    assert as_nobody(folder, "ls >/dev/null && touch made") == 0


@as_root
def test_a_folder_may_be_only_read_by_a_job_that_says_so(place: Path) -> None:
    folder = made(place / "data", 0o755)
    with pytest.raises(CliError) as refused:
        check(a_job(folder), typed=["--workdir", str(folder), "--", "true"])

    by_flag, by_mode = map(shlex.split, lines_of(refused.value))  # there is nothing to send along
    assert by_flag == ["wattshift", "submit", "--read-only", "--workdir", str(folder), "--", "true"]
    assert by_mode == ["chmod", "a+rwx", str(folder)]
    check(a_job(folder), writes=False)


@as_root
def test_the_kernel_is_asked_about_groups_and_access_lists(place: Path) -> None:
    entry = pwd.getpwnam("nobody")
    folder = made(place / "shared", 0o770)
    os.chown(folder, 0, 4_711)
    outsider = Runner("nobody", entry.pw_uid, entry.pw_gid, ())
    member = Runner("nobody", entry.pw_uid, entry.pw_gid, (4_711,))
    assert (lacks(outsider, folder, os.W_OK), lacks(member, folder, os.W_OK)) == (True, False)
    if not hasattr(os, "setxattr"):
        pytest.skip("access lists are Linux's")
    try:  # user::rwx, user:nobody:rwx, group::---, mask::rwx, other::---
        entries = [(1, 7, -1), (2, 7, entry.pw_uid), (4, 0, -1), (16, 7, -1), (32, 0, -1)]
        packed = b"".join(
            tag.to_bytes(2, "little") + perm.to_bytes(2, "little") + (who & 0xFFFFFFFF).to_bytes(4, "little")
            for tag, perm, who in entries
        )
        os.setxattr(folder, reach.ACCESS_LIST, (2).to_bytes(4, "little") + packed)
    except OSError as error:
        pytest.skip(f"no access lists here: {error.strerror}")
    assert not lacks(outsider, folder, os.R_OK | os.W_OK | os.X_OK)
    assert lacks(STRANGER, folder, os.X_OK)


@as_root
def test_the_owners_bits_count_before_those_of_others(place: Path) -> None:
    own = made(place / "own", 0o077)
    os.chown(own, 65534, 65534)
    with pytest.raises(CliError, match="cannot enter"):
        check(a_job(own))


@as_root
def test_a_program_out_of_reach_is_refused_whatever_comes_after_it_in_the_path(place: Path) -> None:
    folder = made(place / "work", 0o777)
    closed = made(place / "home", 0o700)
    venv = made(closed / "venv" / "bin", 0o755)
    python = venv / "python3"
    python.symlink_to("/usr/bin/env")
    path = {"PATH": f"{venv}:/usr/bin:/bin", "VIRTUAL_ENV": str(venv.parent)}

    with pytest.raises(CliError) as refused:
        check(a_job(folder, "python3", "-V", environment=path), typed=["--", "python3", "-V"])

    said = f"jobs run as the account nobody, which cannot enter {closed}, on the way to the program {python}"
    assert str(refused.value).splitlines()[0] == f"{said}: type one of"
    assert lines_of(refused.value) == [f"chmod a+x {closed}"]
    check(a_job(folder, "sh", "-c", "true", environment=path))
    check(a_job(folder, "no-such-program", environment=path))
    script = folder / "run.sh"
    script.write_text(f"#!{python}\n")
    script.chmod(0o755)
    for command in ("./run.sh", str(script)):
        with pytest.raises(CliError, match=f"on the way to the program {python}"):
            check(a_job(folder, command, environment=path))
    with pytest.raises(CliError, match=f"on the way to the program {python}"):
        check(a_job(None, str(python), source={"upload": "0" * 64}))
    subprocess.run(["/bin/sh", "-c", lines_of(refused.value)[0]], check=True)
    check(a_job(folder, "python3", "-V", environment=path), a_job(folder, "./run.sh", environment=path))


@as_root
def test_the_next_program_in_the_path_is_what_a_job_runs_and_the_caller_hears_of_it(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(place / "work", 0o777)
    closed = made(made(place / "home", 0o700) / "bin", 0o755)
    for name in ("sh", "only-here"):
        (closed / name).symlink_to("/bin/sh")
    path = {"PATH": f"{closed}:/usr/bin:/bin"}

    check(a_job(folder, "sh", environment=path))

    said = f"a runs /usr/bin/sh: the account nobody cannot run {closed}/sh, which comes first in PATH"
    assert said in capsys.readouterr().err
    with pytest.raises(CliError, match="on the way to the program"):
        check(a_job(folder, "only-here", environment=path))


@as_root
def test_one_line_opens_all_that_is_in_the_way(place: Path) -> None:
    home = made(place / "home", 0o700)
    folder = made(home / "work", 0o700)
    program = made(home / "venv" / "bin", 0o755) / "train"
    (home / "venv").chmod(0o700)
    program.symlink_to("/bin/true")

    with pytest.raises(CliError) as refused:
        check(a_job(folder, str(program)), typed=["--", str(program)])

    (line,) = lines_of(refused.value)
    subprocess.run(["/bin/sh", "-c", line], check=True)
    check(a_job(folder, str(program)))
    assert as_nobody(folder, f"{program} && touch made") == 0


@as_root
def test_what_jobs_are_shown_is_no_obstacle_unless_they_would_write_there(place: Path) -> None:
    shown = made(made(place / "home", 0o700) / "venv" / "bin", 0o755)
    (shown / "python3").symlink_to("/bin/true")
    runner = Runner("tenant-t", 2_000_000_001, 2_000_000_001, (), shown=(shown.parent,))

    assert closed_folders(runner, shown / "python3") == []
    assert not lacks(runner, shown, os.R_OK | os.X_OK)
    assert lacks(runner, shown, os.W_OK)
    assert closed_folders(TENANT, shown / "python3") == [place / "home"]


@as_root
def test_a_node_whose_own_folder_is_closed_is_said_before_a_job_is_accepted(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = made(place / "root", 0o700)
    node = made(home / "data" / "nodes" / "node-1", 0o711)
    written = {"name": "tenant-t", "user_id": 2_000_000_001, "group_id": 2_000_000_001, "groups": []}
    (node / RUNS_AS).write_text(json.dumps({"runners": {"default": written}, "shown": [], "passed": [str(node)]}))
    monkeypatch.setattr(submit, "installation_of", lambda _: home / "data")
    monkeypatch.setattr(FakeGateway, "get", lambda self, path: {"account": None, "tenant_id": "default"})

    with pytest.raises(CliError) as refused:
        check(a_job(None), typed=["--", "true"])

    said = f"jobs run as the account tenant-t, which cannot enter {home}, on the way to where jobs run"
    assert str(refused.value).splitlines()[0] == f"{said}: type one of"
    assert [line.split()[:2] for line in lines_of(refused.value)] == [["chmod", "a+x"]]
    subprocess.run(["/bin/sh", "-c", lines_of(refused.value)[0]], check=True)
    check(a_job(None))


def test_an_account_that_is_the_callers_own_or_that_is_unknown_keeps_nothing_out(tmp_path: Path) -> None:
    own = made(tmp_path / "own", 0o700)
    me = {"account": getpass.getuser(), "tenant_id": "default"}
    runner = runner_of(me, None)

    assert (runner is None) == (os.geteuid() == 0), "no job runs as the superuser"
    if runner is not None:
        assert closed_folders(runner, own) == []
        assert not lacks(runner, own, os.W_OK)
    assert runner_of({"account": "no-such-account", "tenant_id": "default"}, None) is None
    assert runner_of({"account": None, "tenant_id": "default"}, tmp_path) is None


def test_without_root_owners_and_modes_are_judged(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = made(place / "closed", 0o700)
    inner = made(closed / "inner", 0o755)
    monkeypatch.setattr(reach.os, "geteuid", lambda: 4_711)

    assert closed_folders(STRANGER, inner) == [closed]
    assert lacks(STRANGER, inner, os.W_OK)
    closed.chmod(0o711)
    inner.chmod(0o777)
    assert closed_folders(STRANGER, inner) == []
    assert not lacks(STRANGER, inner, os.R_OK | os.W_OK | os.X_OK)


@as_root
def test_the_line_with_upload_is_one_that_the_command_line_takes(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it was typed, with the files sent along; nothing is submitted before it is known to run."""
    folder = made(place / "closed", 0o700)
    (folder / "train.py").write_text("print()\n")
    monkeypatch.chdir(folder)
    made_jobs: list[JobSpec] = []

    class Accepting(FakeGateway):
        def send(self, archive: Any) -> None: ...

        def call(self, method: str, path: str, *, body: JobSpec, **_: Any) -> dict[str, Any]:
            made_jobs.append(body)
            return {"id": "job_1", "name": body.name, "state": "queued"}

    monkeypatch.setattr(submit, "Gateway", Accepting)
    for typed in (
        ["--name", "first", "--", "/usr/bin/env", "python3", "train.py"],
        ["--gpus", "2", "-c", "cat train.py > out"],
        ["--workdir", str(folder), "--", "/bin/true"],
    ):
        made_jobs.clear()
        for test_only in (["--test-only"], []):
            with pytest.raises(CliError) as refused:
                app(["submit", *test_only, *typed], standalone_mode=False)
            assert not made_jobs
        by_upload = shlex.split(lines_of(refused.value)[0])

        app(by_upload[1:], standalone_mode=False)

        (spec,) = made_jobs
        assert spec.source is not None
        assert spec.working_dir is None
    capsys.readouterr()
