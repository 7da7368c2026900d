"""A folder of root's is opened to the account that its jobs run as, and to nobody else."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_agent.enclosure import is_opened_to
from services.cli.commands import CliError
from services.cli.jobs import submit
from services.cli.jobs.reach import Runner
from services.cli.site import opening
from services.cli.site.opening import may_be_opened, open_to
from services.contracts.jobs import JobSpec
from tests.support.servers import scratch_folder

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or sys.platform != "linux", reason="opening folders to another account takes root, on Linux"
)
USER_ID, STRANGER_ID = 2_000_000_001, 2_000_000_002


class FakeGateway:
    url = "http://127.0.0.1:8000"

    def get(self, path: str) -> dict[str, Any]:
        return {"account": None, "tenant_id": "default"}


@pytest.fixture
def place() -> Iterator[Path]:
    """A closed folder with another in it."""
    with scratch_folder() as folder:
        (folder / "closed" / "mine").mkdir(parents=True)
        (folder / "closed").chmod(0o700)
        probe = folder / "probe"
        probe.touch()
        try:
            open_to(USER_ID, folder / "closed" / "mine", writes=False)
        except OSError as error:
            pytest.skip(f"no access lists here: {error}")
        subprocess.run(["rmdir", folder / "closed" / "mine"], check=True)
        (folder / "closed" / "mine").mkdir()
        yield folder / "closed" / "mine"


def does(user_id: int, folder: Path, words: str) -> bool:
    """Whether an account can do something in a folder; it is put there, as the agent puts a job."""
    at = os.open(folder, os.O_RDONLY)
    done = subprocess.run(
        ["/bin/sh", "-c", words], user=user_id, group=user_id, extra_groups=[], preexec_fn=lambda: os.fchdir(at),
        stderr=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    os.close(at)
    return done.returncode == 0


def test_the_account_reads_and_writes_all_that_is_there_and_will_be_and_nobody_else_does(place: Path) -> None:
    (place / "sub").mkdir(mode=0o700)
    (place / "sub" / "key").write_text("k")
    (place / "sub" / "key").chmod(0o600)
    (place / "run.sh").write_text("#!/bin/sh\n")
    (place / "run.sh").chmod(0o700)

    assert open_to(USER_ID, place, writes=True)

    assert does(USER_ID, place, "cat sub/key >/dev/null && ./run.sh && echo x >sub/key && mkdir new && echo r >new/r")
    assert not does(STRANGER_ID, place, "cat sub/key")
    assert not does(STRANGER_ID, place, "touch stranger")
    assert not does(USER_ID, place, "test -x sub/key")
    (place / "new" / "mine").write_text("later")
    assert does(USER_ID, place, "cat new/mine && echo y >>new/mine")
    assert not open_to(USER_ID, place, writes=True)  # and says so once
    assert is_opened_to(USER_ID, os.fsencode(place))
    assert not is_opened_to(STRANGER_ID, os.fsencode(place))


def test_a_job_that_only_reads_gets_no_right_to_write(place: Path) -> None:
    (place / "data").write_text("d")
    (place / "data").chmod(0o600)

    open_to(USER_ID, place, writes=False)

    assert does(USER_ID, place, "cat data")
    assert not does(USER_ID, place, "echo x >>data")
    assert not does(USER_ID, place, "touch new")


def test_what_a_mask_took_from_others_it_does_not_give_back(place: Path) -> None:
    (place / "data").write_text("d")
    at = os.open(place / "data", os.O_RDONLY)
    listed = {(1, opening._NO_ID): 6, (2, STRANGER_ID): 6, (4, opening._NO_ID): 6, (16, opening._NO_ID): 4}
    opening._set(at, "system.posix_acl_access", listed | {(32, opening._NO_ID): 0})
    os.close(at)
    open_to(STRANGER_ID, place.parent, writes=False)
    assert not does(STRANGER_ID, place, "echo x >>data")

    open_to(USER_ID, place, writes=True)

    assert does(USER_ID, place, "echo x >>data")
    assert not does(STRANGER_ID, place, "echo x >>data")


def test_nothing_outside_is_opened_by_a_link(place: Path) -> None:
    outside = place.parent / "secret"
    outside.write_text("s")
    outside.chmod(0o600)
    (place / "link").symlink_to(outside)
    (place / "folder").symlink_to(place.parent)
    (place / "second-name").hardlink_to(outside)

    open_to(USER_ID, place, writes=True)

    assert not does(USER_ID, place, "cat second-name")
    assert not any(name.startswith("system.posix_acl") for name in os.listxattr(outside))
    assert not is_opened_to(USER_ID, os.fsencode(place.parent))


def test_roots_home_the_system_and_the_installation_stay_closed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = place / "home"
    for name in ("work", ".ssh", "data/nodes"):
        (home / name).mkdir(parents=True)
    entry = pwd.getpwuid(0)
    monkeypatch.setattr(opening.pwd, "getpwuid", lambda _: pwd.struct_passwd((*entry[:5], str(home), entry[6])))
    kept = [home / "data"]

    assert may_be_opened(home / "work", kept)
    closed = (home, place, home / ".ssh", home / "data", home / "data" / "nodes", Path("/etc/x"), Path("/"))
    for folder in (*closed, Path(opening.__file__).parent):
        assert not may_be_opened(folder, kept), folder
    (home / "link").symlink_to("/etc")
    assert not may_be_opened(home / "link", kept)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    runner = Runner("tenant-default", USER_ID, USER_ID, (), sees_opened=True)
    monkeypatch.setattr(submit, "runner_of", lambda *_: runner)
    return runner


def test_submit_opens_the_folder_says_so_once_and_only_if_the_job_is_to_be_submitted(
    place: Path, runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    job = JobSpec(name="a", command=["./run.sh"], working_dir=str(place))
    (place / "run.sh").write_text("#!/bin/sh\n")
    (place / "run.sh").chmod(0o700)

    submit.check_folders(FakeGateway(), [job], opens=False)  # type: ignore[arg-type]
    assert not is_opened_to(USER_ID, os.fsencode(place))

    for _ in range(2):
        submit.check_folders(FakeGateway(), [job])  # type: ignore[arg-type]
    assert does(USER_ID, place, "./run.sh && touch made")
    said = capsys.readouterr().err
    assert said.count("opened") == 1
    assert f"setfacl -Rbk {place}" in said
    assert not is_opened_to(USER_ID, os.fsencode(place.parent))  # jobs are shown it where it is


def test_where_jobs_are_not_shown_it_the_way_there_is_opened_for_passing(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner("tenant-default", USER_ID, USER_ID, ())
    monkeypatch.setattr(submit, "runner_of", lambda *_: runner)

    submit.check_folders(FakeGateway(), [JobSpec(name="a", command=["true"], working_dir=str(place))])  # type: ignore[arg-type]

    assert does(USER_ID, Path("/"), f"cd {place} && touch made")
    assert not does(USER_ID, Path("/"), f"ls {place.parent}")


def test_a_folder_that_must_stay_closed_is_not_advised_to_be_opened(
    place: Path, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "train.py").touch()
    monkeypatch.setattr(submit, "installation_of", lambda _: place)
    job = JobSpec(name="a", command=["true"], working_dir=str(place))

    with pytest.raises(CliError) as refused:
        submit.check_folders(FakeGateway(), [job], typed=["--workdir", str(place), "true"])  # type: ignore[arg-type]

    assert "--upload" in str(refused.value)
    assert "chmod" not in str(refused.value)
