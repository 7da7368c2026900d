"""Sockets of an installation lie where nobody else can put, find or reach them, and their addresses fit everywhere."""

import os
import socket
import stat
from pathlib import Path

import pytest
from kombu import Connection

from services.kit import redis_users
from services.kit.celery import broker_url
from services.kit.redis import connect
from services.kit.settings import SharedSettings
from services.standalone import postgres, runtime, valkey
from services.standalone.process import Account, StackError
from tests.support.servers import running, scratch_folder
from tests.support.tokens import TOKEN


def test_the_folder_is_closed_new_short_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [runtime.make(), runtime.make()]
    assert made[0] != made[1], "a name that somebody took first is never used"
    for folder in made:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(postgres.socket_in(folder / runtime.POSTGRES)))
        for each in (folder, folder / runtime.POSTGRES):
            found = each.lstat()
            assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (os.geteuid(), 0o700)
        runtime.remove(folder)
        assert not folder.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts PostgreSQL as another user")
def test_the_account_of_postgresql_passes_through_to_its_own_and_reads_nothing() -> None:
    folder = runtime.make(Account(user_id=65_534, group_id=65_534))
    outer, inner = folder.stat(), (folder / runtime.POSTGRES).stat()
    runtime.remove(folder)
    assert (outer.st_uid, outer.st_gid, stat.S_IMODE(outer.st_mode)) == (0, 65_534, 0o710)
    assert (inner.st_uid, inner.st_gid, stat.S_IMODE(inner.st_mode)) == (65_534, 65_534, 0o700)


def test_what_others_can_change_or_is_too_long_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with scratch_folder() as base:
        for name, mode in (("closed", 0o700), ("open", 0o777), ("x" * 80, 0o700), ("missing", None)):
            if mode is not None:
                (base / name).mkdir()
                (base / name).chmod(mode)
            monkeypatch.setattr(runtime, "BASES", (base / name, Path("/tmp")))
            folder = runtime.make()
            assert (folder.parent == base / name) == (name == "closed")
            runtime.remove(folder)
    monkeypatch.setattr(runtime, "LONGEST_PATH", 20)
    with pytest.raises(StackError, match=r"no folder for sockets can be made in .*/tmp"):
        runtime.make()


def test_what_is_not_its_own_is_not_removed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    link = tmp_path / "wattshift-12345678"
    link.symlink_to(kept)
    for path in (kept, link, tmp_path / "wattshift-nothing"):
        runtime.remove(path)
    assert kept.exists()
    assert link.is_symlink()


async def test_every_client_reads_the_address_of_valkey() -> None:
    """redis-py as any user, and Celery's broker, each with a password that needs quoting in an address."""
    with scratch_folder() as folder, running(valkey.prepare(folder / "v", password="secret", address=folder / "s")):
        url = valkey.url("secret", folder / "s")
        assert redis_users.without_user(url) == f"unix://{folder}/s?db=0"
        for address in (url, redis_users.with_user(redis_users.without_user(url), "default", "secret")):
            client = connect(address)
            assert await client.ping()  # pyright: ignore[reportGeneralTypeIssues, reportUnknownMemberType]
            await client.acl_setuser(  # pyright: ignore[reportUnknownMemberType]
                "a:node", enabled=True, passwords=["+p@:/w"], commands=["+@all"], keys=["*"], channels=["*"]
            )
            await client.aclose()
        url = redis_users.with_user(url, "a:node", "p@:/w")
        client = connect(url)
        assert await client.acl_whoami() == "a:node"  # pyright: ignore[reportUnknownMemberType]
        await client.aclose()
        settings = SharedSettings(redis_url=url, service_token=TOKEN)
        with Connection(broker_url(settings)) as broker, broker.SimpleQueue("q") as queue:
            queue.put({"id": "one"})
            message = queue.get(timeout=5)
            assert message.payload == {"id": "one"}
            message.ack()
            assert broker.channel().client.acl_whoami() == "a:node"
