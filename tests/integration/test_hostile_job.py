"""What a job of another tenant finds on a whole installation: nothing that opens it."""

from __future__ import annotations

import os

import httpx
import psutil
import pytest

from services.standalone import stack
from tests.integration.conftest import Installation

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")

LOOK = r"""
import os, pathlib, socket, sys
data, ports = pathlib.Path(sys.argv[1]), [int(port) for port in sys.argv[2].split(",")]
print("user", os.getuid())
for path in (data / "admin.key", data / "secrets" / "postgres", data / "secrets" / "service-token", data / "run.json",
             data / "valkey" / "valkey.conf", data / "postgres" / "data" / "postgresql.conf",
             data / "log" / "gateway.log"):
    try:
        print("BROKE", path, path.read_text()[:80])
    except OSError:
        pass
for process in pathlib.Path("/proc").iterdir():
    if process.name.isdecimal():
        try:
            found = (process / "environ").read_bytes()
            if process.name != str(os.getpid()) and b"TOKEN" in found or b"redis://" in found:
                print("BROKE", process, found)
        except OSError:
            pass
def ask(port, words):
    with socket.create_connection(("127.0.0.1", port), 10) as server:
        server.sendall(words)
        return server.recv(200)
print("valkey", ask(ports[0], b"PING\r\n"))
print("valkey", ask(ports[0], b"AUTH default\r\n"))
start = b"user\0wattshift\0database\0wattshift\0\0"
print("postgres", ask(ports[1], (8 + len(start)).to_bytes(4, "big") + (3 << 16).to_bytes(4, "big") + start)[:9])
print("environment", dict(os.environ))
print("done")
"""


def test_a_job_of_another_tenant_opens_nothing(installation: Installation) -> None:
    installation.gateway.call("POST", "/v1/tenants", body={"id": "strangers"})
    made = installation.gateway.call("POST", "/v1/keys", body={"tenant_id": "strangers", "role": "user"})
    ports = f"{installation.process('valkey').port},{installation.process('postgres').port}"
    command = ["/usr/bin/python3", "-c", LOOK, str(installation.folder), ports]
    headers = {"authorization": f"Bearer {made['secret']}"}
    with httpx.Client(base_url=installation.gateway.url, headers=headers, timeout=30) as stranger:
        job = stranger.post("/v1/jobs", json={"name": "look", "command": command}).json()["id"]
        ended = installation.wait_for_ends([job], 90)[0]
        printed = stranger.get(f"/v1/jobs/{job}/logs", params={"stream": "both"}).text

    assert (ended["state"], "done" in printed) == ("succeeded", True), printed
    assert "BROKE" not in printed
    assert printed.count("NOAUTH") == 1
    assert "WRONGPASS" in printed
    assert "postgres b'R" in printed, "it asks for a password"
    for secret in (installation.folder / "secrets").iterdir():
        assert secret.read_text().strip() not in printed
    own = int(printed.split()[1])
    running = [process.pid for process in stack.read_status(installation.folder).processes if process.pid]
    assert own not in {psutil.Process(pid).uids().real for pid in running}
    lacking = [each for node in installation.nodes() for each in node["protections"] if not each["holds"]]
    assert {"accounts", "privileges"}.isdisjoint(each["name"] for each in lacking)
