"""A backup holds everything, a restore goes into an empty place only, and what ran is not taken for running."""

import asyncio
import errno
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import psutil
import pytest

from migrations.run import downgrade
from services.standalone import backup
from services.standalone.data_folder import DataFolder
from services.standalone.process import BadInputError, StackError
from services.standalone.stack import down
from tests.support.servers import ROOT, fresh_database, scratch_folder, wait_until

SECRETS = {"secrets-key": "s" * 40, "service-token": "t" * 40, "a.pem": "p" * 40, "odd name": "left out"}
POPULATED = """
INSERT INTO tenants (id, limits) VALUES ('default', '{}');
INSERT INTO nodes (id, token_sha256, address, agent_url, zone, driver, containers, host_power, devices, state,
                   lease_until)
VALUES ('n1', 'x', 'a', 'u', 'DE', 'simulated', false, 'auto', '[]', 'up', now() + interval '1 hour');
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with scratch_folder() as folder:
        yield folder


def an_installation(folder: Path) -> DataFolder:
    made = DataFolder(folder)
    made.make()
    for name, secret in SECRETS.items():
        (folder / "secrets" / name).write_text(secret)
    (folder / "admin.key").write_text("ws_key")
    (folder / "options.json").write_text("{}")
    return made


def ask(url: str, query: str, *arguments: Any) -> Any:
    async def fetch() -> Any:
        connection = await asyncpg.connect(url)
        try:
            return await (connection.fetchval(query, *arguments) if arguments else connection.fetchval(query))
        finally:
            await connection.close()

    return asyncio.run(fetch())


def run(url: str, script: str) -> None:
    async def execute() -> None:
        connection = await asyncpg.connect(url)
        try:
            await connection.execute(script)
        finally:
            await connection.close()

    asyncio.run(execute())


def an_empty_database(postgres_url: str, name: str) -> str:
    run(postgres_url, f"DROP DATABASE IF EXISTS {name}")
    run(postgres_url, f"CREATE DATABASE {name}")
    return f"{postgres_url.rpartition('/')[0]}/{name}"


def test_an_external_database_of_an_older_release(folder: Path, postgres_url: str) -> None:
    source = fresh_database(postgres_url)
    head = ask(source, "SELECT version_num FROM alembic_version")
    run(source, POPULATED)
    downgrade(source, "-1")
    file = folder / "backup.tar"
    made = backup.back_up(an_installation(folder / "one"), file, {"DATABASE_URL": source})
    assert made.schema != head
    assert file.stat().st_mode & 0o077 == 0
    with pytest.raises(BadInputError, match="exists; a backup replaces no file"):
        backup.back_up(DataFolder(folder / "one"), file, {"DATABASE_URL": source})

    target = an_empty_database(postgres_url, "restored_older")
    steps: list[tuple[int, int | None]] = []
    environment = {**os.environ, "DATABASE_URL": target}
    advance = lambda what, done, of=None: steps.append((done, of))  # noqa: E731
    assert backup.restore(DataFolder(folder / "two"), file, environment, advance) == 0
    assert steps == [(done, 5) for done in range(5)], "the bar of the command fills evenly, and last when all is done"

    assert ask(target, "SELECT version_num FROM alembic_version") == head
    assert ask(target, "SELECT state FROM nodes") == "lost"
    for name, text in {"admin.key": "ws_key", "options.json": "{}", "secrets/secrets-key": "s" * 40}.items():
        path = folder / "two" / name
        assert (path.read_text(), path.stat().st_mode & 0o077) == (text, 0)
    assert not (folder / "two" / "restoring").exists()
    assert {path.name for path in (folder / "two" / "secrets").iterdir()} == SECRETS.keys() - {"odd name"}
    assert sorted(path.name for path in folder.iterdir()) == ["backup.tar", "one", "two"], "no drafts stay"
    with pytest.raises(BadInputError, match="two is not empty"):
        backup.restore(DataFolder(folder / "two"), file, {"DATABASE_URL": target})
    with pytest.raises(BadInputError, match="has tables already"):
        backup.restore(DataFolder(folder / "three"), file, {"DATABASE_URL": target})
    assert not (folder / "three").exists()


HANGS = """
import os, signal, sys
from pathlib import Path
from services.standalone import backup, postgres
from services.standalone.data_folder import DataFolder
program, folder, file = map(Path, sys.argv[1:])
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in its background without it
postgres.client_program = lambda name: str(program)
backup.back_up(DataFolder(folder), file, os.environ)
"""


@contextmanager
def hanging_backup(folder: Path, url: str) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A backup whose pg_dump has written a part and goes on for ever, and that pg_dump."""
    program, begun = folder / "hangs", folder / "begun"
    program.write_text(
        f'#!/bin/sh\nfor word; do case $word in --file=*) echo part > "${{word#--file=}}";; esac; done\n'
        f"echo $$ > {begun}.new; mv {begun}.new {begun}; exec sleep 600\n"
    )
    program.chmod(0o755)
    words = [sys.executable, "-c", HANGS, str(program), str(folder / "one"), str(folder / "backup.tar")]
    environment = {**os.environ, "DATABASE_URL": url}
    with subprocess.Popen(words, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(begun.exists, within_s=60)
            dump = psutil.Process(int(begun.read_text()))
            begun.unlink()
            yield process, dump
        finally:
            process.kill()


def raises(error: Exception) -> Callable[..., None]:
    def fails(*_: object) -> None:
        raise error

    return fails


def drafts(folder: Path) -> list[Path]:
    return [*folder.glob(".backup-*"), *folder.glob("*.tar")]


def test_an_interrupted_backup_leaves_nothing_behind(folder: Path, postgres_url: str) -> None:
    url = fresh_database(postgres_url)
    one, file = an_installation(folder / "one"), folder / "backup.tar"
    (folder / ".backup-of-mine").write_text("a file of somebody's")
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        with hanging_backup(folder, url) as (process, dump):
            process.send_signal(number)
            said = process.communicate(timeout=60)[1]
            if number == signal.SIGINT:
                assert "KeyboardInterrupt" in said, "of which the command line makes status 130"
                assert "StackError" not in said
            else:
                assert process.returncode == 1
                assert "told to end before it was done" in said
            assert not dump.is_running(), number
            assert drafts(folder) == [folder / ".backup-of-mine"], number
    with hanging_backup(folder, url) as (_, other):  # one more runs meanwhile
        in_use = {*drafts(folder)}
        with hanging_backup(folder, url) as (process, dump):
            process.kill()
            process.wait()
            wait_until(lambda: not dump.is_running() or dump.status() == psutil.STATUS_ZOMBIE, within_s=60)
            assert len({*drafts(folder)} - in_use) == 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backup.shutil, "copyfile", raises(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
            with pytest.raises(StackError, match="No space left on device"):
                backup.back_up(one, file, {"DATABASE_URL": url})
        assert {*drafts(folder)} == in_use, "what the killed one left is gone, what another one writes is not"
        assert other.is_running()
    backup.back_up(one, file, {"DATABASE_URL": url})
    assert {*drafts(folder)} == {folder / ".backup-of-mine", file}


def test_what_is_no_backup_or_newer_than_this_release(folder: Path, postgres_url: str) -> None:
    url = fresh_database(postgres_url)
    file = folder / "backup.tar"
    with pytest.raises(BadInputError, match="not a data folder"):
        backup.back_up(DataFolder(folder / "none"), file, {})
    with pytest.raises(BadInputError, match="no tables of Wattshift"):
        backup.back_up(DataFolder(folder / "none"), file, {"DATABASE_URL": an_empty_database(postgres_url, "bare")})
    with pytest.raises(BadInputError, match="cannot read"):
        backup.restore(DataFolder(folder / "two"), file, {"DATABASE_URL": url})
    file.write_text("thesis")
    with pytest.raises(BadInputError, match="is not a backup"):
        backup.restore(DataFolder(folder / "two"), file, {"DATABASE_URL": url})
    file.unlink()
    run(url, "UPDATE alembic_version SET version_num = 'of_next_year'")
    backup.back_up(DataFolder(folder / "none"), file, {"DATABASE_URL": url})
    with pytest.raises(BadInputError, match=r"revision of_next_year\) this release"):
        backup.restore(DataFolder(folder / "two"), file, {"DATABASE_URL": url})
    assert [path.name for path in folder.iterdir()] == ["backup.tar"]


@pytest.mark.parametrize(
    "wrong",
    [
        *({"format": "1"}, {"format": None}, {"schema": ["x"]}, {"made_at": 1}, {"release": {}}, {"files": [1]}),
        *({"files": {"database.dump": 1}}, "thesis", 7, None, [], {}),
    ],
    ids=str,
)
def test_a_manifest_that_says_something_else_is_no_backup(folder: Path, wrong: Any) -> None:
    right = {"format": 1, "release": "1", "schema": "x", "made_at": "now", "files": {}}
    content = json.dumps(right | wrong if isinstance(wrong, dict) and wrong else wrong).encode()
    with tarfile.open(folder / "backup.tar", "w") as archive:
        member = tarfile.TarInfo("manifest.json")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    with pytest.raises(BadInputError, match="is not a backup"):
        backup.restore(DataFolder(folder / "two"), folder / "backup.tar", {})


@pytest.mark.parametrize("mode", ["gz", "xz"])
def test_a_compressed_archive_that_is_cut_off_is_no_backup(folder: Path, mode: str) -> None:
    with tarfile.open(folder / "whole", f"w:{mode}") as archive:  # type: ignore[call-overload]
        archive.add(ROOT / "README.md", "manifest.json")
    (folder / "backup.tar").write_bytes((folder / "whole").read_bytes()[:-400])
    with pytest.raises(BadInputError, match="is not a backup"):
        backup.read_manifest(folder / "backup.tar")


@pytest.mark.parametrize("damage", ["missing", "not as it was written"])
def test_a_damaged_backup_is_refused_and_named(folder: Path, postgres_url: str, damage: str) -> None:
    file = folder / "backup.tar"
    backup.back_up(an_installation(folder / "one"), file, {"DATABASE_URL": fresh_database(postgres_url)})
    whole = file.read_bytes()
    with tarfile.open(file) as archive:
        key = archive.getmember("secrets/secrets-key")
    # Between two files an archive may end: it opens like a whole one.
    file.write_bytes(whole[: key.offset] if damage == "missing" else whole.replace(b"s" * 40, b"x" * 40))

    target = an_empty_database(postgres_url, "damaged")
    with pytest.raises(BadInputError, match=f"is damaged: .*is {damage}; restore another copy"):
        backup.restore(DataFolder(folder / "two"), file, {"DATABASE_URL": target})
    assert sorted(path.name for path in folder.iterdir()) == ["backup.tar", "one"]


def a_backup_without_its_database(file: Path) -> None:
    """It fails in the middle of a restore: pg_restore finds nothing to read."""
    head = subprocess.run(
        [sys.executable, "-c", "from alembic.script import ScriptDirectory; from migrations.run import _config; "
         "print(ScriptDirectory.from_config(_config('')).get_current_head())"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    manifest = json.dumps({"format": 1, "release": "1", "schema": head, "made_at": "now"}).encode()
    with tarfile.open(file, "w") as archive:
        for name, content in {"manifest.json": manifest, "database.dump": b"PGDMP", "../outside": b"no"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def test_a_restore_that_fails_or_is_cut_off_leaves_nothing_that_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DATABASE_URL", "REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    file, target = folder / "backup.tar", folder / "two"
    a_backup_without_its_database(file)
    with pytest.raises(StackError, match="pg_restore failed"):
        backup.restore(DataFolder(target), file, os.environ)
    assert sorted(path.name for path in folder.iterdir()) == ["backup.tar"]

    cut_off = DataFolder(target)
    cut_off.make()
    (target / "restoring").touch()
    with pytest.raises(BadInputError, match="was cut off: repeat `wattshift restore`"):
        cut_off.open()
    assert down(target) is False
    with pytest.raises(StackError, match="pg_restore failed"):
        backup.restore(DataFolder(target), file, os.environ)  # it was begun anew, as far as this file goes
    assert not target.exists()
