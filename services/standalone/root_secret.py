"""Replace the secret from which the credentials of all services are derived, while the installation runs.

There are three steps, each of which writes one file completely. First the new secret is made, and all processes accept
what either signs; then the new one signs; finally the old one is dropped. At each step the supervisor restarts the
processes, one after the other. Whatever is killed in between, the files say how far it is, and the same command
continues.
"""

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from services.kit import files
from services.standalone.data_folder import DataFolder
from services.standalone.process import BadInputError, StackError

ROOT = "service-root"
NEXT = "service-root-next"
IN_FORCE = "roots-in-force"
"""A file in the data folder: the hash of the secrets that all processes were started with."""

LOOK_EVERY_S = 1.0
WITHIN_S = 600.0


def read(folder: DataFolder) -> str:
    """Return the secrets, separated by commas: the first signs, and all are accepted."""
    roots = _roots(folder)
    return ",".join(dict.fromkeys([*roots, *_next(folder)]))


def rotate(folder: DataFolder) -> None:
    """Let a new secret sign, and accept the old one beside it; return when all processes know.

    Raises:
        BadInputError: The secret was replaced before, and the old one is still accepted.
        StackError: The processes were not restarted in time; the same call continues.
    """
    with _alone(folder):
        roots, following = _roots(folder), _next(folder)
        if not following:
            if len(roots) > 1:
                raise BadInputError("the old secret is still accepted: end that with --finish")
            following = [secrets.token_urlsafe(32)]
            files.replace(_path(folder, NEXT), following[0].encode())
        _until_in_force(folder)
        files.replace(_path(folder, ROOT), ",".join(dict.fromkeys([*following, *roots])).encode())
        _path(folder, NEXT).unlink()
        _until_in_force(folder)


def finish(folder: DataFolder) -> None:
    """Stop accepting the old secret; return when all processes know.

    Raises:
        BadInputError: No secret is being replaced, or the new one does not sign yet.
        StackError: The processes were not restarted in time; the secret is dropped when they are.
    """
    with _alone(folder):
        roots = _roots(folder)
        if _next(folder):
            raise BadInputError("the new secret does not sign yet: run the command without --finish first")
        if len(roots) == 1:
            raise BadInputError("no old secret is accepted: there is nothing to finish")
        files.replace(_path(folder, ROOT), roots[0].encode())
        _until_in_force(folder)


async def follow(folder: DataFolder, roots: str, roll: Callable[[str], Awaitable[None]]) -> None:
    """Have the processes restarted whenever the secrets change, until cancelled."""
    while True:
        _note(folder, roots)
        wanted = roots
        while wanted == roots:
            await asyncio.sleep(LOOK_EVERY_S)
            with contextlib.suppress(StackError):  # they cannot be read: what is in force stays so
                wanted = await asyncio.to_thread(read, folder)
        await roll(wanted)
        roots = wanted


def _roots(folder: DataFolder) -> list[str]:
    return [part.strip() for part in folder.secret(ROOT).split(",") if part.strip()]


def _next(folder: DataFolder) -> list[str]:
    try:
        return [_path(folder, NEXT).read_text().strip()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadInputError(f"cannot read the secret {_path(folder, NEXT)}: {error.strerror}") from error


def _path(folder: DataFolder, name: str) -> Path:
    return folder.path / "secrets" / name


@contextlib.contextmanager
def _alone(folder: DataFolder) -> Iterator[None]:
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(files.locked(folder.existing().path / "secrets"))
        except BlockingIOError as error:
            raise BadInputError("the secret is being replaced by another command") from error
        yield


def _note(folder: DataFolder, roots: str) -> None:
    with contextlib.suppress(OSError):  # a full disk: the command waits longer
        files.replace(folder.path / IN_FORCE, _hash(roots).encode(), durable=False)


def _until_in_force(folder: DataFolder) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while folder.holder() is not None:
        with contextlib.suppress(FileNotFoundError):
            if (folder.path / IN_FORCE).read_text() == _hash(read(folder)):
                return
        if time.monotonic() > deadline_s:
            raise StackError(f"not all processes ran again within {WITHIN_S:.0f} s; see `wattshift status`")
        time.sleep(LOOK_EVERY_S)


def _hash(roots: str) -> str:
    return hashlib.sha256(roots.encode()).hexdigest()
