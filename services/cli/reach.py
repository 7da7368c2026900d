"""Whether the account that a job runs as can reach what the job names on this machine: its folder and its program."""

from __future__ import annotations

import json
import os
import pwd
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.contracts.nodes import RUNS_AS

ACCESS_LIST = "system.posix_acl_access"
Asked = tuple[Path, int]
"""A folder or file, and the rights to it, as those of ``os.access``."""


@dataclass(frozen=True)
class Runner:
    """The account that jobs run as.

    Attributes:
        shown: Folders that jobs may read wherever they are.
        passed: Folders that it has to pass through in any case.
    """

    name: str
    user_id: int
    group_id: int
    groups: tuple[int, ...]
    shown: tuple[Path, ...] = ()
    passed: tuple[Path, ...] = ()


def runner_of(identity: dict[str, Any], installation: Path | None) -> Runner | None:
    """Return the account that a caller's jobs run as on this machine; None if it cannot be known.

    Args:
        identity: The caller, as ``/v1/whoami`` has it.
        installation: The folder of the installation that is asked, if it is one of this machine.
    """
    said: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        found = [] if installation is None else installation.glob(f"nodes/*/{RUNS_AS}")
        if newest := max(found, key=lambda path: path.stat().st_mtime, default=None):
            said = json.loads(newest.read_bytes())
    shown = tuple(map(Path, said.get("shown", ())))
    passed = tuple(map(Path, said.get("passed", ())))
    if (account := identity["account"]) is not None:
        try:
            entry = pwd.getpwnam(account)
        except KeyError:
            return None
        groups = tuple(os.getgrouplist(account, entry.pw_gid))
        # One that starts the jobs itself reaches its own folders; a superuser's jobs run as another account.
        passed = () if entry.pw_uid == os.geteuid() else passed
        return Runner(account, entry.pw_uid, entry.pw_gid, groups, shown, passed) if entry.pw_uid else None
    written = said.get("runners", {}).get(identity["tenant_id"])
    if written is None:
        return None
    return Runner(written["name"], written["user_id"], written["group_id"], tuple(written["groups"]), shown, passed)


def closed_folders(runner: Runner, path: Path) -> list[Path]:
    """Return the folders on the way to ``path`` that the account cannot pass through, the first one first.

    Those above something that jobs are shown do not count.
    """
    ends = [end for end in (path.absolute(), Path(os.path.realpath(path))) if not _is_shown(runner, end)]
    way = list(dict.fromkeys(folder for end in ends for folder in reversed(end.parents)))
    return [folder for folder, may in zip(way, _may(runner, [(each, os.X_OK) for each in way]), strict=True) if not may]


def _is_shown(runner: Runner, path: Path) -> bool:
    return any(path.is_relative_to(each) for each in runner.shown)


def lacks(runner: Runner, path: Path, rights: int) -> bool:
    """Return whether the account lacks rights to a folder or file, whatever it takes to get there."""
    real = Path(os.path.realpath(path))
    if _is_shown(runner, real):
        return bool(rights & os.W_OK)
    return not _may(runner, [(real, rights)])[0]


@dataclass(frozen=True)
class Program:
    """A program that a job runs.

    Attributes:
        path: Where it is.
        closed: Folders on the way that the job's account cannot enter.
        is_shut: Whether it cannot run it.
        instead_of: One that the caller would run, and the account cannot.
    """

    path: Path
    closed: list[Path]
    is_shut: bool
    instead_of: Path | None = None


def programs_of(
    runner: Runner, command: Sequence[str], environment: Mapping[str, str], folder: Path | None
) -> list[Program]:
    """Return the program of a command, and what runs it if it is a script; empty if it cannot be known here.

    Where the account cannot run the one that the caller would run, the next one in PATH is what the job runs; but one
    of a virtual environment is not replaced.
    """
    word, search = command[0] if command else "", environment.get("PATH")
    own = [environment[name] for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if name in environment]
    if "/" in word:
        places = [Path(folder or "/", word)]
    else:
        found = (shutil.which(word, path=place) for place in (search or "").split(":") if word and place)
        places = [Path(each) for each in found if each]
    programs = [_program(runner, path) for path in places if path.is_file()]
    if not programs:
        return []
    first = programs[0]
    if first.is_shut and not any(first.path.is_relative_to(each) for each in own):
        usable = next((each for each in programs if not each.is_shut), first)
        first = first if usable is first else replace(usable, instead_of=first.path)
    words: list[str] = []
    with suppress(OSError), first.path.open("rb") as file:
        if file.read(2) == b"#!":
            words = os.fsdecode(file.readline(4_096)).split()
    is_by_name = len(words) > 1 and words[0].endswith("/env") and not words[1].startswith("-")
    words = words[1:2] if is_by_name else words[:1]
    return [first, *(programs_of(runner, words, environment, folder) if words else ())]


def _program(runner: Runner, path: Path) -> Program:
    closed = closed_folders(runner, path)
    return Program(path, closed, bool(closed) or lacks(runner, path, os.X_OK))


def _may(runner: Runner, asked: Sequence[Asked]) -> list[bool]:
    """Return what the account may do: by asking the kernel as that account where this process may become it."""
    if runner.user_id == os.geteuid():
        return [os.access(path, rights) for path, rights in asked]
    if os.geteuid() == 0:
        with suppress(OSError):
            return _asked_as(runner, asked)
    return [_may_by_mode(runner, path, rights) for path, rights in asked]


def _asked_as(runner: Runner, asked: Sequence[Asked]) -> list[bool]:
    """Ask in a child that has become the account; each folder is open already, so that no other one is in the way."""
    folders: list[int] = []
    read, write = os.pipe()
    try:
        for path, _ in asked:
            folders.append(os.open(path if path.is_dir() else path.parent, os.O_RDONLY | os.O_DIRECTORY))
        if (child := os.fork()) == 0:
            try:
                os.setgroups(runner.groups)
                os.setgid(runner.group_id)
                os.setuid(runner.user_id)
                names = ["." if path.is_dir() else path.name for path, _ in asked]
                found = [
                    os.access(name, rights, dir_fd=folder)
                    for name, folder, (_, rights) in zip(names, folders, asked, strict=True)
                ]
                os.write(write, bytes(found))
            finally:
                os._exit(0)
        os.close(write)
        write = -1
        answer = os.read(read, len(asked) + 1)
        os.waitpid(child, 0)
    finally:
        for each in (read, write, *folders):
            if each >= 0:
                os.close(each)
    if len(answer) != len(asked):
        raise PermissionError(f"cannot become {runner.name}")
    return [bool(may) for may in answer]


def _may_by_mode(runner: Runner, path: Path, rights: int) -> bool:
    """Go by owner and mode; what cannot be known, as with an access list, is left to the agent."""
    try:
        status = path.stat()
        if hasattr(os, "listxattr") and ACCESS_LIST in os.listxattr(path):
            return True
    except OSError:
        return True
    groups = (runner.group_id, *runner.groups)
    shift = 6 if status.st_uid == runner.user_id else 3 if status.st_gid in groups else 0
    return status.st_mode >> shift & rights == rights


@dataclass(frozen=True)
class Obstacle:
    """What keeps a job's account from what the job needs.

    Attributes:
        closed: Folders that the account cannot enter, the first one first.
        folder: The job's working folder; None if the job brings its own.
        rights: To that folder, which it lacks.
        program: What it cannot run; None if it can.
        passed: Whether it could not even pass through to where jobs run.
    """

    runner: Runner
    closed: tuple[Path, ...]
    folder: Path | None
    rights: int
    program: Path | None
    passed: bool

    def sentence(self) -> str:
        """Say what is in the way."""
        who = f"jobs run as the account {self.runner.name}"
        if self.rights and self.folder:
            if self.closed and (self.folder == self.closed[0] or self.folder.resolve().is_relative_to(self.closed[0])):
                where = "" if self.folder == self.closed[0] else f", on the way to the working folder {self.folder}"
                return f"{who}, which cannot enter {self.closed[0]}{where}"
            what = "read" if self.rights & os.R_OK else "write to"
            return f"{who}, which cannot {what} the working folder {self.folder}"
        if self.program and not self.closed:
            return f"{who}, which may not run {self.program}"
        what = f"to the program {self.program}" if self.program else "to where jobs run"
        return f"{who}, which cannot enter {self.closed[0]}, on the way {what}"

    def opened_by(self) -> str:
        """Return the line that lets the account in; empty if this caller cannot."""
        own = self.folder if self.rights else None
        passed = [each for each in self.closed if each != own]
        changed = [*passed, *filter(None, (own, None if self.closed else self.program))]
        if os.geteuid() and any(path.stat().st_uid != os.geteuid() for path in changed):
            return ""
        if own and self.rights & os.W_OK and not os.access(own, os.W_OK):  # the file system is read-only
            return ""
        lines = [f"chmod a+x {shlex.join(map(str, passed))}"] if passed else []
        if own:
            lines.append(f"chmod a+{'rwx' if self.rights & os.W_OK else 'rx'} {shlex.quote(str(own))}")
        if self.program and not self.closed:
            lines.append(f"chmod a+rx {shlex.quote(str(self.program))}")
        return " && ".join(lines)


def obstacle(runner: Runner, folder: Path | None, programs: Sequence[Program], *, writes: bool) -> Obstacle | None:
    """Return what keeps an account from a job's folder and program; None if nothing does.

    Args:
        runner: The account.
        folder: The job's working folder; None if the job brings its own.
        programs: What the job runs.
        writes: Whether it must be able to write to its folder.
    """
    closed: list[Path] = []
    rights = 0
    if folder is not None:
        closed += closed_folders(runner, folder)
        rights = sum(each for each in (os.R_OK, os.W_OK, os.X_OK) if lacks(runner, folder, each))
        if rights & os.X_OK:
            closed.append(folder)
        if closed:
            rights |= os.X_OK
        if not writes:
            rights &= ~os.W_OK
    shut = next((program.path for program in programs if program.is_shut), None)
    passed = [way for each in runner.passed for way in closed_folders(runner, each)]
    closed += [*(each for program in programs for each in program.closed), *passed]
    if not (closed or rights or shut):
        return None
    return Obstacle(runner, tuple(dict.fromkeys(closed)), folder, rights, shut, bool(passed))
