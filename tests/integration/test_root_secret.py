"""The root secret is replaced while requests are answered and a job runs; what the old one signed is then refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from services.contracts.identity import Identity, Role
from services.kit.credentials import Credential
from services.kit.tokens import outgoing
from services.standalone import root_secret, stack
from services.standalone.data_folder import DataFolder
from tests.integration.conftest import UNUSED, Installation
from tests.integration.test_kills import a_spec
from tests.support.servers import ROOT, scratch_folder, wait_until

OPERATOR = Identity(tenant_id="default", role=Role.OPERATOR, key_id="key")


@pytest.fixture
def installation() -> Iterator[Installation]:
    with scratch_folder() as folder:
        made = Installation(folder / "data", without=UNUSED)
        made.up()
        yield made
        made.down()


def answer(installation: Installation, root: str) -> int:
    """Return what telemetry answers to a gateway whose credential follows from this secret."""
    credential = Credential.derived("gateway", (root.encode(),))
    at = httpx.HTTPTransport(uds=str(stack.read_status(installation.folder).socket_of("telemetry")))
    headers = outgoing(credential, "telemetry").headers(OPERATOR)
    with httpx.Client(transport=at, base_url="http://telemetry", headers=headers) as client:
        return client.get("/v1/nodes").status_code


@contextmanager
def asking(installation: Installation) -> Iterator[Counter[int]]:
    """Ask through the gateway without a pause; 0 counts those that found nobody."""
    found: Counter[int] = Counter()
    over = threading.Event()
    gateway = installation.gateway
    headers = {"authorization": f"Bearer {(installation.folder / 'admin.key').read_text().strip()}"}
    url = stack.read_status(installation.folder).gateway_url

    def ask() -> None:
        while not over.wait(0.05):
            try:
                found[httpx.get(f"{url}/v1/nodes", headers=headers, timeout=30).status_code] += 1
            except httpx.TransportError:
                found[0] += 1

    assert gateway
    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def command(installation: Installation, *words: str) -> subprocess.Popen[bytes]:
    given = [sys.executable, "-m", "services.cli.main", "rotate-secret", *words, "--data-dir", str(installation.folder)]
    return subprocess.Popen(given, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def done(process: subprocess.Popen[bytes]) -> str:
    text = process.communicate(timeout=240)[0].decode()
    assert process.returncode == 0, text
    return text


@pytest.mark.slow
def test_the_root_secret_is_replaced_under_load(installation: Installation) -> None:
    folder = DataFolder(installation.folder)
    old = root_secret.read(folder)
    job = installation.gateway.call("POST", "/v1/jobs", body=a_spec(1, 1_200))["id"]
    installation.wait_for(job, lambda found: found["state"] == "running")
    assert answer(installation, old) == 200

    with asking(installation) as answers:
        killed = command(installation)
        wait_until(lambda: (installation.folder / "secrets" / root_secret.NEXT).exists())
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        assert root_secret.read(folder).split(",")[0] == old, "the old one signs until all know the new one"
        assert "until --finish" in done(command(installation))
        new, accepted = root_secret.read(folder).split(",")
        assert accepted == old
        assert (answer(installation, old), answer(installation, new)) == (200, 200)
        before = answers[200]
        assert "no more" in done(command(installation, "--finish"))
        time.sleep(1)
        assert answers[200] > before
        assert (answer(installation, old), answer(installation, new)) == (401, 200)

    assert not {401, 403} & set(answers), f"nobody was taken for a stranger: {answers}"
    assert installation.gateway.text(f"/v1/jobs/{job}/logs").status_code == 200, "the agent knows admission"
    assert installation.wait_for_ends([job], 120)[0]["state"] == "succeeded"
    os.kill(folder.status().pid or 0, signal.SIGKILL)
    wait_until(lambda: folder.status().state == "stopped")
    installation.gateway.close()
    installation.up()
    assert (answer(installation, old), answer(installation, new)) == (401, 200)
