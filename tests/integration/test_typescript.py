"""The TypeScript client: generated, compiled and run against a live gateway."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.conftest import Installation
from tests.support.servers import ROOT

CLIENT = ROOT / "clients" / "typescript"
OURS = ("package.json", "package-lock.json", "tsconfig.json", "src/client.ts", "examples")
RIGHT = """
import { Wattshift } from "./client.js";
const w = new Wattshift();
const job = await w.post("/v1/jobs", { body: { name: "a", command: ["true"] }, idempotencyKey: "k" });
const page = await w.get("/v1/jobs", { query: { limit: 5, state: ["running"], fields: ["id", "name"] } });
export const name: string | undefined = page.items[0]?.name;
export const logs: string = await w.get("/v1/jobs/{job_id}/logs", { path: { job_id: job.id }, query: { offset: 1 } });
await w.call("delete", "/v1/webhooks/{webhook_id}", { path: { webhook_id: "w" } });
"""
WRONG = {
    'await w.get("/v1/nothing");': "is not assignable to parameter",
    'await w.get("/v1/jobs/{job_id}");': "Expected 2 arguments",
    'await w.post("/v1/jobs", { body: { name: 5 } });': "Type 'number' is not assignable to type 'string'",
    'await w.get("/v1/jobs", { query: { limt: 5 } });': "'limt' does not exist",
    "export const wrong: number = job.id;": "Type 'string' is not assignable to type 'number'",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the client with what it is built from, compiled."""
    if shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("checkout") / "clients" / "typescript"
    (folder / "src").mkdir(parents=True)
    for name in OURS:
        copied = shutil.copytree if (CLIENT / name).is_dir() else shutil.copy
        copied(CLIENT / name, folder / name)
    described = folder.parents[1] / "deploy" / "openapi.json"
    described.parent.mkdir()
    shutil.copy(ROOT / "deploy" / "openapi.json", described)
    got = _npm(folder, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries", "1")
    if got.returncode:
        pytest.skip(f"its compiler cannot be installed here: {got.stderr.strip()[-300:]}")
    done = _npm(folder, "run", "build")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def _npm(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["npm", *words], cwd=folder, capture_output=True, text=True, timeout=500)


def _mistakes(folder: Path, text: str) -> str:
    (folder / "src" / "use.ts").write_text(text)
    done = subprocess.run(["npx", "tsc", "--noEmit"], cwd=folder, capture_output=True, text=True, timeout=300)
    (folder / "src" / "use.ts").unlink()
    return done.stdout


def test_what_the_api_does_not_have_does_not_compile(built: Path) -> None:
    assert _mistakes(built, RIGHT) == ""
    found = _mistakes(built, RIGHT + "\n".join(WRONG)).splitlines()
    lines = {number: [each for each in found if f"use.ts({number}," in each] for number in range(1, 30)}
    first = len(RIGHT.splitlines()) + 1
    for number, says in enumerate(WRONG.values(), start=first):
        assert any(says in each for each in lines[number]), (number, found)


def test_the_example_submits_follows_and_reads_a_job(built: Path, installation: Installation) -> None:
    environment = {
        **os.environ,
        "WATTSHIFT_URL": installation.gateway.url,
        "WATTSHIFT_API_KEY": (installation.folder / "admin.key").read_text().strip(),
    }
    ran = subprocess.run(
        ["node", "examples/submit.mjs"], cwd=built, env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    *events, ended, refused = ran.stdout.splitlines()
    found = json.loads(ended)
    job = installation.job(found["id"])
    assert events[0] == "job.submitted"
    assert events[-1] == "job.succeeded"
    assert (found["state"], found["output"]) == (job["state"], "trained\n")
    assert found["energy_j"] >= 0
    assert refused.startswith("422 invalid_request ")
    assert "/gpus/min" in refused
