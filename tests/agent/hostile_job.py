"""What a hostile job tries. It prints a line that begins with BROKE for everything in which it succeeds.

Arguments: process ids of the agent and of another tenant's job, that job's folder and id, the node's folder, and ports
that are not the job's. Where connections cannot be judged, none are given.
"""

import ctypes
import os
import pwd
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

AGENT, VICTIM = int(sys.argv[1]), int(sys.argv[2])
VICTIMS_FOLDER, VICTIMS_JOB, NODE = Path(sys.argv[3]), sys.argv[4], Path(sys.argv[5])
LIBRARY = ctypes.CDLL(None, use_errno=True)
OWN_FOLDER = Path(os.environ["WATTSHIFT_PROGRESS_FILE"]).parent


def attempt(name, action):
    """Report an action that does not fail and returns something true."""
    try:
        result = action()
    except (OSError, KeyError, subprocess.SubprocessError):
        return
    if result:
        print("BROKE", name, str(result)[:200])


def start_of(path):
    """Return the first bytes of a file."""
    with path.open("rb") as file:
        return file.read(64)


def tree(folder):
    """Return every file that can be read below a folder, less this job's own."""
    found = []
    for path, folders, files in os.walk(folder):
        folders[:] = [each for each in folders if not str(Path(path, each)).startswith((str(OWN_FOLDER), HOME))]
        for file in files:
            whole = os.path.join(path, file)
            try:
                with open(whole, "rb") as opened:
                    opened.read(1)
                found.append(whole)
            except OSError:
                pass
    return [each for each in found if not each.endswith(("attack.py", "whoami", "agent.log"))]


HOME = os.environ["HOME"]
print("id", os.getuid(), os.getgid(), os.getgroups(), pwd.getpwuid(os.getuid()).pw_name)
print("environment", dict(os.environ))
if os.getuid() == 0 or os.getgid() == 0:
    print("BROKE: runs as root")
status = Path("/proc/self/status").read_text()
for wanted in ("NoNewPrivs:\t1", "Seccomp:\t2", "CapEff:\t0000000000000000"):
    if wanted not in status:
        print("BROKE: no", wanted)

# Files of the agent, of the control plane, and of the other tenant.
for word in ("admin.key", "data/admin.key", "data/secrets/service-token", "data/run.json", "state/agent.lock"):
    attempt(f"read {word}", (NODE / word).read_bytes)
for folder in (NODE, NODE / "data", NODE / "state", NODE / "state" / "allocations", NODE / "data" / "checkpoints"):
    attempt(f"found below {folder}", lambda folder=folder: tree(folder))
    attempt(f"wrote to {folder}", lambda folder=folder: Path(folder, "hostile").write_text("x"))
for name in ("stdout", "stderr", "gang.json", "spec", "progress.jsonl", "scratch/mine", "lease"):
    attempt(f"read the victim's {name}", (VICTIMS_FOLDER / name).read_bytes)
    attempt(f"wrote the victim's {name}", lambda name=name: (VICTIMS_FOLDER / name).open("ab").write(b"x"))
for place in (NODE / "data" / "checkpoints", NODE / "state" / "checkpoints"):
    attempt("read the victim's checkpoint", (place / VICTIMS_JOB / "mine").read_bytes)
    attempt("listed the victim's checkpoints", lambda place=place: os.listdir(place / VICTIMS_JOB))
for home in Path(HOME).parent.iterdir() if os.access(Path(HOME).parent, os.R_OK) else ():
    attempt(f"listed {home}", lambda home=home: str(home) != HOME and os.listdir(home))

# Links in the place of its own files.
for own, foreign in (
    (OWN_FOLDER / "stdout", VICTIMS_FOLDER / "stdout"),
    (OWN_FOLDER / "progress.jsonl", VICTIMS_FOLDER / "stdout"),
    (Path(os.environ["WATTSHIFT_CHECKPOINT_DIR"]), NODE / "data" / "checkpoints" / VICTIMS_JOB),
):

    def swap(own=own, foreign=foreign):
        os.rename(own, str(own) + ".away")
        os.symlink(foreign, own)
        return "swapped"

    attempt(f"a link in place of {own.name}", swap)

# Processes.
for pid in (AGENT, VICTIM, 1):
    for file in ("environ", "cmdline", "maps", "mem", "auxv"):
        attempt(f"/proc/{pid}/{file}", lambda pid=pid, file=file: start_of(Path(f"/proc/{pid}/{file}")))
    for file in ("cwd", "root", "exe"):
        attempt(f"/proc/{pid}/{file}", lambda pid=pid, file=file: os.readlink(f"/proc/{pid}/{file}"))
    attempt(f"listed descriptors of {pid}", lambda pid=pid: os.listdir(f"/proc/{pid}/fd"))
    attempt(f"signalled {pid}", lambda pid=pid: os.kill(pid, signal.SIGCONT) or "sent")
    attempt(f"traced {pid}", lambda pid=pid: pid > 0 and LIBRARY.ptrace(16, pid, 0, 0) == 0)
foreign = [pid for pid in os.listdir("/proc") if pid.isdecimal() and os.stat(f"/proc/{pid}").st_uid != os.getuid()]
if foreign:
    print("BROKE: sees processes of others", foreign)

# More rights.
attempt("became root", lambda: os.setuid(0) or "yes")
attempt("a program with root's rights", lambda: b"euid=0" in subprocess.check_output([NODE / "whoami"]))
attempt("a user namespace", lambda: LIBRARY.unshare(0x10000000) == 0)
attempt("a mount", lambda: LIBRARY.mount(b"tmpfs", b"/mnt", b"tmpfs", 0, None) == 0)
attempt("left its namespace", lambda: LIBRARY.setns(os.open("/proc/1/ns/mnt", os.O_RDONLY), 0) == 0)
attempt("removed a limit", lambda: [path.write_text("max") for path in Path("/sys/fs/cgroup").rglob("pids.max")])
attempt("left its cgroup", lambda: [path.write_text("0") for path in Path("/sys/fs/cgroup").glob("*/cgroup.procs")])
for path in (Path("/dev/mem"), *Path("/dev").glob("[vsn][dv]*[0-9a]")):
    attempt(f"read {path}", lambda path=path: start_of(path))

# Memory, queues and files that everybody on a host finds; a room of its own has a limit.
KEY, OWN_KEY = 0x57A77000, 0x57A77001
for kind, look in (
    ("segment", lambda key, flags: LIBRARY.shmget(key, 4096, flags)),
    ("queue", lambda key, flags: LIBRARY.msgget(key, flags)),
    ("semaphore", lambda key, flags: LIBRARY.semget(key, 1, flags)),
):
    attempt(f"found the victim's {kind}", lambda look=look: look(KEY, 0) >= 0)
    print("made", kind, look(OWN_KEY, 0o1666) >= 0)
for folder in ("/tmp", "/var/tmp", "/dev/shm"):
    attempt(f"read the victim's file in {folder}", (Path(folder) / "victims").read_bytes)
    attempt(f"listed the host's {folder}", lambda folder=folder: set(os.listdir(folder)) - {"hostile", NODE.name})
    (Path(folder) / "hostile").write_text("left behind")
    print("made", folder, True)
    attempt(f"filled {folder}", lambda folder=folder: (Path(folder) / "hostile").write_bytes(bytes(9 << 20)))
    (Path(folder) / "hostile").write_text("left behind")

# Servers of this node: what else runs on the host is not this test's.
servers = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
for path in (path for path in servers if path.startswith(str(NODE))):

    def connect(path=path):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
        return path

    print("server", path)
    attempt("a socket of a server", connect)
for port in map(int, sys.argv[6:]):
    for host in ("127.0.0.1", "::1"):
        attempt(f"connected to {host} {port}", lambda host=host, port=port: socket.create_connection((host, port), 1))
        attempt(f"bound {port}", lambda host=host, port=port: socket.create_server((host, port), reuse_port=True))
with socket.create_connection(urlsplit(os.environ["WATTSHIFT_PROGRESS_URL"]).netloc.split(":"), 5):
    print("reached where progress is posted")
print("done")
