"""A job that takes whatever port falls free, while every process of the control plane dies in turn, gets none."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from services.cli.client import Gateway
from services.cli.commands import CliError
from services.standalone import root_secret, stack
from services.standalone.data_folder import DataFolder
from tests.attacks.test_strangers_on_ports import listening
from tests.integration.conftest import Installation
from tests.standalone.test_doors import is_free
from tests.support.servers import wait_until

pytestmark = [pytest.mark.live, pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")]

TAKE = r"""
import os, select, socket, sys, threading, time
sockets, ports = sys.argv[1], [int(port) for port in sys.argv[2:]]
print("fds", [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if n != "3"], flush=True)
ADMIN = b'{"identity":{"tenant_id":"default","role":"admin","key_id":"key_evil"},"limits":{}}'
def serve(server, name):
    server.listen()
    print("GOT", name, flush=True)
    while True:
        to, _ = server.accept()
        to.settimeout(2)
        try:
            print("HEARD", name, to.recv(4096)[:200], flush=True)
            to.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(ADMIN) + ADMIN)
        except OSError:
            pass
        to.close()
def take(family, address):
    server = socket.socket(family)
    try:
        if family != socket.AF_UNIX:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(address)
    except OSError:
        server.close()
        return
    threading.Thread(target=serve, args=(server, address), daemon=True).start()
free = socket.create_server(("127.0.0.1", 0))
port = free.getsockname()[1]
free.close()
take(socket.AF_INET, ("127.0.0.1", port))
turns, told = 0, time.monotonic()
while True:
    for port in ports:
        for host in ("127.0.0.1", "0.0.0.0"):
            take(socket.AF_INET, (host, port))
        for host in ("::1", "::"):
            take(socket.AF_INET6, (host, port))
    for name in ("admission", "telemetry", "valkey", "postgres/.s.PGSQL.5432"):
        take(socket.AF_UNIX, f"{sockets}/{name}" + ("" if "/" in name else ".sock"))
    turns += 1
    if time.monotonic() - told > 1:
        told = time.monotonic()
        print("turns", turns, flush=True)
    time.sleep(0.001)
"""


@contextmanager
def asking_with_a_made_up_key(url: str) -> Iterator[Counter[int]]:
    """Ask for what an admin alone gets; 0 counts those that found nobody."""
    found: Counter[int] = Counter()
    over = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url, headers={"authorization": "Bearer ws_" + "A" * 43}, timeout=60) as client:
            while not over.wait(0.02):
                try:
                    found[client.post("/v1/nodes/evil/enrollments", json={}).status_code] += 1
                except httpx.TransportError:
                    found[0] += 1

    asker = threading.Thread(target=ask)
    asker.start()
    try:
        yield found
    finally:
        over.set()
        asker.join()


def test_a_job_that_waits_for_ports_gets_none_and_hears_nothing(installation: Installation) -> None:
    installation.gateway.call("POST", "/v1/tenants", body={"id": "takers"})
    made = installation.gateway.call("POST", "/v1/keys", body={"tenant_id": "takers", "role": "user"})
    before = stack.read_status(installation.folder)
    ports = sorted({str(process.port) for process in before.processes if process.port})
    assert len(ports) == 4, "gateway, router and two agents"
    command = ["/usr/bin/python3", "-c", TAKE, before.sockets, *ports]
    with httpx.Client(base_url=before.gateway_url, headers={"authorization": f"Bearer {made['secret']}"}) as stranger:
        job = stranger.post("/v1/jobs", json={"name": "take", "command": command}, timeout=60).json()["id"]

    def printed() -> str:
        return installation.gateway.text(f"/v1/jobs/{job}/logs", stream="both").text

    installation.wait_for(job, lambda found: found["state"] == "running")
    wait_until(lambda: "turns" in printed())
    with asking_with_a_made_up_key(before.gateway_url) as answers:
        for process in before.processes:
            installation.kill(process.name)
        root_secret.rotate(DataFolder(installation.folder))
        wait_until(lambda: stack.read_status(installation.folder).state == "running")
    last = printed().splitlines()[-1:]  # of a long output, the last part alone may be shown
    wait_until(lambda: printed().splitlines()[-1:] != last, 180)

    output = printed()
    got = [line for line in output.splitlines() if line.startswith("GOT")]
    assert len(got) == 1, "that one is its own: it knows how"
    assert "HEARD" not in output
    assert "socket:" not in output.partition("\n")[0], "it has inherited none"
    assert set(answers) <= {0, 401, 503}, answers
    assert answers[401] > 0
    assert installation.job(job)["state"] == "running"
    after = stack.read_status(installation.folder)
    assert sorted({str(process.port) for process in after.processes if process.port}) == ports
    assert len(installation.nodes()) == 2
    installation.gateway.call("POST", f"/v1/jobs/{job}/cancel")


def test_once_the_supervisor_is_gone_whoever_takes_its_port_is_sent_nothing_and_named(
    installation: Installation,
) -> None:
    before = stack.read_status(installation.folder)
    assert before.pid
    port = int(before.gateway_url.rpartition(":")[2])
    os.kill(before.pid, signal.SIGKILL)
    wait_until(lambda: stack.read_status(installation.folder).state == "stopped")
    wait_until(lambda: is_free("127.0.0.1", port))  # the kernel ends its processes one after the other
    with listening(port=port) as stranger:
        with pytest.raises(CliError, match=f"listens on port {port} .*nothing was sent there"):
            Gateway(before.gateway_url, (installation.folder / "admin.key").read_text().strip()).get("/v1/jobs")
        with pytest.raises(stack.StackError, match=rf"port {port} is taken by \S+ \(process \d+\)"):
            stack.up(installation.folder, port=port)
        assert stranger.heard() == ""
    installation.gateway.close()
    installation.up()
