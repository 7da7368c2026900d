"""``wattshift submit --upload --secret`` and ``wattshift exec`` into that job, from the command line to the node."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.commands import CliError
from tests.integration.conftest import Installation
from tests.support.servers import ROOT, wait_until

TRAIN = "echo data >> made; cat data.txt; echo has $(ls -A); while :; do sleep 0.1; done"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a person, with files that are not to travel."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.sh").write_text(TRAIN)
    (tmp_path / "src" / "data.txt").write_text("1 2 3\n")
    (tmp_path / "src" / "big.bin").write_bytes(os.urandom(1_000))
    (tmp_path / ".gitignore").write_text("*.bin\n")
    return tmp_path


def wattshift(installation: Installation, folder: Path, *words: str) -> str:
    """Run a command in the folder; return what it prints."""
    environment = {
        **os.environ,
        "WATTSHIFT_URL": installation.gateway.url,
        "WATTSHIFT_API_KEY": (installation.folder / "admin.key").read_text().strip(),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "services.cli.main", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_job_runs_in_uploaded_files_and_commands_in_it_have_its_secrets(
    installation: Installation, folder: Path
) -> None:
    value = secrets.token_hex(20)
    installation.gateway.call("PUT", "/v1/secrets/UPLOADED", body={"value": value})
    job_id = wattshift(
        installation,
        folder,
        *("submit", "--upload", ".", "--workdir", "src", "--secret", "UPLOADED=TOKEN", "--grace", "1s"),
        *("--secret-file", "UPLOADED=token", "--", "sh", "train.sh"),
    ).strip()
    try:
        installation.wait_for(job_id, lambda job: job["state"] == "running")
        wait_until(lambda: "has" in installation.gateway.text(f"/v1/jobs/{job_id}/logs").text)
        look = 'pwd; printf %s "$TOKEN" | sha256sum; sha256sum < $WATTSHIFT_SECRETS_DIR/token; cat data.txt'
        said = wattshift(installation, folder, "exec", job_id, "--", "sh", "-c", look).splitlines()
    finally:
        with contextlib.suppress(CliError):
            installation.gateway.call("POST", f"/v1/jobs/{job_id}/cancel")
    installation.wait_for_ends([job_id], 60)

    assert installation.gateway.text(f"/v1/jobs/{job_id}/logs").text == "1 2 3\nhas data.txt made train.sh\n"
    assert not (folder / "src" / "made").exists()
    hashed = hashlib.sha256(value.encode()).hexdigest()
    assert said[1:] == [f"{hashed}  -", f"{hashed}  -", "1 2 3"]
    unpacked = Path(said[0])
    assert folder not in (unpacked, *unpacked.parents)
    wait_until(lambda: not unpacked.exists())
    assert value not in json.dumps(installation.gateway.get("/v1/audit"))
