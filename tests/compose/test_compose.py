"""The files of compose as an operator runs them: built, healthy, killed in the middle, upgraded, two of everything.

One installation goes through it all, test by test; `./test --live tests/compose` runs it. It takes a Docker engine, or
root of a Debian that can start one; else it is skipped, with what is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.standalone.processes import SERVICES, WORKERS
from tests.compose.engine import Engine, an_engine
from tests.support.ports import Ports
from tests.support.servers import ROOT

pytestmark = [pytest.mark.live, pytest.mark.xdist_group("compose"), pytest.mark.timeout(3000)]
TAG, NEXT = "tests", "tests-next"
AT_MOST_MB = {"wattshift": 600, "wattshift-agent": 300}
BOTH = ("docker-compose.yml", "deploy/compose.nodes.yml")
PAIRS = ("docker-compose.yml", "deploy/compose.ha.yml")
ENDED = {"succeeded", "failed", "cancelled"}


@dataclass
class Project:
    """An installation of containers, from files in a folder of its own."""

    engine: Engine
    folder: Path
    name: str
    files: Sequence[str]
    environment: dict[str, str]
    accepted: dict[str, str] = field(default_factory=dict[str, str])  #: Jobs by idempotency key

    def compose(self, *words: str) -> str:
        """Run compose on the files, with the two simulated nodes."""
        files = [word for file in self.files for word in ("--file", file)]
        environment = {**self.environment, "COMPOSE_PROFILES": "simulated"}
        return self.engine.compose(self.folder, "--project-name", self.name, *files, *words, env=environment)

    def up(self) -> None:
        """Start it, or what has changed of it, and wait until every container is well."""
        self.compose("up", "--no-build", "--detach")
        self.wait_until_well()

    def containers(self) -> dict[str, dict[str, Any]]:
        """Return what the engine knows of each container, by name."""
        found = self.engine.docker(
            "ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.project={self.name}"
        )
        known = json.loads(self.engine.docker("inspect", *found.split())) if found else []
        return {each["Name"].removeprefix("/"): each for each in known}

    def of(self, service: str) -> list[str]:
        """Return the containers of a service."""
        label = "com.docker.compose.service"
        return [name for name, each in self.containers().items() if each["Config"]["Labels"][label] == service]

    def unwell(self) -> dict[str, str]:
        """Return the containers that are not as they should be, and how they are."""
        states = {name: each["State"] for name, each in self.containers().items()}
        return {
            name: state.get("Health", state).get("Status", "") + str(state["ExitCode"])
            for name, state in states.items()
            if state.get("Health", {}).get("Status") != "healthy"
            and not (state["Status"] == "exited" and state["ExitCode"] == 0)
        }

    def wait_until_well(self, within_s: float = 600) -> None:
        """Return once every container is healthy, and what is to end has ended well.

        Raises:
            AssertionError: They are not, in time: with the last lines of those.
        """
        until = time.monotonic() + within_s
        while unwell := self.unwell():
            lines = {name: self.engine.docker("logs", "--tail", "5", name) for name in unwell}
            assert time.monotonic() < until, (unwell, lines)
            time.sleep(2)

    def kill(self, container: str) -> None:
        """Kill its processes as the kernel would: `docker kill` would count as an operator's stop."""
        if pid := self.engine.pid(container):
            os.kill(pid, signal.SIGKILL)

    @property
    def http(self) -> httpx.Client:
        """A client with the first admin key, by the first gateway that answers.

        Raises:
            httpx.TransportError: None does, or admission cannot be asked for the key.
        """
        keys = [self.engine.docker("exec", name, "cat", "admin.key", check=False) for name in self.of("admission")]
        for port in self.environment["WATTSHIFT_PORT"].split("-"):
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=20).raise_for_status()
                if any(keys):
                    headers = {"authorization": f"Bearer {max(keys)}"}
                    return httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=20)
        raise httpx.TransportError("no gateway answers")

    def submit(self, key: str, command: Sequence[str]) -> None:
        """Submit a job until it is accepted, under one key, as a client does while there are faults."""
        spec = {"name": key, "command": list(command)}
        until = time.monotonic() + 300
        while key not in self.accepted:
            assert time.monotonic() < until, f"{key} was never accepted"
            with contextlib.suppress(httpx.TransportError), self.http as http:
                answer = http.post("/v1/jobs", json=spec, headers={"idempotency-key": key})
                if answer.status_code < 500:
                    self.accepted[key] = answer.raise_for_status().json()["id"]
                    return
            time.sleep(1)

    def jobs(self) -> dict[str, dict[str, Any]]:
        """Return all accepted jobs, by key."""
        with self.http as http:
            return {key: http.get(f"/v1/jobs/{id_}").raise_for_status().json() for key, id_ in self.accepted.items()}

    def ended(self, within_s: float = 400) -> dict[str, dict[str, Any]]:
        """Return all accepted jobs once they have ended."""
        until = time.monotonic() + within_s
        jobs: dict[str, dict[str, Any]] = {}
        while not jobs or any(job["state"] not in ENDED for job in jobs.values()):
            assert time.monotonic() < until, {key: (job["state"], job.get("reason")) for key, job in jobs.items()}
            time.sleep(2)
            with contextlib.suppress(httpx.HTTPError):
                jobs = self.jobs()
        return jobs

    def all_is_right(self) -> None:
        """Check that each accepted job is there once and succeeded, and that the ledger holds."""
        assert Counter(job["state"] for job in self.ended().values()) == {"succeeded": len(self.accepted)}
        with self.http as http:
            known = Counter(job["name"] for job in http.get("/v1/jobs", params={"limit": 500}).json()["items"])
            assert known == Counter(list(self.accepted))
            until = time.monotonic() + 120
            while not (found := http.get("/v1/invariants").json())["holds"]:
                assert time.monotonic() < until, [each for each in found["invariants"] if not each["holds"]]
                time.sleep(3)

    def down(self) -> None:
        """Remove it with its data."""
        self.compose("down", "--volumes", "--timeout", "5", "--remove-orphans")


def outcome(job: dict[str, Any]) -> dict[str, Any]:
    """Return what never changes of a job that has ended; energy may still arrive."""
    return {name: job[name] for name in ("id", "state", "submitted_at", "started_at", "ended_at", "exit_code", "spec")}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with an_engine() as found:
        for extra, image in (("control", "wattshift"), ("agent", "wattshift-agent")):
            found.build(extra, f"{image}:{TAG}")
        yield found


@pytest.fixture(scope="module")
def settings(engine: Engine) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder with the files and new secrets, and the environment that names images and ports."""
    ports = Ports()
    environment = {
        "WATTSHIFT_TAG": TAG,
        "POSTGRES_IMAGE": engine.image("postgres:18", "postgres"),
        "VALKEY_IMAGE": engine.image("valkey/valkey:9", "valkey"),
        "WATTSHIFT_NODES_BIND": "127.0.0.1",
        **{
            name: str(ports.take(first))
            for name, first in (
                ("WATTSHIFT_PORT", 28_000),
                ("WATTSHIFT_ROUTER_PORT", 28_050),
                ("WATTSHIFT_TELEMETRY_PORT", 28_060),
                ("WATTSHIFT_VALKEY_PORT", 26_379),
            )
        },
    }
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        folder.chmod(0o755)
        for part in ("deploy", "services/kit"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "docker-compose.yml", folder)
        subprocess.run([sys.executable, folder / "deploy" / "make_env.py"], check=True)
        ports.release()
        yield folder, environment


@pytest.fixture(scope="module")
def project(engine: Engine, settings: tuple[Path, dict[str, str]]) -> Iterator[Project]:
    folder, environment = settings
    made = Project(engine, folder, f"wattshift-tests-{os.getpid()}", BOTH, dict(environment))
    try:
        made.up()
        yield made
    finally:
        made.down()


def test_images_are_as_small_as_is_said(engine: Engine) -> None:
    sizes = {image: engine.size_mb(f"{image}:{TAG}") for image in AT_MOST_MB}
    assert all(sizes[image] < most for image, most in AT_MOST_MB.items()), sizes


def test_every_container_is_well_and_a_job_runs_to_its_end(project: Project) -> None:
    services = {each["Config"]["Labels"]["com.docker.compose.service"] for each in project.containers().values()}
    wanted = {service.name for service in SERVICES} | {
        *WORKERS,
        "postgres",
        "valkey",
        "migrations",
        "agent-1",
        "agent-2",
    }
    assert services == wanted
    project.submit("first", ["python", "-c", "print('ran')"])
    project.all_is_right()
    port = project.environment["WATTSHIFT_TELEMETRY_PORT"]
    assert httpx.get(f"http://127.0.0.1:{port}/healthz").is_success, "nodes of other hosts reach telemetry"


def test_killing_containers_loses_nothing_and_does_nothing_twice(project: Project) -> None:
    pairs = [("scheduler", "agent-1"), ("postgres", "gateway"), ("valkey", "agent-2"), ("admission", "telemetry")]
    random.Random(8).shuffle(pairs)
    for number, pair in enumerate(pairs):
        project.submit(f"before-{number}", ["python", "-c", "import time; time.sleep(5)"])
        for service in pair:
            (container,) = project.of(service)
            project.kill(container)
        project.submit(f"after-{number}", ["true"])
    project.wait_until_well()
    project.all_is_right()
    restarts = {name: each["RestartCount"] for name, each in project.containers().items()}
    assert all(restarts[name] for pair in pairs for service in pair for name in project.of(service)), restarts


def test_an_upgrade_keeps_what_was_there(project: Project) -> None:
    """Another image in place of the one that runs: the same code, which is all that one checkout has."""
    for image in AT_MOST_MB:
        project.engine.docker("tag", f"{image}:{TAG}", f"{image}:{NEXT}")
    before = project.ended()
    project.submit("over-the-upgrade", ["python", "-c", "import time; time.sleep(20)"])
    project.environment["WATTSHIFT_TAG"] = NEXT
    project.up()
    images = {each["Config"]["Image"] for each in project.containers().values()}
    assert {image for image in images if image.startswith("wattshift:")} == {f"wattshift:{NEXT}"}
    after = project.ended()
    assert {key: outcome(after[key]) for key in before} == {key: outcome(job) for key, job in before.items()}
    project.submit("after-the-upgrade", ["true"])
    project.all_is_right()


def test_two_of_everything_go_on_when_one_of_each_is_killed(
    engine: Engine, settings: tuple[Path, dict[str, str]]
) -> None:
    """PostgreSQL and Valkey are outside: two containers that compose does not know, at an address of the host."""
    folder, environment = settings
    name = f"wattshift-tests-pairs-{os.getpid()}"
    given = dict(line.split("=", 1) for line in (folder / ".env").read_text().splitlines())
    outside = [f"{name}-postgres", f"{name}-valkey"]
    engine.docker("network", "create", name)
    host = engine.docker("network", "inspect", name, "--format", "{{(index .IPAM.Config 0).Gateway}}")
    ports = Ports()
    postgres, valkey, router = ports.take(25_432), ports.take(26_380), ports.take(28_051)
    first = next(
        port for port in range(28_100, 29_000, 2) if ports.take(port) == port and ports.take(port + 1) == port + 1
    )
    ports.release()
    configuration = folder / "outside.conf"
    configuration.write_text(f"requirepass {given['VALKEY_PASSWORD']}\n{(folder / 'valkey-users.conf').read_text()}")
    secrets = [
        f"{variable}={value}"
        for variable, value in {
            "POSTGRES_USER": "wattshift",
            "POSTGRES_DB": "wattshift",
            "POSTGRES_PASSWORD": given["POSTGRES_PASSWORD"],
        }.items()
    ]
    project = Project(
        engine,
        folder,
        name,
        PAIRS,
        {
            **environment,
            "WATTSHIFT_POSTGRES": f"{host}:{postgres}/wattshift?target_session_attrs=read-write",
            "WATTSHIFT_VALKEY": f"{host}:{valkey}/0",
            "WATTSHIFT_PORT": f"{first}-{first + 1}",
            "WATTSHIFT_ROUTER_PORT": str(router),
        },
    )
    try:
        engine.docker(
            "run",
            "--detach",
            "--network",
            name,
            "--name",
            outside[0],
            "--publish",
            f"{host}:{postgres}:5432",
            *(word for secret in secrets for word in ("--env", secret)),
            environment["POSTGRES_IMAGE"],
            "postgres",
            "-c",
            "max_connections=300",
        )
        engine.docker(
            "run",
            "--detach",
            "--network",
            name,
            "--name",
            outside[1],
            "--publish",
            f"{host}:{valkey}:6379",
            "--volume",
            f"{configuration}:/outside.conf:ro",
            environment["VALKEY_IMAGE"],
            "valkey-server",
            "/outside.conf",
        )
        project.up()
        assert {
            service: len(project.of(service)) for service in ("gateway", "admission", "scheduler", "telemetry")
        } == {"gateway": 2, "admission": 2, "scheduler": 2, "telemetry": 1}
        project.submit("first-of-two", ["true"])
        for service in ("scheduler", "gateway", "admission"):
            for container in project.of(service)[:1]:
                project.submit(f"before-{container}", ["python", "-c", "import time; time.sleep(3)"])
                project.kill(container)
                project.submit(f"after-{container}", ["true"])
        project.wait_until_well()
        project.all_is_right()
    finally:
        project.down()
        engine.docker("rm", "--force", "--volumes", *outside, check=False)
        engine.docker("network", "rm", name)
