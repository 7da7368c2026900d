"""The Python package on both sides of a job: the client that submits it, and the helper that its program uses."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from tests.integration.conftest import Installation
from tests.support.servers import ROOT, wait_until
from wattshift import Client

ENVIRONMENT = {"PYTHONPATH": str(ROOT / "clients" / "python" / "src"), "PYTHONUNBUFFERED": "1"}
COUNT = """
from wattshift import job
for step in range(5):
    print("step", step)
    job.progress(step + 1, total=5, local_batch=8)
print("rank", job.world.rank, "of", job.world.world_size)
"""
UNTIL_STOPPED = """
import time
from wattshift import job
kept = job.checkpoint_dir / "kept"
if kept.exists():
    print("went on from", kept.read_text())
    job.progress(2, total=2)
else:
    while not job.should_checkpoint():
        job.progress(1, total=2)
        time.sleep(0.05)
    kept.write_text("the checkpoint")
"""
TUNED = """
import json, time
from wattshift import job
batch = job.batch(64, at_most=32)
seen = job.checkpoint_dir / "seen.jsonl"
with seen.open("a") as file:
    file.write(json.dumps([job.world.world_size, batch.total, batch.base, batch.passes]) + chr(10))
done = len(seen.read_text().splitlines())
while not job.should_checkpoint() and done < 2:
    job.progress(done, total=2, noise_scale=1e6)
    time.sleep(0.05)
if done == 2:
    print(seen.read_text(), end="")
    job.progress(2, total=2)
"""


@pytest.fixture
def client(installation: Installation) -> Iterator[Client]:
    """A client of the installation."""
    key = (installation.folder / "admin.key").read_text().strip()
    with Client(installation.gateway.url, key) as found:
        yield found


def test_a_job_is_followed_from_its_submission_to_its_footprint(client: Client) -> None:
    job = client.submit([sys.executable, "-c", COUNT], name="count", environment=ENVIRONMENT, work={"total": 5})
    text = "".join(client.logs(job, follow=True))
    ended = client.wait(job, timeout_s=60)

    assert text.splitlines() == [*(f"step {step}" for step in range(5)), "rank 0 of 1"]
    assert "".join(client.logs(job)) == text
    assert (ended.state, ended.exit_code) == ("succeeded", 0)
    wait_until(lambda: (done := client.job(job).progress) is not None and done.done == 5)
    wait_until(lambda: client.footprint(job).footprint.energy_j > 0)
    assert [event.type for event in client.events(job)][-1] == "job.succeeded"
    explained = client.explain(job)
    assert explained.ended is not None
    assert (explained.state, explained.ended.exit_code, explained.ended.starts) == ("succeeded", 0, 1)
    assert client.prediction(job).job_id == job.id
    assert client.policy().name
    assert len(client.nodes()) == 2


def test_a_program_that_is_stopped_saves_and_goes_on(client: Client) -> None:
    command = [sys.executable, "-c", UNTIL_STOPPED]
    job = client.submit(command, name="stopped", environment=ENVIRONMENT, work={"total": 2})
    wait_until(lambda: client.job(job).progress is not None)  # the loop runs: it listens for SIGTERM by now
    client.hold(job)
    wait_until(lambda: client.job(job).state == "held")
    client.release(job)
    ended = client.wait(job, timeout_s=60)

    assert (ended.state, ended.generation, ended.preemptions) == ("succeeded", 2, 1)
    assert "".join(client.logs(job)) == "went on from the checkpoint\n"


def test_a_program_reads_the_batch_of_each_of_its_gangs(client: Client) -> None:
    """Under ``joint``: first as one GPU, then, after a stop, as two with a larger batch."""

    def put_in_force(widest_gpus: int) -> None:
        parameters = {"widest_gpus": widest_gpus, "hour_wh": 1e5}
        # By another policy's way, so that the sizes of earlier rounds are forgotten.
        client.request("PUT", "/v1/policies/active", json={"name": "fifo"})
        client.request("PUT", "/v1/policies/active", json={"name": "joint", "parameters": parameters})

    before = client.policy()
    try:
        put_in_force(1)
        spec = {"batch": {"min": 64, "max": 1_024}, "work": {"total": 2, "unit": "epochs"}, "family": "vision"}
        command = [sys.executable, "-c", TUNED]
        job = client.submit(command, name="tuned", gpus=(1, 2), environment=ENVIRONMENT, processes="per_node", **spec)
        wait_until(lambda: client.job(job).progress is not None)
        first = client.job(job).batch_size
        client.hold(job)
        wait_until(lambda: client.job(job).state == "held")
        put_in_force(2)
        client.release(job)
        starting = wait_for_batch(client, job.id)
        ended = client.wait(job, timeout_s=60)
    finally:
        client.request("PUT", "/v1/policies/active", json={"name": before.name, "parameters": before.parameters})

    assert ended.state == "succeeded"
    seen = [json.loads(line) for line in "".join(client.logs(job)).splitlines()]
    assert [[gpus, total, base] for gpus, total, base, _ in seen] == [[1, first, 64], [2, starting, 64]]
    assert seen[1][1] > seen[0][1], "two GPUs, and the noise that the program reported, make a larger batch pay"
    assert [passes for *_, passes in seen] == [-(-total // gpus // 32) for gpus, total, *_ in seen]
    assert ended.batch_size is None, "it holds no GPUs"


def wait_for_batch(client: Client, job_id: str) -> int:
    """Return the batch that the events say the job's last gang was started with."""
    wait_until(lambda: client.job(job_id).generation == 2)
    starts = [event.data for event in client.events(job_id, follow=False) if event.type == "job.starting"]
    return starts[-1]["batch_size"]


def test_the_what_if_service_is_asked(client: Client) -> None:
    found = client.whatif(policy="fifo", jobs="green-day", carbon="GB", start="2023-08-15", days=1, timeout_s=120)

    assert (found.status, found.failure) == ("succeeded", None)
    assert isinstance(found.result, dict)
    assert found.result["jobs"] > 0
