"""What a hostile job tries with sockets. It prints a line that begins with BROKE for all in which it succeeds.

And one that begins with LACKS for what every job needs and it did not get. Its argument is JSON: ports that are
``closed`` to it (TCP and UDP, at all addresses), one that is ``open``, its ``own``, those that it must not ``bind``,
and ``hosts``, addresses of this host that are not loopback's.
"""

# ruff: noqa: B023  what closes over a loop's variable here is called before that changes

import array
import contextlib
import ctypes
import json
import os
import socket
import sys

FACTS = json.loads(sys.argv[1])
HOSTS = FACTS["hosts"]
V4 = ["127.0.0.1", "127.9.8.7", "0.0.0.0", *(host for host in HOSTS if ":" not in host)]
V6 = ["::1", "::", *(host for host in HOSTS if ":" in host), *(f"::ffff:{host}" for host in V4)]
PLACES = [(socket.AF_INET, host) for host in V4] + [(socket.AF_INET6, host) for host in V6]
MPTCP, SCTP, UDPLITE = 262, 132, 136
FAST_OPEN, REUSE_PORT = 0x20000000, socket.SO_REUSEPORT
PATIENCE_S = 0.05
STREAM, DATAGRAM = socket.SOCK_STREAM, socket.SOCK_DGRAM


def attempt(name, action):
    """Report an action that does not fail and returns something true."""
    try:
        result = action()
    except OSError:
        return
    if result:
        print("BROKE", name, flush=True)


def need(name, action):
    """Report an action that fails, which every job may do."""
    try:
        action()
    except OSError as error:
        print("LACKS", name, error, flush=True)


def made(family, kind=STREAM, protocol=0):
    found = socket.socket(family, kind, protocol)
    found.settimeout(PATIENCE_S)
    return found


def connected(family, host, port, protocol=0, before=lambda each: None):
    with made(family, STREAM, protocol) as client:
        before(client)
        client.connect((host, port))
        return True


def passed(family):
    """Return a socket that another process has made and passed on."""
    ours, theirs = socket.socketpair()
    if not os.fork():
        theirs_too = made(family)
        theirs.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs_too.fileno()]))])
        os._exit(0)
    os.wait()
    _, [(_, _, number)], _, _ = ours.recvmsg(1, socket.CMSG_SPACE(4))
    found = socket.socket(fileno=array.array("i", number)[0])
    found.settimeout(PATIENCE_S)
    return found


def with_options(client):
    client.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, b"\x01\x01\x01\x01")


def from_own_port(client):
    client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    client.bind(("", FACTS["own"]))


def again(family, host, port):
    """Connect to what may be reached, part, and connect the same socket to what may not."""
    with made(family) as client:
        client.connect((host, FACTS["open"]))
        client.sendall(b"end")
        raw = socket.AF_UNSPEC.to_bytes(2, "little") + bytes(26)
        ctypes.CDLL(None).connect(client.fileno(), raw, len(raw))
        client.connect((host, port))
        return True


for port in FACTS["closed"]:
    for family, host in PLACES:
        place = f"{host} {port}"
        attempt(f"connected {place}", lambda: connected(family, host, port))
        attempt(f"connected by MPTCP {place}", lambda: connected(family, host, port, MPTCP))
        attempt(f"connected by SCTP {place}", lambda: connected(family, host, port, SCTP))
        attempt(f"connected from its own port {place}", lambda: connected(family, host, port, 0, from_own_port))
        if family == socket.AF_INET:
            attempt(f"connected with options {place}", lambda: connected(family, host, port, 0, with_options))
        # What arrives of these is seen by who listens.
        for protocol in (0, MPTCP):
            with contextlib.suppress(OSError), made(family, STREAM, protocol) as fast:
                fast.sendto(b"fast open", FAST_OPEN, (host, port))
        for protocol in (0, UDPLITE):
            with contextlib.suppress(OSError), made(family, DATAGRAM, protocol) as sender:
                sender.sendto(b"unconnected", (host, port))
            with contextlib.suppress(OSError), made(family, DATAGRAM, protocol) as sender:
                sender.connect((host, port))
                sender.send(b"connected")
            with contextlib.suppress(OSError), made(family, DATAGRAM, protocol) as sender:
                sender.sendto(b"large" * 12_000, (host, port))
    attempt(f"connected a passed socket {port}", lambda: passed(socket.AF_INET).connect(("127.0.0.1", port)) or True)
    attempt(f"connected again {port}", lambda: again(socket.AF_INET, "127.0.0.1", port))
    attempt(f"connected again at ::1 {port}", lambda: again(socket.AF_INET6, "::1", port))

for port in (*FACTS["bind"], *FACTS["closed"]):
    for family, host in PLACES:
        for kind in (STREAM, DATAGRAM):
            for option in (socket.SO_REUSEADDR, REUSE_PORT):

                def bind(family=family, host=host, kind=kind, option=option, port=port, protocol=0):
                    with made(family, kind, protocol) as server:
                        server.setsockopt(socket.SOL_SOCKET, option, 1)
                        server.bind((host, port))
                        if kind is STREAM:
                            server.listen()
                        return True

                attempt(f"bound {host} {port} {kind.name} {option}", bind)
        attempt(f"bound {host} {port} by MPTCP", lambda: bind(kind=STREAM, option=REUSE_PORT, protocol=MPTCP))

for family in (40, 43, 30, 21, 38):  # VSOCK, SMC, TIPC, RDS, ALG
    for kind in (STREAM, DATAGRAM, socket.SOCK_SEQPACKET):
        attempt(f"a socket of family {family}", lambda: socket.socket(family, kind))
attempt("a socket of MPTCP", lambda: socket.socket(socket.AF_INET, STREAM, MPTCP))
attempt("a raw socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
attempt("a packet socket", lambda: socket.socket(17, socket.SOCK_RAW, 0))


def served(server, host, port=0, fast=False):
    port = port or server.getsockname()[1]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    client = made(family)
    client.settimeout(5)
    if fast:
        client.settimeout(None)
        client.sendto(b"ask", FAST_OPEN, (host, port))
    else:
        client.connect((host, port))
        client.sendall(b"ask")
    taken, _ = server.accept()
    assert taken.recv(3) == b"ask"
    taken.sendall(b"answer")
    assert client.recv(6) == b"answer"


def own_listener(family, host, port=0):
    server = socket.socket(family)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((host, port))
    server.listen()
    return server


def automatic(family):
    server = socket.socket(family)
    server.listen()
    return server


def datagrams(family, host):
    with socket.socket(family, DATAGRAM) as server, socket.socket(family, DATAGRAM) as client:
        server.settimeout(5)
        client.settimeout(5)
        server.bind((host, 0))
        client.connect(server.getsockname())
        client.send(b"ask")
        asked, sender = server.recvfrom(3)
        server.sendto(b"answer", sender)
        assert (asked, client.recv(6)) == (b"ask", b"answer")


for host in ("127.0.0.1", "::1", *HOSTS):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    need(f"its own listener at {host}", lambda: served(own_listener(family, host), host))
    need(f"its own rendezvous at {host}", lambda: served(own_listener(family, host, FACTS["own"]), host))
    need(f"its own datagrams at {host}", lambda: datagrams(family, host))
    need(f"fast open to itself at {host}", lambda: served(own_listener(family, host), host, fast=True))
    need(f"a listener without bind, from {host}", lambda: served(automatic(family), host))
    need(f"the open port at {host}", lambda: connected(family, host, FACTS["open"]))
need("its own listener for both versions", lambda: served(own_listener(socket.AF_INET6, "::"), "127.0.0.1"))
need("its own listener by a mapped address", lambda: served(own_listener(socket.AF_INET, ""), "::ffff:127.0.0.1"))
for port in FACTS.get("gangs", ()):
    need("a listener of its tenant", lambda: connected(socket.AF_INET, "127.0.0.1", port))
for port in FACTS["closed"]:
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::1")):
        try:
            connected(family, host, port)
        except PermissionError:
            pass
        except OSError as error:
            print("LACKS a refusal at once", host, error)
try:
    connected(socket.AF_INET, "127.0.0.1", 1)
except ConnectionRefusedError:
    pass
except OSError as error:
    print("LACKS a refusal where nobody listens", error)
print("done", flush=True)
