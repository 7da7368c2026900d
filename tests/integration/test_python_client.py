"""The Python package on both sides of a job: the client that submits it, and the helper that its program uses."""

from __future__ import annotations

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


def test_the_what_if_service_is_asked(client: Client) -> None:
    found = client.whatif(policy="fifo", jobs="green-day", carbon="GB", start="2023-08-15", days=1, timeout_s=120)

    assert (found.status, found.failure) == ("succeeded", None)
    assert isinstance(found.result, dict)
    assert found.result["jobs"] > 0
