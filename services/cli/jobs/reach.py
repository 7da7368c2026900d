"""Whether the account that a job runs as can reach the folder and the program that the job names on this machine."""

import json
import os
import pwd
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.contracts.nodes import RUNS_AS

ACCESS_LIST = "system.posix_acl_access"


@dataclass(frozen=True)
class Runner:
    """The account that jobs run as."""

    name: str
    user_id: int
    group_id: int
    groups: tuple[int, ...]
    shown: tuple[Path, ...] = ()  #: Folders that jobs may read even if the folders above them are closed
    passed: tuple[Path, ...] = ()  #: Folders that it has to pass through in any case
    sees_opened: bool = False
    """Whether jobs see a folder that was opened to the account even if the folders above it are closed."""


def runner_of(identity: dict[str, Any], installation: Path | None) -> Runner | None:
    """Return the account that a caller's jobs run as on this machine; None if it cannot be known.

    Args:
        identity: The caller, as ``/v1/whoami`` returns it.
        installation: The folder of the installation in question, if it is on this machine.
    """
    said: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        found = [] if installation is None else installation.glob(f"nodes/*/{RUNS_AS}")
        if newest := max(found, key=lambda path: path.stat().st_mtime, default=None):
            said = json.loads(newest.read_bytes())
    shown = tuple(map(Path, said.get("shown", ())))
    passed = tuple(map(Path, said.get("passed", ())))
    sees = bool(said) and not passed
    if (account := identity["account"]) is not None:
        try:
            entry = pwd.getpwnam(account)
        except KeyError:
            return None
        groups = tuple(os.getgrouplist(account, entry.pw_gid))
        # One that starts the jobs itself reaches its own folders; a superuser's jobs run as another account.
        passed = () if entry.pw_uid == os.geteuid() else passed
        return Runner(account, entry.pw_uid, entry.pw_gid, groups, shown, passed, sees) if entry.pw_uid else None
    written = said.get("runners", {}).get(identity["tenant_id"])
    if written is None:
        return None
    groups = tuple(written["groups"])
    return Runner(written["name"], written["user_id"], written["group_id"], groups, shown, passed, sees)


@dataclass(frozen=True)
class Obstacle:
    """Something that a job needs and its account cannot use."""

    path: Path  #: A folder or program
    mode: str  #: What ``chmod`` would have to add to its mode
    what: str  #: Ends the sentence "jobs run as the account NAME, which"


@dataclass(frozen=True)
class Program:
    """A program that a job runs."""

    path: Path  #: Where it is
    obstacles: tuple[Obstacle, ...]  #: What keeps the job's account from running it
    instead_of: Path | None = None  #: The program that the caller would run and the account cannot


def obstacles(runner: Runner, folder: Path | None, programs: Sequence[Program], *, writes: bool) -> list[Obstacle]:
    """Return what keeps an account from using a job's folder and programs, in the order in which it is met.

    Args:
        folder: The job's working folder; None if the job brings its own.
        writes: Whether it must be able to write to its folder.
    """
    found: list[Obstacle] = []
    if folder is not None:
        found += _on_the_way(runner, folder, f"the working folder {folder}")
        words = {os.X_OK: "enter", os.R_OK: "read the working folder", os.W_OK: "write to the working folder"}
        lacking = [each for each in words if (writes or each != os.W_OK) and lacks(runner, folder, each)]
        if lacking:
            mode = "rwx" if os.W_OK in lacking else "rx"
            found.append(Obstacle(folder, mode, f"cannot {words[lacking[0]]} {folder}"))
    found += [each for program in programs for each in program.obstacles]
    return found + [each for path in runner.passed for each in _on_the_way(runner, path, "where jobs run")]


def opened_by(found: Sequence[Obstacle]) -> str:
    """Return the line to type that removes obstacles; empty if this caller cannot remove them."""
    by_path = {each.path: each.mode for each in reversed(found)}  # a working folder itself before what is below it
    if os.geteuid() and any(path.stat().st_uid != os.geteuid() for path in by_path):
        return ""
    if any(mode == "rwx" and not os.access(path, os.W_OK) for path, mode in by_path.items()):
        return ""  # the file system is read-only
    paths_of = {mode: [path for path in by_path if by_path[path] == mode] for mode in ("x", "rx", "rwx")}
    lines = [f"chmod a+{mode} {shlex.join(map(str, paths))}" for mode, paths in paths_of.items() if paths]
    return " && ".join(lines)


def programs_of(
    runner: Runner, command: Sequence[str], environment: Mapping[str, str], folder: Path | None
) -> list[Program]:
    """Return a command's program and, if that is a script, its interpreter; empty if it cannot be known here.

    If the account cannot run the program that the caller would run, the job runs the next one in PATH; but one from a
    virtual environment is not replaced.
    """
    word, search = command[0] if command else "", environment.get("PATH", "")
    if "/" in word:
        places = [Path(folder or "/", word)]
    else:
        found = (shutil.which(word, path=place) for place in search.split(":") if word and place)
        places = [Path(each) for each in found if each]
    programs = [_program(runner, path) for path in places if path.is_file()]
    if not programs:
        return []
    first = programs[0]
    own = [environment[name] for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if name in environment]
    if first.obstacles and not any(first.path.is_relative_to(each) for each in own):
        first = next((replace(each, instead_of=first.path) for each in programs if not each.obstacles), first)
    words: list[str] = []
    with suppress(OSError), first.path.open("rb") as file:
        if file.read(2) == b"#!":
            words = os.fsdecode(file.readline(4_096)).split()
    is_by_name = len(words) > 1 and words[0].endswith("/env") and not words[1].startswith("-")
    words = words[1:2] if is_by_name else words[:1]
    return [first, *(programs_of(runner, words, environment, folder) if words else ())]


def _program(runner: Runner, path: Path) -> Program:
    found = _on_the_way(runner, path, f"the program {path}")
    if lacks(runner, path, os.X_OK):
        found.append(Obstacle(path, "rx", f"may not run {path}"))
    return Program(path, tuple(found))


def _on_the_way(runner: Runner, path: Path, goal: str) -> list[Obstacle]:
    return [Obstacle(each, "x", f"cannot enter {each}, on the way to {goal}") for each in closed_folders(runner, path)]


def closed_folders(runner: Runner, path: Path) -> list[Path]:
    """Return the folders on the way to ``path`` that the account cannot pass through, the outermost first.

    Folders above something that jobs are shown do not count.
    """
    ends = [end for end in (path.absolute(), Path(os.path.realpath(path))) if not _is_shown(runner, end)]
    way = dict.fromkeys(folder for end in ends for folder in reversed(end.parents))
    return [folder for folder in way if not _may(runner, folder, os.X_OK)]


def lacks(runner: Runner, path: Path, rights: int) -> bool:
    """Return whether the account lacks rights (of ``os.access``) to a path, whatever the folders above it."""
    real = Path(os.path.realpath(path))
    return bool(rights & os.W_OK) if _is_shown(runner, real) else not _may(runner, real, rights)


def _is_shown(runner: Runner, path: Path) -> bool:
    return any(path.is_relative_to(each) for each in runner.shown)


def _may(runner: Runner, path: Path, rights: int) -> bool:
    """Return whether the account has rights to a path: according to the kernel, where this process may ask it."""
    if runner.user_id == os.geteuid():
        return os.access(path, rights)
    if os.geteuid() == 0:
        is_folder = path.is_dir()
        with suppress(OSError):
            at = os.open(path if is_folder else path.parent, os.O_RDONLY | os.O_DIRECTORY)  # the way there is no matter
            try:
                with _asking_for(runner):
                    return os.access("." if is_folder else path.name, rights, dir_fd=at)
            finally:
                os.close(at)
    return _may_by_mode(runner, path, rights)


@contextmanager
def _asking_for(runner: Runner) -> Iterator[None]:
    """Have ``os.access`` answer for the account: it checks the real ids, while the effective ones stay root's."""
    user, group, groups = os.getuid(), os.getgid(), os.getgroups()
    try:
        os.setgroups(runner.groups)
        os.setregid(runner.group_id, -1)
        os.setreuid(runner.user_id, -1)
        yield
    finally:
        os.setreuid(user, -1)
        os.setregid(group, -1)
        os.setgroups(groups)


def _may_by_mode(runner: Runner, path: Path, rights: int) -> bool:
    """Decide by owner and mode; what they cannot tell, as with an access list, is left to the agent."""
    try:
        status = path.stat()
        if hasattr(os, "listxattr") and ACCESS_LIST in os.listxattr(path):
            return True
    except OSError:
        return True
    groups = (runner.group_id, *runner.groups)
    shift = 6 if status.st_uid == runner.user_id else 3 if status.st_gid in groups else 0
    return status.st_mode >> shift & rights == rights
