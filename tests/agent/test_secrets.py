"""Secrets of jobs: they reach the processes, and no disk, log or later reader."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_agent import secrets, shim
from gpu_agent.secrets import InputError, secrets_folder, shim_entries
from services.contracts.commands import StopGang
from services.contracts.jobs import JobSpec
from services.contracts.nodes import EndedBy
from tests.agent.conftest import Node, eventually
from tests.agent.test_containers_live import CLIENT

VALUE = "hunter2-" + "s" * 24
USES = [{"name": "A", "env": "TOKEN"}, {"name": "B", "file": "key.pem"}]
LOOK = """
printf %s "$TOKEN" > $OUT/token
cp $WATTSHIFT_SECRETS_DIR/key.pem $OUT/key
stat -c %a $WATTSHIFT_SECRETS_DIR/key.pem > $OUT/mode
touch $OUT/ready
while [ ! -e $OUT/go ]; do sleep 0.05; done
"""


async def a_job_with_secrets(node: Node) -> tuple[str, Path]:
    """Start a job that notes what it gets and waits; return its allocation and where it noted that."""
    out = node.folder / "out"
    out.mkdir()
    out.chmod(0o777)
    node.plane.secrets = {"A": VALUE, "B": f"-----BEGIN\n{VALUE}\nEND\n"}
    gang = await node.run("sh", "-c", LOOK, secrets=USES, environment={"OUT": str(out)})
    await eventually(lambda: (out / "ready").exists())
    return gang, out


def written_to_disk(node: Node) -> list[str]:
    """Return the files of the node, its log included, that have the value in them."""
    places = [node.folder / "agent.log", *node.state_dir.rglob("*"), *(node.folder / "data").rglob("*")]
    return [str(path) for path in places if path.is_file() and VALUE.encode() in path.read_bytes()]


async def test_a_job_gets_its_secrets_and_no_file_keeps_them(node: Node) -> None:
    await node.start()
    gang, out = await a_job_with_secrets(node)

    folder = secrets_folder(node.rank_dir(gang))
    assert (out / "token").read_text() == VALUE
    assert (out / "key").read_text() == f"-----BEGIN\n{VALUE}\nEND\n"
    assert (out / "mode").read_text() == "400\n"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.parent != node.rank_dir(gang) or not secrets.MEMORY.is_mount()
    assert written_to_disk(node) == []

    (out / "go").touch()
    await eventually(lambda: node.plane.state(gang) == "exited")
    rank = node.plane.rank(gang)
    assert rank is not None
    assert (rank.exit_code, rank.ended_by) == (0, EndedBy.ITSELF)
    assert not folder.exists()
    assert written_to_disk(node) == []


async def test_a_killed_agents_ranks_still_clear_up(node: Node) -> None:
    await node.start()
    gang, out = await a_job_with_secrets(node)
    node.kill()
    (out / "go").touch()

    await eventually(lambda: (node.rank_dir(gang) / "exited").exists())
    assert not secrets_folder(node.rank_dir(gang)).exists()


async def test_the_next_agent_clears_up_after_a_killed_shim(node: Node) -> None:
    await node.start()
    gang, _ = await a_job_with_secrets(node)
    folder = secrets_folder(node.rank_dir(gang))
    node.kill()
    node.kill_ranks("shim")
    assert folder.exists()

    await node.start()
    await eventually(lambda: node.plane.state(gang) == "exited")
    assert not folder.exists()
    assert written_to_disk(node) == []


async def test_each_process_of_a_gang_gets_them(node: Node) -> None:
    await node.start()
    node.plane.secrets = {"A": VALUE}
    program = 'printf %s "$TOKEN" > $OUT/$RANK'
    uses, out = [{"name": "A", "env": "TOKEN"}], {"OUT": str(node.folder)}
    gang = await node.run("sh", "-c", program, secrets=uses, environment=out, devices=[0, 1], processes="per_gpu")
    await eventually(lambda: node.plane.state(gang) == "exited")

    assert [(node.folder / rank).read_text() for rank in ("0", "1")] == [VALUE, VALUE]


async def test_more_than_a_pipe_holds_goes_through(node: Node) -> None:
    await node.start()
    node.plane.secrets = {f"S{number}": f"{number}" * 65_000 for number in range(5)}
    uses = [{"name": name, "file": name} for name in node.plane.secrets]
    sizes = node.folder / "sizes"
    gang = await node.run("sh", "-c", f"cat $WATTSHIFT_SECRETS_DIR/* | wc -c > {sizes}", secrets=uses)
    await eventually(lambda: node.plane.state(gang) == "exited")

    assert sizes.read_text() == "325000\n"


async def test_a_gang_lacking_a_secret_never_starts_and_says_why(node: Node) -> None:
    await node.start()
    node.plane.missing_secrets = ["The secret A does not exist any more."]
    gang = await node.run("touch", str(node.folder / "ran"), secrets=USES)
    await eventually(lambda: node.plane.state(gang) == "exited")

    rank = node.plane.rank(gang)
    assert rank is not None
    assert (rank.ended_by, rank.detail) == (EndedBy.REFUSED, "The secret A does not exist any more.")
    assert not (node.folder / "ran").exists()


async def test_a_gang_waits_for_a_control_plane_that_is_away_and_starts_once(node: Node) -> None:
    await node.start()
    node.plane.has_inputs = False
    node.plane.secrets = {"A": VALUE}
    runs = node.folder / "runs"
    gang = await node.run("sh", "-c", f"echo run >> {runs}", secrets=[{"name": "A", "env": "TOKEN"}])
    await eventually(lambda: len(node.plane.inputs_asked) > 1)
    assert node.plane.state(gang) == "starting"
    node.kill()  # the next agent asks again
    asked = len(node.plane.inputs_asked)
    await node.start()
    await eventually(lambda: len(node.plane.inputs_asked) > asked)
    node.plane.has_inputs = True
    await eventually(lambda: node.plane.state(gang) == "exited")

    assert runs.read_text() == "run\n"


async def test_a_gang_that_is_stopped_while_it_waits_never_starts(node: Node) -> None:
    await node.start()
    node.plane.has_inputs = False
    gang = await node.run("touch", str(node.folder / "ran"), secrets=USES)
    await eventually(lambda: node.plane.inputs_asked)
    await node.send(StopGang(allocation_id=gang, grace_s=10, reason="test"))
    await eventually(lambda: node.plane.state(gang) == "exited")

    rank = node.plane.rank(gang)
    assert rank is not None
    assert rank.ended_by == EndedBy.STOP
    asked = len(node.plane.inputs_asked)
    other = await node.run("true")  # its devices are free again, and nothing goes on asking
    await eventually(lambda: node.plane.state(other) == "exited")
    assert len(node.plane.inputs_asked) == asked
    assert not (node.folder / "ran").exists()


async def test_a_container_gets_them_by_a_file_that_no_disk_has(node: Node) -> None:
    calls, client = node.folder / "calls", node.folder / "bin" / "docker"
    client.parent.mkdir()
    client.write_text(CLIENT.format(calls=calls))
    client.chmod(0o755)
    await node.start(GPU_AGENT_CONTAINERS="auto", PATH=f"{client.parent}:{node.environment['PATH']}")
    node.plane.secrets = {"A": VALUE, "B": VALUE}
    gang = await node.run("train", image="example.org/t:1", secrets=USES)
    stdout = node.rank_dir(gang) / "stdout"
    await eventually(lambda: stdout.exists() and f"TOKEN={VALUE}\n" in stdout.read_text())

    folder = secrets_folder(node.rank_dir(gang))
    run = next(line for line in calls.read_text().splitlines() if line.startswith("run"))
    assert f"--env-file {folder}/.env --env-file {node.rank_dir(gang)}" in run, "what describes the gang wins"
    assert f"--volume {folder}:{folder}" in run
    assert VALUE not in run
    assert written_to_disk(node) == [str(stdout)], "where the job itself has printed it"
    await node.send(StopGang(allocation_id=gang, grace_s=10, reason="test"))
    await eventually(lambda: node.plane.state(gang) == "exited")
    assert not folder.exists()


def a_spec(*uses: dict[str, str]) -> JobSpec:
    return JobSpec.model_validate({"name": "j", "command": ["x"], "secrets": list(uses)})


def test_variables_of_the_gang_stay_as_they_are() -> None:
    spec = a_spec({"name": "A", "env": "MASTER_ADDR"}, {"name": "A", "env": "OWN"})
    assert shim_entries(spec, {"A": "v"}, ["MASTER_ADDR"], in_container=False) == [("env", "OWN=v")]


def test_a_container_cannot_have_lines_as_a_variable() -> None:
    with pytest.raises(InputError, match="as a file only"):
        shim_entries(a_spec({"name": "A", "env": "KEY"}), {"A": "a\nb"}, [], in_container=True)


def test_a_link_in_the_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "precious")

    shim.remove_secrets(str(tmp_path / "link"))

    assert (tmp_path / "precious" / "file").exists()


def test_a_folder_in_memory_that_somebody_else_made_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "MEMORY", tmp_path)
    monkeypatch.setattr(Path, "is_mount", lambda path: True)
    assert secrets_folder(Path("/rank")).parent == tmp_path / f"wattshift-{os.geteuid()}"
    (tmp_path / f"wattshift-{os.geteuid()}").symlink_to("/etc")
    assert secrets_folder(Path("/rank")).parent == Path("/rank/secrets")


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files to other users takes root")
@pytest.mark.parametrize("how", ["owner", "mode", "link"])
def test_a_folder_in_memory_that_others_can_change_gets_nothing(tmp_path: Path, how: str) -> None:
    """It was looked at when the rank was prepared, and somebody may have made it since."""
    memory, precious = tmp_path / "memory", tmp_path / "precious"
    precious.mkdir()
    if how == "link":
        memory.symlink_to(precious)
    else:
        memory.mkdir()
        os.chown(memory, 12_345 if how == "owner" else 0, 0)
        memory.chmod(0o711 if how == "owner" else 0o777)
    rank = tmp_path / "rank"
    rank.mkdir()
    (rank / shim.SPEC).write_bytes(
        shim.spec_bytes([("argv", "true"), ("secrets_dir", str(memory / "of-the-rank")), ("user", "12345 12345")])
    )
    shim.write_lease(str(rank / shim.LEASE), shim.clock() + 60, 60)

    ended = subprocess.run(
        [sys.executable, "-I", "-S", shim.__file__, str(rank)],
        input=shim.spec_bytes([("secret_file", "key=value")]),
        capture_output=True,
        check=False,
    )

    assert b"its secrets cannot be written: " in ended.stderr
    assert (ended.returncode, (rank / shim.STARTED).exists()) == (1, False)
    assert [*memory.iterdir(), *precious.iterdir()] == []
    assert precious.stat().st_uid == 0


async def test_the_agent_makes_the_folder_in_memory_before_jobs_can(node: Node) -> None:
    if not secrets.MEMORY.is_mount():
        pytest.skip("this host has no folder in memory")
    await node.start()
    folder = secrets.memory_folder(node.state_dir)
    assert folder.parent == secrets.MEMORY, "nobody else has made it on this host"
    assert (folder.stat().st_uid, folder.stat().st_mode & 0o022) == (os.geteuid(), 0)
