"""Write an installation into one file, and make an installation from such a file.

A backup is a tar file that only its owner can read:

    manifest.json    what it is: format, release, schema, time, and the SHA-256 of each other file
    database.dump    the database at one moment, by pg_dump, even while everything runs
    secrets/...      of the data folder, with options.json and admin.key

A restore goes only into an empty place. Until it is complete, the data folder has a file `restoring`, with which
nothing starts; a restore that was interrupted is begun again by the same command.
"""

import asyncio
import contextlib
import hashlib
import json
import lzma
import os
import re
import shutil
import signal
import tarfile
import tempfile
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from pydantic import TypeAdapter

from migrations import run as migrations
from migrations.run import NoWayBackError, is_known
from services.db.database import plain_url
from services.kit import files
from services.kit.release import RELEASE
from services.standalone import postgres, processes, repository
from services.standalone.data_folder import DataFolder
from services.standalone.process import BadInputError, StackError, dying_too
from services.standalone.stack import database_of
from services.standalone.supervisor import Supervisor

T = TypeVar("T")
FORMAT = 1
DUMP, MANIFEST, SECRETS = "database.dump", "manifest.json", "secrets"
KEPT_FILES = ("options.json", "admin.key")
_SECRET_NAME = re.compile(r"[\w-][\w.-]*(?<!\.tmp)")
RESTORED = ("-m", "services.scheduler.restored")
_OPENED = os.O_DIRECTORY | os.O_NOFOLLOW
LEASE_MARGIN_S = 5.0
DEFAULT_LEASE_S = 20.0


@dataclass(frozen=True)
class Manifest:
    """What a backup contains: `schema` is the revision of the database, `made_at` is in UTC.

    `files` has the SHA-256 of each file, by its name in the archive; it is empty in backups of earlier releases.
    """

    format: int
    release: str
    schema: str
    made_at: str
    files: dict[str, str] = field(default_factory=dict)


_MANIFEST = TypeAdapter(Manifest)
Advance = Callable[[str, int, int], None]  #: Is told what is being done, and how many steps of how many are done


def _no_report(what: str, done: int, of: int) -> None: ...


def back_up(folder: DataFolder, to: Path, environment: Mapping[str, str], advance: Advance = _no_report) -> Manifest:
    """Write a backup of an installation to `to`, completely or not at all; the installation may be running.

    Args:
        folder: Its data folder; without one, only the database is backed up.
        to: A file that does not exist.
        environment: If it has DATABASE_URL, that is the database; otherwise the folder's own.

    Raises:
        BadInputError: there is no installation, or `to` exists.
        StackError: the database cannot be read, or the file cannot be written.
    """
    if to.exists() or to.is_symlink():
        raise BadInputError(f"{to} exists; a backup replaces no file")
    if not environment.get("DATABASE_URL"):
        folder.existing()
    try:
        with _scratch(to.absolute().parent, ".backup-") as scratch:
            return asyncio.run(_unless_ended(_back_up(folder, to, scratch, environment, advance)))
    except OSError as error:
        raise StackError(f"cannot write {to}: {error.strerror}") from error


def restore(folder: DataFolder, source: Path, environment: Mapping[str, str], advance: Advance = _no_report) -> int:
    """Make an installation in an empty folder, and an empty database, from a backup; nothing is started.

    ``advance`` is called with each step.

    Returns:
        How many gangs were running when the backup was made: their jobs are queued again.

    Raises:
        BadInputError: the file is not a backup, damaged, or from a newer release, or the target is not empty.
        StackError: the database could not be restored; the folder is as empty as before.
    """
    manifest = read_manifest(source)
    if not is_known(manifest.schema):
        raise BadInputError(
            f"the backup was made by release {manifest.release}, whose tables (revision {manifest.schema}) this "
            f"release, {RELEASE}, does not know: restore it with that release or a newer one"
        )
    marker = folder.path / DataFolder.RESTORING
    if marker.exists():
        _clear(folder)
    if folder.path.exists() and any(folder.path.iterdir()):
        raise BadInputError(f"{folder.path} is not empty; name another folder by --data-dir, nothing was changed")
    existed = folder.path.exists()
    folder.make()
    files.replace(marker, manifest.made_at.encode())
    try:
        folder.open(restoring=True)
        try:
            lost = asyncio.run(_unless_ended(_restore(folder, source, manifest, environment, advance)))
        finally:
            folder.close()
    except BaseException:
        _clear(folder)
        if existed:
            folder.path.mkdir(mode=0o700)
        raise
    marker.unlink()
    return lost


async def go_back(
    folder: DataFolder, release: str, environment: Mapping[str, str], confirm: Callable[[list[str]], None]
) -> None:
    """Make a database one that an earlier release starts on; ``confirm`` gets what is undone for it, if anything is.

    Raises:
        BadInputError: the installation runs, or the release cannot start on it; nothing was changed.
        StackError: the database does not start or answer.
    """
    if folder.holder() is not None and not environment.get("DATABASE_URL"):
        raise BadInputError("the installation is running: stop it first, by `wattshift down`")
    async with database_of(folder, environment) as url:
        await repository.schema(url)
        try:
            if undone := await asyncio.to_thread(migrations.undone_by_going_back, url, release):
                confirm(undone)
            await asyncio.to_thread(migrations.go_back, url, release)
        except NoWayBackError as error:
            raise BadInputError(str(error)) from None


def read_manifest(source: Path) -> Manifest:
    try:
        with tarfile.open(source) as archive:
            member = archive.extractfile(MANIFEST)
            manifest = _MANIFEST.validate_json(member.read() if member else b"", strict=True)
    except OSError as error:
        raise BadInputError(f"cannot read {source}: {error.strerror or error}") from None
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, KeyError, ValueError):
        raise BadInputError(f"{source} is not a backup that `wattshift backup` wrote") from None
    if manifest.format > FORMAT:
        raise BadInputError(f"{source} was written by release {manifest.release}: restore it with that one or a newer")
    return manifest


async def _back_up(
    folder: DataFolder, to: Path, scratch: Path, environment: Mapping[str, str], advance: Advance
) -> Manifest:
    kept = _kept(folder.path)
    steps = len(kept) + 2
    advance("database", 0, steps)
    async with database_of(folder, environment) as url:
        schema = await repository.schema(url)
        await _run("pg_dump", ["--format=custom", "--no-owner", "--no-privileges", f"--file={scratch / DUMP}"], url)
    (scratch / SECRETS).mkdir()
    members = [DUMP, *(str(path.relative_to(folder.path)) for path in kept)]
    for name in members[1:]:
        shutil.copyfile(folder.path / name, scratch / name)  # what is hashed is what is written, whoever changes it
    hashes = {name: _sha256(scratch / name) for name in members}
    manifest = Manifest(FORMAT, RELEASE, schema, datetime.now(UTC).isoformat(timespec="seconds"), hashes)
    (scratch / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1))
    draft = scratch / "backup.tar"
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            archive.add(scratch / MANIFEST, MANIFEST)
            for done, name in enumerate(members):
                if done:
                    advance(name, done, steps)
                archive.add(scratch / name, name)
        file.flush()
        os.fsync(file.fileno())
    advance(to.name, steps - 1, steps)
    os.link(draft, to)  # refuses what another has written meanwhile
    return manifest


async def _restore(
    folder: DataFolder, source: Path, manifest: Manifest, environment: Mapping[str, str], advance: Advance
) -> int:
    programs = {"migrations": processes.MIGRATIONS, "restored": RESTORED}
    of, steps = len(programs) + 3, iter(range(len(programs) + 3))
    with _unpacked(source) as found:
        advance("files", next(steps), of)
        _check_whole(source, found, manifest)
        for path in _kept(found):
            files.replace(folder.path / path.relative_to(found), path.read_bytes())
        async with database_of(folder, environment, restoring=True) as url:
            await repository.check_empty(url)
            advance("database", next(steps), of)
            options = ["--single-transaction", "--exit-on-error", "--no-owner", "--no-privileges"]
            await _run("pg_restore", [*options, str(found / DUMP)], url)
            settings = {**environment, "DATABASE_URL": url, "WATTSHIFT_DATA_DIR": str(folder.path)}
            supervisor = Supervisor(folder.log)
            for name, arguments in programs.items():
                advance(name, next(steps), of)
                await supervisor.finish(processes.command_process(name, arguments, settings, folder.path))
            lost = int((folder.log / "restored.log").read_text().split()[-1])
    advance("leases", next(steps), of)
    if lost:  # a node that could not ask the control plane has stopped what it ran when its lease is over
        await asyncio.sleep(float(environment.get("TELEMETRY_LEASE_TTL_S") or DEFAULT_LEASE_S) + LEASE_MARGIN_S)
    return lost


async def _run(program: str, options: list[str], url: str) -> None:
    """Run a PostgreSQL program, which finds the password in its environment, not on its command line."""
    address, password = _without_password(url)
    words = [postgres.client_program(program), f"--dbname={address}", *options]
    environment = {**os.environ, "PGPASSWORD": password} if password else dict(os.environ)
    null, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        *words, env=environment, stdin=null, stdout=null, stderr=pipe, **dying_too()
    )
    try:
        _, said = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode != 0:
        raise StackError(f"{program} failed: {said.decode(errors='replace').strip()[-1000:]}")


async def _unless_ended(work: Awaitable[T]) -> T:
    """Return the result of some work; SIGTERM and SIGHUP end it as Ctrl-C does, by a ``StackError``."""
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        if (caller := asyncio.current_task()) and caller.cancelling():
            raise  # by Ctrl-C
        raise StackError("told to end before it was done") from None


@contextmanager
def _scratch(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield a folder that is removed afterwards; folders that killed processes of the same user left are removed first.

    A folder in use is locked by whoever made it.
    """
    for left in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError), files.locked(left, _OPENED):
            if left.lstat().st_uid == os.geteuid():
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(dir=parent, prefix=prefix) as made, files.locked(Path(made), _OPENED):
        yield Path(made)


def _without_password(url: str) -> tuple[str, str]:
    """Return an address without its password, and the password itself."""
    parts = urlsplit(plain_url(url))
    host = parts.netloc.rpartition("@")[2]
    user = f"{quote(unquote(parts.username))}@" if parts.username else ""
    return urlunsplit(parts._replace(netloc=f"{user}{host}")), unquote(parts.password or "")


@contextmanager
def _unpacked(source: Path) -> Iterator[Path]:
    """Yield a folder with what belongs in a backup, and nothing else that an archive may contain."""
    with _scratch(Path(tempfile.gettempdir()), "wattshift-restore-") as scratch, tarfile.open(source) as archive:
        (scratch / SECRETS).mkdir()
        for member in archive:
            folder, _, name = member.name.rpartition("/")
            is_secret = folder == SECRETS and _SECRET_NAME.fullmatch(name)
            if (member.name in (DUMP, *KEPT_FILES) or is_secret) and (content := archive.extractfile(member)):
                with (scratch / member.name).open("wb") as file:
                    shutil.copyfileobj(content, file)
        yield scratch


def _check_whole(source: Path, files: Path, manifest: Manifest) -> None:
    """Compare what was unpacked with what was written: an archive that is cut off between two files still opens."""
    for name, sha256 in manifest.files.items():
        if not (files / name).is_file() or _sha256(files / name) != sha256:
            raise BadInputError(
                f"{source} is damaged: {name} is {'not as it was written' if (files / name).is_file() else 'missing'}; "
                "restore another copy of it, nothing was changed"
            )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _kept(folder: Path) -> list[Path]:
    """Return the files of a data folder that a backup keeps in addition to the database."""
    secrets = sorted(path for path in (folder / SECRETS).glob("*") if _SECRET_NAME.fullmatch(path.name))
    return [path for path in [*(folder / name for name in KEPT_FILES), *secrets] if path.is_file()]


def _clear(folder: DataFolder) -> None:
    """Remove a folder that an unfinished restore has filled in part."""
    postgres.remove(folder.path / "postgres")
    with contextlib.suppress(OSError):
        shutil.rmtree(folder.path)
