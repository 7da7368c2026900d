"""What a job of another tenant finds on a whole installation: nothing that opens it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import httpx
import psutil
import pytest

from services.standalone import stack
from tests.integration.conftest import Installation

pytestmark = [pytest.mark.live, pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")]

LOOK = r"""
import ctypes, os, pathlib, socket, sys
data, sockets, name = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
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
for folder in (sockets, sockets / "postgres"):
    try:
        print("BROKE", folder, os.listdir(folder))
    except OSError:
        pass
library = ctypes.CDLL(None)
if library.shmget(int(name), 0, 0) >= 0:
    print("BROKE a segment of the host")
print("made", library.shmget(int(name) + 1, 4096, 0o1666) >= 0)
for space in ("/tmp", "/var/tmp", "/dev/shm"):
    try:
        print("BROKE", space, (pathlib.Path(space) / name).read_text())
    except OSError:
        pass
    (pathlib.Path(space) / (name + "-left")).write_text("left")
    disk = os.statvfs(space)
    print("room", disk.f_blocks * disk.f_frsize)
for path in sys.argv[4:]:
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(path)
            print("BROKE", path)
        except PermissionError:
            print("closed", path)
for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]:
    _, local, _, state, *_ = line.split()
    if state == "0A":
        port = int(local.partition(":")[2], 16)
        print("listens", port)
        try:
            socket.create_connection(("127.0.0.1", port), 1)
            print("reached", port)
        except OSError:
            pass
print("environment", dict(os.environ))
print("done")
"""


def test_a_job_of_another_tenant_opens_nothing(installation: Installation) -> None:
    installation.gateway.call("POST", "/v1/tenants", body={"id": "strangers"})
    made = installation.gateway.call("POST", "/v1/keys", body={"tenant_id": "strangers", "role": "user"})
    found = stack.read_status(installation.folder)
    paths = [process.socket for process in found.processes if process.socket]
    key, spaces = os.getpid() + 0x57A0000, [Path(space) for space in ("/tmp", "/var/tmp", "/dev/shm")]
    segment = ctypes.CDLL(None).shmget(key, 4096, 0o1666)
    for space in spaces:
        (space / str(key)).write_text("of the host")
    command = ["/usr/bin/python3", "-c", LOOK, str(installation.folder), found.sockets, str(key), *paths]
    headers = {"authorization": f"Bearer {made['secret']}"}
    with httpx.Client(base_url=installation.gateway.url, headers=headers, timeout=30) as stranger:
        job = stranger.post("/v1/jobs", json={"name": "look", "command": command}).json()["id"]
        ended = installation.wait_for_ends([job], 90)[0]
        printed = stranger.get(f"/v1/jobs/{job}/logs", params={"stream": "both"}).text

    ctypes.CDLL(None).shmctl(segment, 0, None)
    for space in spaces:
        (space / str(key)).unlink()
    assert (ended["state"], "done" in printed) == ("succeeded", True), printed
    assert "BROKE" not in printed
    assert [line.split()[1] for line in printed.splitlines() if line.startswith("closed")] == paths
    assert {Path(path).name for path in paths} >= {"valkey.sock", ".s.PGSQL.5432"}
    lacking = [each for node in installation.nodes() for each in node["protections"] if not each["holds"]]
    assert {"accounts", "privileges"}.isdisjoint(each["name"] for each in lacking)
    public = {str(process.port) for process in found.processes if process.port}
    assert public <= {line.split()[1] for line in printed.splitlines() if line.startswith("listens")}, "it looked"
    if "network" not in {each["name"] for each in lacking}:
        doors = {str(process.port) for process in found.processes if process.name in ("gateway", "router")}
        reached = {line.split()[1] for line in printed.splitlines() if line.startswith("reached")}
        progress = {port for port in reached - doors if _serves_progress(int(port))}
        assert (doors <= reached, reached - doors - progress) == (True, set())
        assert len(progress) == 1, "that of its own node"
    for secret in (installation.folder / "secrets").iterdir():
        assert secret.read_text().strip() not in printed
    own = int(printed.split()[1])
    running = [process.pid for process in found.processes if process.pid]
    assert own not in {psutil.Process(pid).uids().real for pid in running}
    if "temporary_space" not in {each["name"] for each in lacking}:
        assert "made True" in printed
        assert str(key + 1) not in Path("/proc/sysvipc/shm").read_text().split()
        assert [space for space in spaces if (space / f"{key}-left").exists()] == []
        rooms = {int(line.split()[1]) for line in printed.splitlines() if line.startswith("room")}
        assert len(rooms) == 1, "one file system is all three"
        assert 0 < rooms.pop() < psutil.virtual_memory().total / 2


def _serves_progress(port: int) -> bool:
    answer = httpx.get(f"http://127.0.0.1:{port}/healthz")
    return answer.status_code == 404 and "operation at this port" in answer.text
