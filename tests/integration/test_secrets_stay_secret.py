"""A secret reaches its job and nothing else: no file of the installation, no answer and no log ever has its value."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from services.cli.commands import CliError
from tests.integration.conftest import Installation

LOOK = 'printf %s "$TOKEN" | sha256sum; sha256sum < $WATTSHIFT_SECRETS_DIR/token; echo $PLAIN'


@pytest.fixture(scope="module")
def value(installation: Installation) -> Iterator[str]:
    """The value of the secret TOKEN."""
    value = secrets.token_hex(20)
    installation.gateway.call("PUT", "/v1/secrets/TOKEN", body={"value": value})
    yield value
    with suppress(CliError):
        installation.gateway.call("DELETE", "/v1/secrets/TOKEN")


def files_with(installation: Installation, text: str) -> list[str]:
    """Return the files with this text among all that the installation has: database, WAL, streams, logs, state."""
    found: list[str] = []
    for top in (installation.folder, Path("/dev/shm")):
        for folder, _, names in os.walk(top, followlinks=True):
            for name in names:
                with suppress(OSError):  # it may be gone by now
                    if text.encode() in Path(folder, name).read_bytes():
                        found.append(str(Path(folder, name)))
    return found


def test_a_value_is_nowhere_but_in_the_job(installation: Installation, value: str) -> None:
    plain = secrets.token_hex(20)
    spec = {
        "name": "secretive",
        "command": ["sh", "-c", LOOK],
        "secrets": [{"name": "TOKEN", "env": "TOKEN"}, {"name": "TOKEN", "file": "token"}],
        "environment": {"PLAIN": plain, "PATH": os.environ["PATH"]},
    }
    job_id = installation.gateway.call("POST", "/v1/jobs", body=spec, key=secrets.token_hex(8))["id"]
    (job,) = installation.wait_for_ends([job_id], 60)

    printed = installation.gateway.text(f"/v1/jobs/{job_id}/logs").text
    assert job["state"] == "succeeded", job["detail"]
    assert printed.count(hashlib.sha256(value.encode()).hexdigest()) == 2
    assert files_with(installation, plain), "what is no secret is found by the same search"
    assert files_with(installation, value) == []
    for path in (f"/v1/jobs/{job_id}", "/v1/secrets", "/v1/audit", "/v1/jobs"):
        assert value not in str(installation.gateway.get(path))
    assert value not in installation.gateway.text(f"/v1/jobs/{job_id}/events").text


def test_a_value_survives_a_restart_of_everything_and_stays_sealed(installation: Installation, value: str) -> None:
    installation.kill_supervisor()
    check = f'[ "$(printf %s "$T" | sha256sum)" = "{hashlib.sha256(value.encode()).hexdigest()}  -" ]'
    spec = {"name": "again", "command": ["sh", "-c", check], "secrets": [{"name": "TOKEN", "env": "T"}]}
    job_id = installation.gateway.call("POST", "/v1/jobs", body=spec)["id"]
    (job,) = installation.wait_for_ends([job_id], 60)

    assert job["state"] == "succeeded", job["detail"]
    assert files_with(installation, value) == []


def test_a_job_whose_secret_was_deleted_fails_and_says_so(installation: Installation) -> None:
    installation.gateway.call("PUT", "/v1/secrets/GONE", body={"value": "x"})
    spec = {"name": "late", "command": ["true"], "hold": True, "secrets": [{"name": "GONE", "env": "T"}]}
    job_id = installation.gateway.call("POST", "/v1/jobs", body=spec)["id"]
    installation.gateway.call("DELETE", "/v1/secrets/GONE")
    installation.gateway.call("POST", f"/v1/jobs/{job_id}/release")
    (job,) = installation.wait_for_ends([job_id], 60)

    assert (job["state"], job["reason"]) == ("failed", "start_failed")
    assert job["detail"].startswith("The secret GONE does not exist any more.")
