"""Jobs whose files come with them: uploads and commits of repositories, on real agents."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import os
import random
import resource
import subprocess
import tarfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_agent import git, seccomp
from gpu_agent.cgroups import Cgroups, Limits
from gpu_agent.git import fetch_commit
from gpu_agent.network import Rules
from gpu_agent.secrets import InputError
from gpu_agent.settings import AgentSettings
from gpu_agent.sources import Sources
from services.contracts.nodes import EndedBy
from services.contracts.sources import GitSource, OpenedChunk, Source
from tests.agent.conftest import Node, eventually
from wattshift.sources import Archive

LOOK = "pwd; cat data/greeting; sha256sum big | cut -c1-8"


def a_folder(path: Path) -> Path:
    """Return a folder whose archive has several chunks."""
    (path / "data").mkdir(parents=True)
    (path / "data" / "greeting").write_text("hello\n")
    (path / "big").write_bytes(random.Random(1).randbytes(1_300_000))
    return path


def packed(folder: Path) -> tuple[bytes, str]:
    with Archive(folder) as archive:
        return archive._file.read(), archive.sha256


@pytest.fixture
async def uploaded(node: Node) -> str:
    """The hash of an upload that the control plane has."""
    node.plane.upload, name = packed(a_folder(node.folder / "submitted"))
    return name


def printed(node: Node, gang: str) -> list[str]:
    return (node.rank_dir(gang) / "stdout").read_text().splitlines()


async def ended(node: Node, gang: str) -> Any:
    await eventually(lambda: node.plane.state(gang) == "exited")
    return node.plane.rank(gang)


async def test_a_job_runs_in_what_was_uploaded_and_the_next_one_finds_it_here(node: Node, uploaded: str) -> None:
    await node.start()
    gang = await node.run("sh", "-c", LOOK, source={"upload": uploaded})
    assert (await ended(node, gang)).exit_code == 0
    big = hashlib.sha256((node.folder / "submitted" / "big").read_bytes()).hexdigest()[:8]
    assert printed(node, gang) == [str(node.rank_dir(gang) / "source"), "hello", big]
    assert node.plane.chunks_asked == [0, 1, 2]

    below = await node.run("cat", "greeting", source={"upload": uploaded}, working_dir="data")
    assert (await ended(node, below)).exit_code == 0
    assert printed(node, below) == ["hello"]
    assert node.plane.chunks_asked == [0, 1, 2], "the archive is kept"


async def test_a_settled_gangs_files_go_and_its_output_stays(node: Node, uploaded: str) -> None:
    await node.start()
    gang = await node.run("echo", "done", source={"upload": uploaded})
    await ended(node, gang)
    node.plane.named.discard(gang)
    await eventually(lambda: not (node.rank_dir(gang) / "source").exists())
    assert printed(node, gang) == ["done"]


async def test_a_killed_agent_continues_and_the_job_starts_once(node: Node, uploaded: str) -> None:
    await node.start()
    node.plane.has_inputs = False
    gang = await node.run("sh", "-c", f"echo run >> {node.folder}/runs; {LOOK}", source={"upload": uploaded})
    await eventually(lambda: node.plane.chunks_asked)
    node.kill()
    part = node.state_dir / "uploads" / f"{uploaded}.part"
    part.write_bytes(node.plane.upload[: 2 * 512 * 1024 + 5])  # as if it had been killed later
    node.plane.has_inputs = True
    node.plane.chunks_asked.clear()
    await node.start()

    assert (await ended(node, gang)).exit_code == 0
    assert (node.folder / "runs").read_text() == "run\n"
    assert node.plane.chunks_asked == [1, 2]


async def test_an_upload_that_arrives_damaged_is_one_clear_reason(node: Node, uploaded: str) -> None:
    await node.start()
    node.plane.upload = node.plane.upload[:-1] + b"\xff"
    gang = await node.run("touch", str(node.folder / "ran"), source={"upload": uploaded})
    rank = await ended(node, gang)
    assert (rank.ended_by, rank.detail) == (EndedBy.REFUSED, f"The upload {uploaded[:12]} arrived damaged.")
    assert not (node.folder / "ran").exists()
    assert [path.name for path in node.rank_dir(gang).glob(".source-*")] == []


async def test_an_upload_that_breaks_the_way_in_ends_and_frees_its_gpus(node: Node) -> None:
    """A gang that neither runs nor ends would keep its GPUs from all others."""
    packing = io.BytesIO()
    with tarfile.open(fileobj=packing, mode="w:gz") as tar:
        for number in range(2_000):
            link = tarfile.TarInfo(f"l{number}")
            link.type, link.linkname = tarfile.SYMTYPE, f"l{number + 1}"
            tar.addfile(link)
    node.plane.upload = packing.getvalue()
    await node.start()
    gang = await node.run("true", source={"upload": hashlib.sha256(node.plane.upload).hexdigest()})
    rank = await ended(node, gang)
    assert (rank.ended_by, "The uploaded archive cannot be read" in rank.detail) == (EndedBy.CANNOT_START, True)


async def test_an_upload_that_is_gone_is_one_clear_reason(node: Node) -> None:
    await node.start()
    gang = await node.run("true", source={"upload": "0" * 64})
    rank = await ended(node, gang)
    assert rank.ended_by == EndedBy.REFUSED
    assert rank.detail.startswith("The control plane does not give this node the job's upload")


async def test_every_node_of_a_gang_has_its_own(nodes: list[Node]) -> None:
    first, second = nodes
    first.plane.upload, name = packed(a_folder(first.folder / "submitted"))
    shared = {"allocation": "job_wide.1", "job": "job_wide", "nnodes": 2, "world_size": 2}
    for rank, node in enumerate(nodes):
        gang = node.gang("cat", "data/greeting", source={"upload": name}, node_rank=rank, rank_offset=rank, **shared)
        node.plane.named.add(gang.allocation_id)
        await node.send(gang)
    for node in (first, second):
        await eventually(lambda node=node: (node.rank_dir("job_wide.1") / "exited").exists())
        assert printed(node, "job_wide.1") == ["hello"]


# --- repositories


def run_git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main")
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}
    return subprocess.run(
        ["git", *who, *words], cwd=folder, env=environment, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> tuple[str, str, str]:
    """A repository's address, its first commit and its newest."""
    folder = tmp_path / "repository"
    folder.mkdir()
    run_git(folder, "init", "-q")
    commits: list[str] = []
    for text in ("first", "second"):
        (folder / "file").write_text(f"{text}\n")
        run_git(folder, "add", "file")
        run_git(folder, "commit", "-q", "-m", text)
        commits.append(run_git(folder, "rev-parse", "HEAD"))
    return f"file://{folder}", commits[0], commits[1]


async def test_a_job_runs_at_a_commit(node: Node, repository: tuple[str, str, str]) -> None:
    url, first, newest = repository
    await node.start(GPU_AGENT_GIT_LOCAL="true")
    for commit, text in ((newest, "second"), (first, "first")):
        source = {"git": {"url": url, "revision": commit}}
        gang = await node.run("sh", "-c", "cat file; git rev-parse HEAD", source=source)
        rank = await ended(node, gang)
        assert (rank.exit_code, rank.detail) == (0, None)
        assert printed(node, gang) == [text, commit]


async def test_repositories_on_the_nodes_disk_are_not_used_unless_the_site_says_so(
    node: Node, repository: tuple[str, str, str]
) -> None:
    url, first, _ = repository
    await node.start()
    gang = await node.run("true", source={"git": {"url": url, "revision": first}})
    rank = await ended(node, gang)
    assert rank.ended_by == EndedBy.CANNOT_START, "trying again is of no use"
    assert "GPU_AGENT_GIT_LOCAL" in rank.detail


async def test_a_commit_that_is_not_there_is_one_clear_reason(tmp_path: Path, repository: tuple[str, str, str]) -> None:
    source = GitSource(url=repository[0], revision="1" * 40)
    with pytest.raises(InputError, match="at 111111111111 cannot be fetched: ") as raised:
        await fetch_commit(source, None, tmp_path / "out", AgentSettings(git_local=True))
    assert "\n" not in str(raised.value)


async def test_git_has_a_time_limit_and_leaves_nothing_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    with pytest.raises(InputError, match=r"was not fetched within 0\.5 s"):
        await fetch_commit(
            GitSource(url="https://example.org/r", revision="1" * 40),
            None,
            tmp_path / "out",
            AgentSettings(git_timeout_s=0.5),
        )
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


SPY = """#!/bin/sh
env | grep -E '^GIT_' > {out}
key=$(echo "$GIT_SSH_COMMAND" | sed -n "s/.*-i '\\(.*\\)'/\\1/p")
{{ [ -z "$key" ] || {{ stat -c %a $key; cat $key; }}; }} > {out}.key
echo "fatal: no access with $(sed -n 's/^GIT_CONFIG_VALUE_0=//p' {out}) s3cret" >&2; exit 1
"""


@pytest.mark.parametrize(
    ("url", "credential", "seen", "key"),
    [
        ("https://example.org/r.git", "s3cret", "Basic eC1hY2Nlc3MtdG9rZW46czNjcmV0", ""),
        ("https://example.org:8443/r.git", "me:s3cret", "http.https://example.org:8443/.extraHeader", ""),
        ("git@example.org:r.git", "s3cret KEY", "IdentitiesOnly=yes", "600\ns3cret KEY\n"),
    ],
)
async def test_credentials_reach_git_and_no_message_or_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, credential: str, seen: str, key: str
) -> None:
    spy = tmp_path / "bin" / "git"
    spy.parent.mkdir()
    spy.write_text(SPY.format(out=tmp_path / "environment"))
    spy.chmod(0o755)
    monkeypatch.setenv("PATH", f"{spy.parent}:{os.environ['PATH']}")
    rank = tmp_path / "allocations" / "rank"
    rank.mkdir(parents=True)
    with pytest.raises(InputError) as raised:
        await fetch_commit(GitSource(url=url, revision="1" * 40), credential, rank / "out", AgentSettings())
    environment = (tmp_path / "environment").read_text()
    assert seen in environment
    assert "GIT_TERMINAL_PROMPT=0" in environment
    assert (tmp_path / "environment.key").read_text() == key
    assert credential not in str(raised.value)
    assert list(git.memory_folder(rank).glob(f"{git._key_prefix(rank.parent)}*")) == []


LOOK_AROUND = """#!/bin/sh
exec >> {out}
grep -E '^(NoNewPrivs|Seccomp|Uid|CapEff):' /proc/self/status
cat /proc/self/cgroup
ls -d {hidden} /proc/1
pwd
whoami
echo "fatal: looked" >&2; exit 1
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
async def test_git_is_confined_as_the_job_is(open_node: Node, outside: Path) -> None:
    """It runs what the server, and the account's own files such as ~/.ssh/config, make it run."""
    node, spy = open_node, outside / "bin" / "git"
    out, hidden = outside / "seen", node.state_dir / "allocations" / "of-another"
    spy.parent.mkdir()
    spy.write_text(LOOK_AROUND.format(out=out, hidden=hidden))
    spy.chmod(0o755)
    out.touch()
    out.chmod(0o666)
    await node.start(PATH=f"{spy.parent}:{os.environ['PATH']}")
    hidden.mkdir(parents=True)

    gang = await node.run("true", source={"git": {"url": "https://example.org/r.git", "revision": "1" * 40}})
    rank = await ended(node, gang)

    assert (rank.ended_by, "cannot be fetched: looked" in rank.detail) == (EndedBy.REFUSED, True)
    seen = out.read_text()
    limits = Cgroups(node.state_dir, Limits(2**30, 2**30, 64))
    limits.prepare()
    limits.prepare_network(Rules((), (), (1, 1)), 2_000_000_001)
    has_network = "network" not in limits.lacking
    facts = [
        *("NoNewPrivs:\t1", "CapEff:\t0000000000000000", str(node.rank_dir(gang) / ".source-"), "tenant-t"),
        *(["Seccomp:\t2"] if seccomp.program() else []),
        *([f"0::/{limits._name}/{gang}\n"] if has_network else []),
        *([f"/{gang}\n"] if limits.has("pids") else []),
    ]
    assert [fact for fact in facts if fact not in seen] == [], seen
    assert "Uid:\t0" not in seen
    assert (str(hidden) in seen, "/proc/1\n" in seen) == (False, False), "others' folders and processes are not there"


def test_keys_of_a_killed_agent_are_removed(tmp_path: Path) -> None:
    left = git.memory_folder(tmp_path) / f"{git._key_prefix(tmp_path)}x"
    other = git.memory_folder(tmp_path) / f"{git._key_prefix(tmp_path / 'other')}x"
    left.parent.mkdir(exist_ok=True)
    left.touch()
    other.touch()
    git.remove_keys(tmp_path)
    assert (left.exists(), other.exists()) == (False, True)
    other.unlink()


async def test_what_is_being_fetched_is_not_removed_to_make_room(tmp_path: Path) -> None:
    settings = AgentSettings(state_dir=tmp_path, data_dir=tmp_path, source_cache_bytes=1_000)
    sources, begun, goes_on = Sources(settings), asyncio.Event(), asyncio.Event()
    content = {name: name.encode() * 600 for name in ("a", "b")}

    async def slowly(_: int) -> OpenedChunk:
        begun.set()
        await goes_on.wait()
        return OpenedChunk(chunks=1, data=base64.b64encode(content["a"]).decode())

    async def at_once(_: int) -> OpenedChunk:
        return OpenedChunk(chunks=1, data=base64.b64encode(content["b"]).decode())

    async def got(name: str, read_chunk: Callable[[int], Awaitable[OpenedChunk]]) -> bytes:
        async with sources._archive(hashlib.sha256(content[name]).hexdigest(), read_chunk) as archive:
            return archive.read_bytes()

    fetching = asyncio.create_task(got("a", slowly))
    await begun.wait()
    part = next((tmp_path / "uploads").glob("*.part"))
    part.write_bytes(b"x" * 1_200)
    await got("b", at_once)
    assert part.exists()
    part.write_bytes(b"")
    goes_on.set()
    assert await fetching == content["a"]


async def test_an_archive_that_gets_its_name_while_room_is_made_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = Sources(AgentSettings(state_dir=tmp_path, data_dir=tmp_path, source_cache_bytes=1_000))
    (tmp_path / "uploads").mkdir()
    gone = tmp_path / "uploads" / "a.part"
    monkeypatch.setattr(Path, "iterdir", lambda _: iter([gone]))
    sources._make_room()


async def test_a_server_that_never_stops_talking_does_not_fill_the_agents_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talker = tmp_path / "git"
    talker.write_text("#!/bin/sh\nhead -c 50000000 /dev/zero | tr '\\0' x >&2\necho >&2\necho fatal: no >&2\nexit 1\n")
    talker.chmod(0o755)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(git._GitError, match=r"^no$"):
        await git._git([str(talker)], {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, b"")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000


async def test_an_archive_stays_until_it_is_unpacked_and_no_lock_of_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, content = Sources(AgentSettings(state_dir=tmp_path, data_dir=tmp_path, source_cache_bytes=100)), b"a" * 600

    async def read_chunk(_: int) -> OpenedChunk:
        return OpenedChunk(chunks=1, data=base64.b64encode(content).decode())

    def unpack(archive: Path, into: Path, *_: object) -> None:
        sources._make_room()  # for another gang's
        into.mkdir()
        (into / "content").write_bytes(archive.read_bytes())

    monkeypatch.setattr("gpu_agent.sources.unpack", unpack)
    source = Source(upload=hashlib.sha256(content).hexdigest())
    made = await sources.make(source, tmp_path, read_chunk, None, None, tuple)
    assert (made / "content").read_bytes() == content
    assert not sources._in_use
