"""The shim's side of confinement: what happens to a rank's process between fork and exec. Standard library only.

The agent decides (``confinement``) and writes its decisions into the rank's spec as entries ``confine=KIND VALUE``:

``cgroup``   a file to which each process writes itself
``limit``    a resource limit: its name, and the value of both its soft and its hard limit
``cover``    a folder that is hidden by an empty one in memory
``show``     a path beneath a covered folder that stays visible, for reading
``keep``     the same, for writing
``asked``    the same, as far as the job's user can reach it; as a link where a path beneath ``/tmp`` leads elsewhere
``named``    the same, but not beneath a covered folder
``opened``   the same as ``asked``, wherever the path is: its access list must name the job's user
``space``    its own IPC, ``/tmp``, ``/var/tmp`` and ``/dev/shm``; the value is the size of all three in bytes
``replace``  a file, a space, and the file that is seen in its place
``proc``     hides other accounts' processes in ``/proc``
``seal``     no new privileges, ever
``filter``   a seccomp program, in hexadecimal digits

Mounts and IPC are made once for each rank, in its own namespaces, which a short-lived child makes and to which the
shim keeps descriptors. The kernel removes them and their content with the rank's last process, whoever was killed:
nothing is left over.
"""

import ctypes
import errno
import os
import resource
import signal
import struct
import sys

_CLONE_NEWNS, _CLONE_NEWIPC = 0x00020000, 0x08000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_SLAVE = (
    *(0x1, 0x2, 0x4, 0x8, 0x20, 0x1000),
    *(0x4000, 0x80000),
)
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2
_NAMED_USER = 0x02  #: The tag of an entry of an access list that names a user
_O_PATH = getattr(os, "O_PATH", 0)
SPACES = ("/dev/shm", "/var/tmp", "/tmp")
"""Folders in which everybody may write, and programs expect to; the last one is where the file system is mounted."""
_QUEUES = b"/dev/mqueue"
_READY = b"r"
NOT_CONFINED = 126  #: The exit status of ``run`` for a program that it could not become


class Enclosure:
    """What confines the processes of one rank."""

    def __init__(self) -> None:
        kinds = (b"cgroup", b"cover", b"asked", b"named", b"opened")
        self._paths: dict[bytes, list[bytes]] = {kind: [] for kind in kinds}
        self._cgroups, self._covers, self._asked, self._named, self._opened = self._paths.values()
        self._limits: list[tuple[int, int]] = []
        self._shown: list[tuple[bytes, bool]] = []
        self._replaced: list[tuple[bytes, bytes]] = []
        self._space_bytes = 0
        self._hides_processes = False
        self._is_sealed = False
        self._filter = b""
        self._namespaces: list[int] = []

    def add(self, entry: bytes) -> None:
        """Add an entry of the spec; an unknown one raises an error, because it was meant to confine."""
        kind, _, value = entry.partition(b" ")
        if kind in self._paths:
            self._paths[kind].append(value)
        elif kind == b"limit":
            name, _, number = value.partition(b" ")
            self._limits.append((getattr(resource, "RLIMIT_" + name.decode()), int(number)))
        elif kind in (b"show", b"keep"):
            self._shown.append((value, kind == b"keep"))
        elif kind == b"space":
            self._space_bytes = int(value)
        elif kind == b"replace":
            path, _, by = value.partition(b" ")
            self._replaced.append((path, by))
        elif kind == b"proc":
            self._hides_processes = True
        elif kind == b"seal":
            self._is_sealed = True
        elif kind == b"filter":
            self._filter = bytes.fromhex(value.decode())
        else:
            raise ValueError(f"an unknown way to confine a job: {kind.decode(errors='replace')}")

    def make(self, user: list[int]) -> None:
        """Make the namespaces for the processes.

        Args:
            user: Whose processes they will be: user id, group id and further groups; empty for this process's own user.

        Raises:
            OSError: They cannot be made; nothing may run then.
        """
        if not (self._covers or self._hides_processes or self._replaced or self._space_bytes):
            return
        told, tell = os.pipe()
        waiting, release = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(release)
                self._build(user)
                os.write(tell, _READY)
                os.read(waiting, 1)
            except OSError as error:
                os.write(tell, f"{error.errno} {error.filename or ''}".encode(errors="replace"))
            finally:
                os._exit(0)
        os.close(tell)
        os.close(waiting)
        answer = os.read(told, 4096)
        try:
            if answer != _READY:
                number, _, what = answer.decode(errors="replace").partition(" ")
                raise OSError(int(number or 5), os.strerror(int(number or 5)), what or "mount")
            for kind in ("ipc", "mnt"):
                self._namespaces.append(os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC))
        finally:
            os.close(release)
            os.close(told)
            os.waitpid(pid, 0)

    def enter(self) -> None:
        """Apply the confinement that needs privileges, which this process still has; ``OSError`` if it cannot."""
        for path in self._cgroups:
            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            os.write(descriptor, b"0")
            os.close(descriptor)
        for number, value in self._limits:
            hard = resource.getrlimit(number)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            try:
                resource.setrlimit(number, (value, value))
            except ValueError as error:
                raise OSError(errno.EPERM, str(error)) from None
        for namespace in self._namespaces:
            _call("setns", namespace, 0)

    def memory_kill(self) -> dict[str, int]:
        """Return what is known of an out-of-memory kill in the control group; empty if the kernel killed no process.

        ``memory_peak`` is the peak use, and ``memory_limit`` the group's limit, in bytes. The limit is given only if it
        was reached: the kernel also kills at the limit of all jobs, and when the host is out of memory.
        """
        for group in map(os.path.dirname, self._cgroups):
            events = _numbers(group, b"memory.events")
            if events:
                reached, limit, peak = events.get("oom"), b"memory.max", b"memory.peak"
            else:
                events = _numbers(group, b"memory.oom_control")
                reached = _numbers(group, b"memory.failcnt").get("")
                limit, peak = b"memory.limit_in_bytes", b"memory.max_usage_in_bytes"
            if events.get("oom_kill"):
                found = {"memory_peak": _numbers(group, peak).get("", 0)}
                return found | {"memory_limit": _numbers(group, limit).get("", 0)} if reached else found
        return {}

    def seal(self) -> None:
        """Confine this process for good, once it runs as the job's user; ``OSError`` if it cannot be confined."""
        if self._is_sealed:
            _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if self._filter:
            install_filter(self._filter)

    def _build(self, user: list[int]) -> None:
        """Make the mounts, in this process's own namespace."""
        os.umask(0o022)
        _call("unshare", _CLONE_NEWNS | (_CLONE_NEWIPC if self._space_bytes else 0))
        _mount(None, b"/", None, _MS_REC | _MS_SLAVE)
        opened = {path: _open(path) for path, _ in (*self._shown, *((by, False) for _, by in self._replaced))}
        asked = {path: _open(path) for path in self._opened} | self._open_as(user)
        asked |= {path: -1 for path in self._opened if not (user and is_opened_to(user[0], _at(asked[path])))}
        covered = self._make_spaces()
        # Parents come first: what is shown beneath a cover may have something beneath it that is covered again.
        depth = [(path.count(b"/"), path, None) for path in self._covers]
        depth += [(path.count(b"/"), path, writable) for path, writable in self._shown]
        depth += [(path.count(b"/"), path, True) for path in asked.keys() - opened.keys()]
        opened = asked | opened
        for _, path, writable in sorted(depth, key=lambda each: each[:2]):
            if writable is None:
                if os.path.isdir(path):
                    _mount(b"tmpfs", path, b"tmpfs", _MS_NOSUID | _MS_NODEV, b"mode=0755,size=1m")
                    covered.append(path)
            elif opened[path] >= 0 and any(_is_below(path, cover) for cover in covered):
                if path in asked and _leads_out(opened[path], path):
                    _link(os.readlink(_at(opened[path])), path)
                else:
                    _bind(opened[path], path, writable)
        for path, by in self._replaced:
            if opened[by] >= 0 and os.path.exists(path):
                _bind(opened[by], path, False)
        if self._hides_processes:
            _mount(b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, b"hidepid=2")

    def _open_as(self, user: list[int]) -> dict[bytes, int]:
        """Open the asked and named paths with the rights of the job's user; of the named ones, none that is covered."""
        if user and (self._asked or self._named):
            os.setgroups(user[2:])
            os.setegid(user[1])
            os.seteuid(user[0])
        asked = {path: _open(path) for path in self._asked}
        named = {path: _open(path) for path in self._named}
        if user:
            os.seteuid(os.getuid())
            os.setegid(os.getgid())
        covers = [os.path.realpath(path) for path in self._covers]
        return asked | {
            path: descriptor
            for path, descriptor in named.items()
            if descriptor >= 0
            and not any(_is_below(path, shown) for shown in (*asked, *(shown for shown, _ in self._shown)))
            and not any(_is_below(os.readlink(_at(descriptor)), cover) for cover in covers)
        }

    def _make_spaces(self) -> list[bytes]:
        """Make the job's own folders for temporary files and shared memory: one file system, so that one size holds."""
        if not self._space_bytes:
            return []
        shown = [path for path, _ in self._shown]
        spaces = [path for path in map(os.fsencode, SPACES) if os.path.isdir(path) and path not in shown]
        _mount(b"tmpfs", spaces[-1], b"tmpfs", _MS_NOSUID | _MS_NODEV, b"mode=0755,size=%d" % self._space_bytes)
        top = os.open(spaces[-1], _O_PATH | os.O_CLOEXEC)
        for number, path in enumerate(spaces):
            folder = b"/proc/self/fd/%d/%d" % (top, number)
            os.mkdir(folder)
            os.chmod(folder, 0o1777)
            _mount(folder, path, None, _MS_BIND)
        if os.path.isdir(_QUEUES):
            _mount(b"mqueue", _QUEUES, b"mqueue", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
        return spaces


def _numbers(group: bytes, name: bytes) -> dict[str, int]:
    """Return the numbers in a file of a control group by name; a lone number has the empty name."""
    try:
        with open(os.path.join(group, name), encoding="ascii") as file:
            lines = [line.rpartition(" ") for line in file.read().splitlines()]
    except OSError:
        return {}
    return {what: int(number) for what, _, number in lines if number.isdigit()}


def install_filter(program: bytes) -> None:
    """Install a seccomp program, in a process that can get no new privileges; ``OSError`` if it is refused."""
    code = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions, padding, their address.
    header = struct.pack("HxxxxxxQ" if struct.calcsize("P") == 8 else "HxxI", len(program) // 8, ctypes.addressof(code))
    _call("prctl", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.create_string_buffer(header, len(header)), 0, 0)


def is_opened_to(user_id: int, path: bytes) -> bool:
    """Return whether a path's access list names a user and lets it read and enter."""
    try:
        rows = os.getxattr(path, "system.posix_acl_access")[4:]
    except OSError:
        return False
    mine = [rights for kind, rights, of in struct.iter_unpack("<HHI", rows) if (kind, of) == (_NAMED_USER, user_id)]
    return bool(mine) and mine[0] & 0o5 == 0o5


def _at(descriptor: int) -> bytes:
    """Return a path to what a descriptor refers to."""
    return b"/proc/self/fd/%d" % descriptor


def _is_below(path: bytes, folder: bytes) -> bool:
    return path == folder or path.startswith(folder.rstrip(b"/") + b"/")


def _open(path: bytes) -> int:
    """Return a descriptor of what is at a path now; -1 if there is nothing."""
    try:
        return os.open(path, _O_PATH | os.O_CLOEXEC)
    except OSError:
        return -1


def _leads_out(descriptor: int, path: bytes) -> bool:
    """Return whether a path beneath a private folder of the job leads elsewhere on the host, such as to /proc."""
    real, spaces = os.readlink(_at(descriptor)), list(map(os.fsencode, SPACES))
    inside = any(_is_below(real, space) and real != space for space in map(os.path.realpath, spaces))
    return any(_is_below(path, space) for space in spaces) and not inside


def _link(target: bytes, path: bytes) -> None:
    """Make a link in the job's own view, unless the path already exists through a parent."""
    if not os.path.lexists(path):
        os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
        os.symlink(target, path)


def _bind(descriptor: int, path: bytes, writable: bool) -> None:
    """Mount what a descriptor refers to at a path, which is made if need be."""
    source = _at(descriptor)
    if os.path.isdir(source):
        os.makedirs(path, 0o755, exist_ok=True)
    elif not os.path.exists(path):
        os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
    _mount(source, path, None, _MS_BIND | _MS_REC)
    if not writable:
        _mount(None, path, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID)


def _mount(source: bytes | None, target: bytes, kind: bytes | None, flags: int, data: bytes | None = None) -> None:
    if _library().mount(source, target, kind, ctypes.c_ulong(flags), data) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"mount {os.fsdecode(target)}")


def _call(name: str, *arguments: object) -> None:
    if getattr(_library(), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def command(folder: str) -> list[str]:
    """Return the words before those of a program that ``run`` is to run in a folder."""
    code = (
        "import sys; sys.path.append(sys.argv[1]); import enclosure; sys.exit(enclosure.run(sys.argv[2], sys.argv[3:]))"
    )
    return [sys.executable, "-I", "-S", "-c", code, os.path.dirname(__file__), folder]


def run(folder: str, argv: list[str]) -> int:
    """Become one program, as a job's account and confined like its job: for what the agent does on a job's behalf.

    The confinement is read from standard input, as entries that end in NUL: ``user=`` with the user id, the group id
    and further groups, and ``confine=`` as in the shim's ``spec``. The program gets this process's environment and
    output, an empty standard input, and ``folder`` as its working directory. If that fails, the reason is printed in
    git's style.
    """
    try:
        enclosure, user = Enclosure(), list[int]()
        for entry in sys.stdin.buffer.read().split(b"\0"):
            kind, _, value = entry.partition(b"=")
            if kind == b"confine":
                enclosure.add(value)
            elif kind == b"user":
                user = [int(number) for number in value.split()]
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        enclosure.make(user)
        enclosure.enter()
        if user and user[0] != os.geteuid():
            _become(user)
        enclosure.seal()
        os.chdir(folder)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execvp(argv[0], argv)
    except (OSError, ValueError) as failure:
        sys.stderr.write(f"fatal: {argv[0]} cannot be run as its job is confined: {failure}\n")
    return NOT_CONFINED


def _become(user: list[int]) -> None:
    os.setgroups(user[2:])
    os.setgid(user[1])
    os.setuid(user[0])


def main(filter_hex: str, user_id: int) -> int:
    """Find out for the agent what this process may do: print a line ``NAME`` or ``NAME: WHY NOT`` for each attempt."""
    checks = {
        "mounts": ("cover /mnt",),
        "proc": ("proc",),
        "space": (f"space {1 << 20}",),
        "seal": ("seal",),
        "filter": ("seal", f"filter {filter_hex}"),
    }
    for name, entries in checks.items():
        print(_outcome(name, lambda entries=entries: _try_enclosure(entries)), flush=True)
    print(_outcome("users", lambda: _become([user_id, user_id])), flush=True)
    return 0


def _outcome(name: str, attempt: object) -> str:
    """Return the text to print for an attempt, which is made in a child."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            attempt()  # pyright: ignore[reportCallIssue]
        except (OSError, ValueError) as error:
            os.write(tell, str(error).encode(errors="replace"))
        finally:
            os._exit(0)
    os.close(tell)
    status = os.waitpid(pid, 0)[1]
    why = os.read(told, 4096).decode(errors="replace") or ("it ended" if status else "")
    os.close(told)
    return f"{name}: {why}" if why else name


def _try_enclosure(entries: tuple[str, ...]) -> None:
    enclosure = Enclosure()
    for entry in entries:
        enclosure.add(entry.encode())
    enclosure.make([])
    enclosure.enter()
    enclosure.seal()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
