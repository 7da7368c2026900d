"""Jobs as another user than the agent: they reach their own files and none of the agent's."""

from __future__ import annotations

import json
import os
import pwd
import time
from pathlib import Path

import pytest

from gpu_agent.account import account_of_job
from gpu_agent.secrets import secrets_folder
from services.contracts.commands import StopGang
from services.contracts.nodes import RUNS_AS, EndedBy
from services.core.domain.errors import DomainError
from tests.agent.conftest import Node, eventually
from tests.agent.test_exec import run
from wattshift.sources import Archive

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")

PROGRAM = r"""
id -un; echo home $HOME; pwd >> /dev/stdout
echo '{"done": 4}' >> $WATTSHIFT_PROGRESS_FILE
touch $WATTSHIFT_CHECKPOINT_DIR/mine made-here
folder=$(dirname $WATTSHIFT_PROGRESS_FILE)
for file in gang.json spec ../../agent.lock; do cat $folder/$file && echo READ $file; done 2>/dev/null
for file in lease exited stop; do echo x > $folder/$file && echo WROTE $file; done 2>/dev/null
ls $folder ../.. 2>/dev/null && echo LISTED
cat /proc/$AGENT/environ 2>/dev/null && echo READ agent
cat $WATTSHIFT_DEVICE_FILE
trap 'exit 9' TERM; while :; do sleep 0.05; done
"""


@pytest.fixture
def node(open_node: Node) -> Node:
    return open_node


async def test_a_job_runs_as_its_user_and_reaches_nothing_of_the_agents(node: Node) -> None:
    await node.start(GPU_AGENT_RUN_AS="nobody")
    assert node.process
    gang = await node.run("sh", "-c", PROGRAM, environment={"AGENT": str(node.process.pid)})
    await eventually(lambda: (rank := node.plane.rank(gang)) is not None and rank.progress_done == 4)
    stdout = node.rank_dir(gang) / "stdout"
    await eventually(lambda: "relative_speed" in stdout.read_text())
    printed = stdout.read_text()
    assert printed.startswith("nobody\nhome /nonexistent\n")
    assert not [word for word in ("READ", "WROTE", "LISTED") if word in printed]
    await node.send(StopGang(allocation_id=gang, grace_s=10, reason="test"))
    await eventually(lambda: node.plane.state(gang) == "exited")
    rank = node.plane.rank(gang)
    assert rank is not None
    assert (rank.exit_code, rank.ended_by) == (9, EndedBy.STOP)


async def test_a_job_is_told_by_when_it_will_be_killed(node: Node) -> None:
    await node.start()
    limited = await node.run("sh", "-c", "cat $WATTSHIFT_STOP_AT; exit 0", time_limit_s=3_600, grace_s=100)
    await eventually(lambda: node.plane.state(limited) == "exited")
    told = float((node.rank_dir(limited) / "stdout").read_text())
    assert 3_600 < told - time.time() <= 3_700

    loop = "trap 'cat $WATTSHIFT_STOP_AT; exit 0' TERM; ls $WATTSHIFT_STOP_AT; echo on; while :; do sleep 0.05; done"
    gang = await node.run("sh", "-c", loop)
    stdout = node.rank_dir(gang) / "stdout"
    await eventually(lambda: stdout.exists() and stdout.read_text() == "on\n")  # there is none before
    before = time.time()
    await node.send(StopGang(allocation_id=gang, grace_s=200, reason="preempted"))
    await eventually(lambda: node.plane.state(gang) == "exited")
    told = float(stdout.read_text().split()[1])
    assert before + 199 < told < time.time() + 201


async def test_a_checkpoint_folder_is_made_with_the_users_rights(node: Node, tmp_path: Path) -> None:
    await node.start(GPU_AGENT_RUN_AS="nobody")
    tmp_path.chmod(0o700)
    forbidden = await node.run("true", checkpoint_dir=str(tmp_path / "roots-own"), devices=[0])
    own = node.folder / "open"
    own.mkdir()
    own.chmod(0o777)
    allowed = await node.run("true", checkpoint_dir=str(own / "a" / "b"), devices=[1])
    for gang, code in ((forbidden, 126), (allowed, 0)):
        await eventually(lambda gang=gang: node.plane.state(gang) == "exited")
        rank = node.plane.rank(gang)
        assert rank is not None
        assert rank.exit_code == code
    assert not (tmp_path / "roots-own").exists()
    assert (own / "a" / "b").stat().st_uid != 0


async def test_a_killed_shim_still_takes_a_rank_of_another_user_with_it(node: Node) -> None:
    await node.start(GPU_AGENT_RUN_AS="nobody")
    gang = await node.run("sleep", "600")
    await eventually(lambda: node.plane.state(gang) == "running")
    await eventually(lambda: len(node.processes()) == 2)
    node.kill_ranks("shim")
    await eventually(lambda: node.plane.state(gang) == "exited")
    assert not node.processes()


@pytest.mark.parametrize("chosen", ["", "nobody"])
async def test_whoever_submits_on_the_same_host_can_read_as_whom_jobs_run(node: Node, chosen: str) -> None:
    await node.start(GPU_AGENT_RUN_AS=chosen, GPU_AGENT_OWNER_TENANTS="t")
    gang = await node.run("id", "-u")
    await eventually(lambda: node.plane.state(gang) == "exited")

    written = json.loads((node.state_dir / RUNS_AS).read_bytes())

    runner = written["runners"]["t"]
    assert runner["name"] == (chosen or "tenant-t")
    assert (node.rank_dir(gang) / "stdout").read_text() == f"{runner['user_id']}\n"
    assert bool(written["shown"]) != bool(written["passed"])


async def test_secrets_are_the_users_alone(node: Node) -> None:
    await node.start(GPU_AGENT_RUN_AS="nobody")
    node.plane.secrets = {"A": "hunter2"}
    look = 'cat $WATTSHIFT_SECRETS_DIR/key && stat -c "%U %a" $WATTSHIFT_SECRETS_DIR $WATTSHIFT_SECRETS_DIR/key'
    gang = await node.run("sh", "-c", look, secrets=[{"name": "A", "file": "key"}])
    await eventually(lambda: node.plane.state(gang) == "exited")
    assert (node.rank_dir(gang) / "stdout").read_text() == "hunter2nobody 700\nnobody 400\n"
    assert not secrets_folder(node.rank_dir(gang)).exists()


async def test_a_job_runs_as_the_account_of_its_user_and_others_as_the_agent_says(node: Node) -> None:
    await node.start()
    folder = node.folder / "work"
    folder.mkdir()
    folder.chmod(0o755)
    say = "id -un; id -G | tr ' ' '\\n' | sort -n | tr '\\n' ' '; pwd; echo $HOME $USER $LOGNAME"
    say += "; stat -c %U $WATTSHIFT_CHECKPOINT_DIR ."
    gangs = [
        await node.run("sh", "-c", say, account="nobody", devices=[0], working_dir=str(folder)),
        await node.run("sh", "-c", say, account="nobody", devices=[1]),
        await node.run("sh", "-c", "id -un", account="root", devices=[2]),
        await node.run("sh", "-c", "id -un", devices=[3]),
    ]
    for gang in gangs:
        await eventually(lambda gang=gang: node.plane.state(gang) == "exited")
    printed = [(node.rank_dir(gang) / "stdout").read_text().splitlines() for gang in gangs]
    entry = pwd.getpwnam("nobody")
    groups = " ".join(map(str, sorted(os.getgrouplist("nobody", entry.pw_gid)))) + f" {folder}"
    assert printed[0] == ["nobody", groups, f"{entry.pw_dir} nobody nobody", "nobody", "root"]
    assert printed[1][-2:] == ["nobody", "nobody"], "a job without a folder has one of its own"
    assert printed[2:] == [["tenant-t"], ["tenant-t"]], "no job runs as root"


async def test_an_account_that_cannot_enter_the_folder_or_is_not_there_is_one_clear_reason(node: Node) -> None:
    await node.start()
    closed = node.folder / "closed"
    (closed / "inner").mkdir(parents=True)
    closed.chmod(0o700)
    asked = (("nobody", closed / "inner"), ("no-such-account", closed), ("nobody", closed / "missing"))
    said = []
    for number, (account, folder) in enumerate(asked):
        gang = await node.run("true", account=account, devices=[number], working_dir=str(folder))
        await eventually(lambda gang=gang: node.plane.state(gang) == "exited")
        rank = node.plane.rank(gang)
        assert rank is not None
        said.append((rank.ended_by, rank.exit_code, rank.started_at is None, rank.detail))
    reach = f"the account nobody, which the job runs as, cannot enter its working folder {closed}/inner: let it enter"
    assert said[0][:3] == said[1][:3] == (EndedBy.CANNOT_START, 126, True)
    assert (said[0][3] or "").startswith(reach)
    assert said[1][3] == "its user's jobs run as the account no-such-account, which does not exist on this node"
    assert (said[2][3] or "").startswith(f"cannot enter the working directory {closed}/missing")


def test_an_agent_that_is_not_root_runs_jobs_as_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = pwd.getpwnam("nobody")
    monkeypatch.setattr(os, "geteuid", lambda: nobody.pw_uid)
    assert account_of_job("nobody") is None
    with pytest.raises(DomainError, match=r"daemon, but the agent of this node runs as user id .* may not become"):
        account_of_job("daemon")


def test_another_name_for_the_superuser_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    root = pwd.getpwnam("root")
    monkeypatch.setattr(pwd, "getpwnam", lambda _: root)
    with pytest.raises(DomainError, match="toor, which has the user id 0"):
        account_of_job("toor")


async def test_a_command_beside_a_job_runs_as_its_user_too(node: Node) -> None:
    await node.start(GPU_AGENT_RUN_AS="nobody")
    gang = await node.run("sleep", "600")
    await eventually(lambda: node.plane.state(gang) == "running")
    program = "id -un; echo home $HOME; echo written > /dev/stdout; cat /proc/$PPID/environ && echo READ the shim"
    plain = await run(node, gang, "sh", "-c", program)
    terminal = await run(node, gang, "sh", "-c", program, terminal={"rows": 24, "columns": 80})
    for printed in (plain.stdout.decode(), terminal.stdout.decode().replace("\r", "")):
        assert printed.startswith("nobody\nhome /nonexistent\nwritten\n")
        assert "READ" not in printed


async def test_uploaded_files_are_the_users(node: Node) -> None:
    submitted = node.folder / "submitted"
    (submitted / "below").mkdir(parents=True)
    (submitted / "below" / "file").write_text("mine\n")
    with Archive(submitted) as archive:
        node.plane.upload, name = archive._file.read(), archive.sha256
    await node.start()
    look = "cat file; touch ../new new; stat -c %U . .. file"
    gang = await node.run("sh", "-c", look, source={"upload": name}, working_dir="below", account="nobody")
    await eventually(lambda: node.plane.state(gang) == "exited")
    assert (node.rank_dir(gang) / "stdout").read_text() == "mine\nnobody\nnobody\nnobody\n"
