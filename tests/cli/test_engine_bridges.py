"""`wattshift engine slurm` and `engine ray` become the bridge, with the settings that were given."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from services.cli.commands import CliError
from services.cli.main import app
from services.cli.site import engines
from services.contracts.engines import EngineMode
from services.engines.ray.settings import RaySettings
from services.engines.slurm.settings import SlurmSettings


class BecameError(Exception):
    """The process would be another program now."""


@pytest.mark.parametrize(
    ("words", "of", "expected"),
    [
        ("slurm", SlurmSettings, ("slurm", EngineMode.DRY_RUN, None)),
        ("slurm --control --name hpc --zone DE --partition a", SlurmSettings, ("hpc", EngineMode.CONTROL, "DE")),
        ("ray", RaySettings, ("ray", EngineMode.DRY_RUN, None)),
        (
            "ray --control --name head --zone FR --address http://10.0.0.1:8265",
            RaySettings,
            ("head", EngineMode.CONTROL, "FR"),
        ),
    ],
)
def test_the_bridge_reads_what_was_given(
    monkeypatch: pytest.MonkeyPatch, words: str, of: Any, expected: tuple[Any, ...]
) -> None:
    became: list[tuple[list[str], dict[str, str]]] = []

    def execve(program: str, command: list[str], environment: dict[str, str]) -> None:
        became.append((command, environment))
        raise BecameError

    monkeypatch.setattr(engines.os, "execve", execve)
    monkeypatch.setattr(engines, "local_url", lambda name: f"unix://{name}")
    monkeypatch.setattr(engines, "local_sockets", lambda: "/run/sockets")

    done = CliRunner().invoke(app, ["engine", *words.split()])

    assert isinstance(done.exception, BecameError)
    ((command, environment),) = became
    assert command[-2:] == ["-m", f"services.engines.{words.split()[0]}.app"]
    assert environment["WATTSHIFT_TELEMETRY_URL"] == "unix://telemetry"
    for name in environment.keys() - os.environ.keys() - {"WATTSHIFT_SOCKETS"}:
        monkeypatch.setenv(name, environment[name])
    read = of()
    assert (read.node_id, read.mode, read.own_zone) == expected
    if "--address" in words:
        assert read.address == "http://10.0.0.1:8265"


def test_an_answer_of_sacct_that_cannot_be_kept_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sacct").write_text("#!/bin/sh\necho JobID")
    (tmp_path / "sacct").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    words = ["engine", "slurm-history", "--start", "2026-11-01"]
    with pytest.raises(CliError, match=r"cannot write .*nowhere"):
        app([*words, "--keep", str(tmp_path / "nowhere" / "x")], standalone_mode=False)
