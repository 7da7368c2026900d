"""Checkpoints on nodes that share no file system: what counts as a copy, and which one a gang begins with."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gpu_agent.checkpoint_folders import ChangedError, DamagedError, listed, restore
from gpu_agent.checkpoint_store import Entry, Manifest, Store, StoreError
from gpu_agent.checkpoints import OUTCOME, Checkpoints
from gpu_agent.ranks import Exit, RankFolder
from gpu_agent.settings import AgentSettings
from services.contracts.commands import StartGang, StopGang
from services.contracts.jobs import JobSpec
from services.contracts.nodes import EndedBy
from services.kit.files import DRAFT
from tests.agent.conftest import eventually
from tests.support.s3 import BUCKET, KEY, SECRET, s3_server

pytest.importorskip("obstore", reason="the extra s3 (obstore) is not installed")

JOB = "job_1"


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as (url, _):
        yield url


@pytest.fixture(params=["s3", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store: a prefix of a bucket, and a folder."""
    if request.param == "folder":
        return Store.at(str(tmp_path / "store"))
    url = request.getfixturevalue("s3")
    return Store.at(f"s3://{BUCKET}/{tmp_path.name}", endpoint=url, key=KEY, secret=SECRET)


class Dying:
    """A store whose agent is killed when it has written so often."""

    def __init__(self, store: Store, writes: int) -> None:
        self._store, self.left = store, writes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def write(self, *arguments: Any) -> None:
        self._die()
        self._store.write(*arguments)

    def keep(self, *arguments: Any) -> None:
        self._die()
        self._store.keep(*arguments)

    def forget(self, *arguments: Any) -> None:
        self._die()
        self._store.forget(*arguments)

    def _die(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def start(generation: int, *, nnodes: int = 1, node_rank: int = 0) -> StartGang:
    return StartGang(
        allocation_id=f"{JOB}.{generation}",
        job_id=JOB,
        generation=generation,
        tenant_id="t",
        spec=JobSpec.model_validate({"name": "test", "command": ["true"], "grace_s": 1.0}),
        devices=[0],
        node_rank=node_rank,
        nnodes=nnodes,
        world_size=nnodes,
        rank_offset=node_rank,
        master_addr="127.0.0.1",
        master_port=1,
    )


class Host:
    """The folders of one node, by the code that an agent uses."""

    def __init__(self, folder: Path, store: Any, max_bytes: int = 2**30) -> None:
        self.folder, self.store, self.max_bytes = folder / "checkpoints", store, max_bytes
        self.again()

    def again(self) -> None:
        """As a restarted agent."""
        self.checkpoints = Checkpoints(
            AgentSettings(
                node_id="n1",
                state_dir=self.folder.parent,
                checkpoints="local",
                checkpoint_interval_s=0.1,
                checkpoint_wait_s=0.2,
                checkpoint_max_bytes=self.max_bytes,
                retry_s=0.05,
            ),
            self.store,
            account_of=lambda _: None,
            on_change=lambda: None,
        )

    async def begin(self, gang: StartGang) -> dict[str, str]:
        """Return what a gang finds."""
        await self.checkpoints.prepare(gang)
        (self.folder / JOB).mkdir(exist_ok=True)
        return self.content()

    def content(self) -> dict[str, str]:
        files = (path for path in sorted((self.folder / JOB).rglob("*")) if path.is_file())
        return {str(path.relative_to(self.folder / JOB)): path.read_text() for path in files}

    def write(self, name: str, text: str) -> None:
        (self.folder / JOB / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / JOB / name).write_text(text)

    def copy(self, gang: StartGang) -> None:
        self.checkpoints._copy(gang, is_last=True)


async def test_a_gang_goes_on_elsewhere_with_what_was_copied(store: Store, tmp_path: Path) -> None:
    a, b = Host(tmp_path / "a", store), Host(tmp_path / "b", store)
    assert await a.begin(start(1)) == {}
    a.write("step", "10")
    a.write("deep/model", "x" * 100_000)
    (a.folder / JOB / "deep" / "model").chmod(0o640)
    (a.folder / JOB / "latest").symlink_to("deep/model")
    a.copy(start(1))
    assert await b.begin(start(2)) == {"step": "10", "deep/model": "x" * 100_000, "latest": "x" * 100_000}
    assert (b.folder / JOB / "deep" / "model").stat().st_mode & 0o777 == 0o640
    assert os.readlink(b.folder / JOB / "latest") == "deep/model"

    b.write("step", "20")
    (b.folder / JOB / "deep" / "model").unlink()
    b.copy(start(2))
    assert await a.begin(start(3)) == {"step": "20"}


async def test_killed_at_any_write_a_copy_is_the_old_one_or_the_new_one(store: Store, tmp_path: Path) -> None:
    a = Host(tmp_path / "a", store)
    await a.begin(start(1))
    a.write("one", "old")
    a.write("two", "old")
    a.copy(start(1))
    await a.begin(start(2))
    a.write("one", "new")
    a.write("two", "new")
    seen: list[dict[str, str]] = []
    for writes in range(5):
        a.store = Dying(store, writes)
        a.again()
        with suppress(KeyboardInterrupt):
            a.copy(start(2))
        seen.append(await Host(tmp_path / f"b{writes}", store).begin(start(3)))
    old, new = {"one": "old", "two": "old"}, {"one": "new", "two": "new"}
    assert seen == [old, old, old, new, new]  # two files, the manifest, and then what is older goes


async def test_a_node_that_was_given_up_does_not_replace_a_later_copy(store: Store, tmp_path: Path) -> None:
    old, now, later = (Host(tmp_path / name, store) for name in "abc")
    await old.begin(start(1))
    old.write("step", "10, too late")
    await now.begin(start(2))
    now.write("step", "5")
    now.copy(start(2))
    old.copy(start(1))
    assert await later.begin(start(3)) == {"step": "5"}
    assert await old.begin(start(4)) == {"step": "5"}, "what is here is of a gang before"


async def test_what_is_here_and_newer_than_any_copy_is_kept(store: Store, tmp_path: Path) -> None:
    a = Host(tmp_path / "a", store)
    await a.begin(start(1))
    a.write("step", "1")
    a.copy(start(1))
    await a.begin(start(2))
    a.write("step", "2, never copied")
    a.again()
    assert await a.begin(start(3)) == {"step": "2, never copied"}


async def test_nodes_of_a_gang_get_what_all_of_them_had(store: Store, tmp_path: Path) -> None:
    a, b = Host(tmp_path / "a", store), Host(tmp_path / "b", store)
    await a.begin(start(1))
    for name in ("shard0", "shard1", "config", "rotated"):
        a.write(name, "old")
    a.copy(start(1))

    pair = [start(2, nnodes=2), start(2, nnodes=2, node_rank=1)]
    old = dict.fromkeys(("config", "rotated", "shard0", "shard1"), "old")
    assert await a.begin(pair[0]) == await b.begin(pair[1]) == old
    a.write("shard0", "new of a")
    b.write("shard1", "new of b")
    (a.folder / JOB / "rotated").unlink()
    a.copy(pair[0])
    half = await Host(tmp_path / "c", store).begin(start(3))
    assert half["shard0"] == "old", "the copy of one node of two is none"
    b.copy(pair[1])
    whole = await Host(tmp_path / "d", store).begin(start(4))
    assert whole == {"config": "old", "shard0": "new of a", "shard1": "new of b"}


async def test_a_copy_that_lost_a_file_is_none(store: Store, tmp_path: Path) -> None:
    a = Host(tmp_path / "a", store)
    for generation in (1, 2):
        await a.begin(start(generation))
        a.write("step", str(generation))
        a.store = Dying(store, 2)  # killed before the copy before is removed
        a.again()
        with suppress(KeyboardInterrupt):
            a.copy(start(generation))
    newest = store.newest(JOB, 3)
    assert newest is not None
    assert newest.generation == 2
    (entry,) = newest.manifests[0].entries.values()
    store.write(JOB, 2, 0, entry.key, [b"3"])
    with pytest.raises(DamagedError):
        restore(store, JOB, newest, tmp_path / "damaged", None)
    assert not (tmp_path / "damaged").exists()
    assert await Host(tmp_path / "b", store).begin(start(3)) == {"step": "1"}


async def test_a_folder_that_changes_meanwhile_is_no_copy(store: Store, tmp_path: Path) -> None:
    class Busy(Dying):
        def write(self, *arguments: Any) -> None:
            self._store.write(*arguments)
            if not (host.folder / JOB / "late").exists():
                host.write("late", "new")

    host = Host(tmp_path / "a", Busy(store, 9))
    await host.begin(start(1))
    host.write("step", "1")
    with pytest.raises(ChangedError):
        host.copy(start(1))
    assert store.newest(JOB, 9) is None
    host.copy(start(1))
    assert await Host(tmp_path / "b", store).begin(start(2)) == {"late": "new", "step": "1"}


async def test_links_out_of_the_folder_are_neither_followed_nor_kept(store: Store, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "key").write_text("secret")
    a = Host(tmp_path / "a", store)
    await a.begin(start(1))
    a.write("step", "1")
    (a.folder / JOB / "key").symlink_to(tmp_path / "outside" / "key")
    (a.folder / JOB / "all").symlink_to("../../../outside")
    os.mkfifo(a.folder / JOB / "pipe")
    a.copy(start(1))
    assert await Host(tmp_path / "b", store).begin(start(2)) == {"step": "1"}
    assert sorted(os.listdir(tmp_path / "b" / "checkpoints" / JOB)) == ["step"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make files of another account")
def test_files_of_others_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    (tmp_path / "theirs").write_text("")
    os.chown(tmp_path / "mine", 12_345, 12_345)
    assert list(listed(tmp_path, 12_345)) == ["mine"]


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", ""])
def test_a_manifest_cannot_name_what_is_outside(path: str) -> None:
    with pytest.raises(ValidationError, match="leads out of its folder"):
        Manifest(nodes=1, entries={path: Entry(kind="file")})
    with pytest.raises(ValidationError, match="no folder"):
        Manifest(nodes=1, entries={"a": Entry(kind="link", target="b"), "a/x": Entry(kind="file")})
    with pytest.raises(ValidationError, match="leads out of its folder"):
        Manifest(nodes=1, entries={"a": Entry(kind="link", target="b/../../c")})


def ended(tmp_path: Path, *, at: datetime | None = None) -> tuple[RankFolder, Exit]:
    """A rank that was stopped and has ended."""
    rank = RankFolder(tmp_path / "rank")
    rank.create(b"{}")
    (rank.path / "started").write_text("shim=1\n")
    return rank, Exit(-15, EndedBy.STOP, "", at or datetime.now(UTC))


async def test_too_large_a_checkpoint_is_not_copied_and_said(store: Store, tmp_path: Path) -> None:
    a = Host(tmp_path / "a", store, max_bytes=10)
    await a.begin(start(1))
    a.write("model", "x" * 11)
    rank, exit = ended(tmp_path)
    await eventually(lambda: a.checkpoints.outcome(start(1), rank, exit) is not None)
    said = a.checkpoints.outcome(start(1), rank, exit)
    assert said == "Its checkpoint was not copied: it has 11 bytes, and GPU_AGENT_CHECKPOINT_MAX_BYTES is 10."
    assert store.newest(JOB, 9) is None


async def test_an_end_waits_for_its_copy_and_says_if_there_is_none_in_time(tmp_path: Path) -> None:
    class Away(Dying):
        is_away = True

        def write(self, *arguments: Any) -> None:
            if self.is_away:
                raise StoreError("it does not answer")
            self._store.write(*arguments)

    away = Away(store := Store.at(str(tmp_path / "store")), 9)
    a = Host(tmp_path / "a", away)
    await a.begin(start(1))
    a.write("step", "1")
    rank, exit = ended(tmp_path)
    assert a.checkpoints.outcome(start(1), rank, exit) is None
    rank.path.joinpath("stop").write_text("cause=stop\ngrace_s=0.5\n")
    await eventually(lambda: a.checkpoints.outcome(start(1), rank, exit) is not None)
    said = a.checkpoints.outcome(start(1), rank, exit) or ""
    assert said.startswith("Its checkpoint was not copied in time: elsewhere it continues from an earlier one")
    assert not a.checkpoints.is_settled(start(1), rank)
    away.is_away = False
    await eventually(lambda: a.checkpoints.is_settled(start(1), rank))
    assert await Host(tmp_path / "b", store).begin(start(2)) == {"step": "1"}


async def test_an_end_waits_no_longer_because_the_hosts_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Away(Dying):
        def write(self, *arguments: Any) -> None:
            raise StoreError("it does not answer")

    a = Host(tmp_path / "a", Away(Store.at(str(tmp_path / "store")), 9))
    await a.begin(start(1))
    a.write("step", "1")
    rank, exit = ended(tmp_path, at=datetime.now(UTC) + timedelta(days=1))  # the clock was set back by a day since
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    assert a.checkpoints.outcome(start(1), rank, exit) is None
    now_s += 0.2
    said = a.checkpoints.outcome(start(1), rank, exit) or ""
    assert said.startswith("Its checkpoint was not copied in time"), "its devices would be held for a day"
    await a.checkpoints.close()


def test_settings_name_a_store_or_none() -> None:
    for wrong in (
        {"checkpoints": "store"},
        {"checkpoint_store": "/x"},
        {"checkpoints": "store", "checkpoint_store": "x"},
        {"checkpoints": "store", "checkpoint_store": "/x", "checkpoint_store_key": "k"},
        {"pass_environment": ["GPU_AGENT_CHECKPOINT_STORE_SECRET"]},
    ):
        with pytest.raises(ValidationError):
            AgentSettings(**wrong)


@pytest.fixture
async def unshared(nodes: list[Any], s3: str, tmp_path: Path) -> list[Any]:
    """Two nodes that share nothing but a store."""
    for node in nodes:
        await node.stop()
        node.environment |= {
            "WATTSHIFT_DATA_DIR": str(node.folder / "data"),
            "GPU_AGENT_CHECKPOINTS": "store",
            "GPU_AGENT_CHECKPOINT_STORE": f"s3://{BUCKET}/live-{tmp_path.name}",
            "GPU_AGENT_CHECKPOINT_STORE_ENDPOINT": s3,
            "GPU_AGENT_CHECKPOINT_STORE_KEY": KEY,
            "GPU_AGENT_CHECKPOINT_STORE_SECRET": SECRET,
        }
        await node.start()
    return nodes


SAVES = """
import os, signal, sys, time
folder = os.environ["WATTSHIFT_CHECKPOINT_DIR"]
found = open(folder + "/step").read() if os.path.exists(folder + "/step") else "nothing"
print("found", found, "secret" if "the-secret" in str(os.environ) else "", flush=True)
def save(*_):
    open(folder + "/step", "w").write("saved by " + os.environ["WATTSHIFT_GENERATION"])
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open(folder + "/ready", "w").close()
if found == "nothing":
    time.sleep(60)
"""


async def stopped(node: Any, gang: str) -> None:
    await node.send(StopGang(allocation_id=gang, grace_s=20.0, reason="preempted"))
    await eventually(lambda: node.plane.state(gang) == "exited")


async def test_a_preempted_job_finds_its_checkpoint_on_another_node(unshared: list[Any]) -> None:
    first, second = unshared
    gang = await first.run(sys.executable, "-c", SAVES, job=JOB, generation=1)
    await eventually(lambda: (first.state_dir / "checkpoints" / JOB / "ready").exists())
    await stopped(first, gang)
    assert first.plane.rank(gang).detail is None

    gang = await second.run(sys.executable, "-c", SAVES, job=JOB, generation=2)
    await eventually(lambda: second.plane.state(gang) == "exited")
    assert (second.rank_dir(gang) / "stdout").read_text() == "found saved by 1 \n"


async def test_an_agent_that_is_killed_while_it_copies_leaves_it_to_the_next(unshared: list[Any], s3: str) -> None:
    first, second = unshared
    await first.stop()
    first.environment["GPU_AGENT_CHECKPOINT_STORE_ENDPOINT"] = "http://127.0.0.1:9"
    first.environment["GPU_AGENT_CHECKPOINT_WAIT_S"] = "60"
    first._spawn(first.environment)
    await eventually(lambda: first.plane.heartbeats[-1].closed)
    assert "store of checkpoints" in first.plane.heartbeats[-1].closed
    gang = first.gang(sys.executable, "-c", SAVES, job=JOB, generation=1)
    await first.stop()
    first.environment["GPU_AGENT_CHECKPOINT_STORE_ENDPOINT"] = s3
    await first.start()
    first.plane.named.add(gang.allocation_id)
    await first.send(gang)
    await eventually(lambda: (first.state_dir / "checkpoints" / JOB / "ready").exists())
    first.kill()

    first.environment["GPU_AGENT_CHECKPOINT_STORE_ENDPOINT"] = "http://127.0.0.1:9"
    await first.start()
    await first.send(StopGang(allocation_id=gang.allocation_id, grace_s=1.0, reason="preempted"))
    await eventually(lambda: RankFolder(first.rank_dir(gang.allocation_id)).exit())
    assert first.plane.state(gang.allocation_id) != "exited", "its end waits for the copy"
    first.kill()
    first.environment["GPU_AGENT_CHECKPOINT_STORE_ENDPOINT"] = s3
    await first.start()
    await eventually(lambda: first.plane.state(gang.allocation_id) == "exited")

    then = await second.run(sys.executable, "-c", SAVES, job=JOB, generation=2)
    await eventually(lambda: second.plane.state(then) == "exited")
    assert (second.rank_dir(then) / "stdout").read_text() == "found saved by 1 \n"


async def test_a_node_without_a_store_says_that_it_has_the_checkpoint_alone(node: Any) -> None:
    await node.start(GPU_AGENT_CHECKPOINTS="local")
    gang = await node.run(sys.executable, "-c", SAVES, job=JOB, generation=1)
    await eventually(lambda: (node.state_dir / "checkpoints" / JOB / "ready").exists())
    await stopped(node, gang)
    assert node.plane.rank(gang).detail == f"Its checkpoint was not copied: it is on {node.id} alone."
    assert node.plane.rank(gang).holds_checkpoint
    assert node.plane.registrations[-1].checkpoints == "local"


async def test_a_copy_is_settled_once_that_can_be_written_down(tmp_path: Path) -> None:
    a = Host(tmp_path / "a", store := Store.at(str(tmp_path / "store")))
    await a.begin(start(1))
    a.write("step", "1")
    rank, exit = ended(tmp_path)
    blocked = rank.path / f"{OUTCOME}{DRAFT}"
    blocked.mkdir()  # as if the disk were full
    assert a.checkpoints.outcome(start(1), rank, exit) is None
    await eventually(lambda: store.newest(JOB, 9) is not None)
    await asyncio.sleep(0.1)
    assert not a.checkpoints.is_settled(start(1), rank)
    blocked.rmdir()
    await eventually(lambda: a.checkpoints.is_settled(start(1), rank))
    assert a.checkpoints.outcome(start(1), rank, exit) == ""


async def test_a_link_that_cannot_be_written_down_settles_and_is_said(tmp_path: Path) -> None:
    a = Host(tmp_path / "a", Store.at(str(tmp_path / "store")))
    await a.begin(start(1))
    os.symlink(b"\xff", os.fsencode(a.folder / JOB / "latest"))
    rank, exit = ended(tmp_path)
    assert a.checkpoints.outcome(start(1), rank, exit) is None
    await eventually(lambda: a.checkpoints.is_settled(start(1), rank))
    said = "Its checkpoint was not copied: it has a link whose target is not UTF-8."
    assert a.checkpoints.outcome(start(1), rank, exit) == said


async def test_cleaning_waits_for_no_copy_and_keeps_no_lock(tmp_path: Path) -> None:
    a = Host(tmp_path / "a", Store.at(str(tmp_path / "store")))
    await a.begin(start(1))
    a.copy(start(1))
    with a.checkpoints._lock(JOB):  # a copy takes as long as the store lets it
        for in_use in ([JOB], []):
            async with asyncio.timeout(5):
                await asyncio.to_thread(a.checkpoints.clean, in_use, -1)
            assert (a.folder / JOB).exists()
    a.checkpoints.clean([], -1)
    assert not (a.folder / JOB).exists()
    assert not a.checkpoints._locks
