"""``wattshift lab profile inference``, live: a GPU is cut, measured by its agent, and whole again."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.integration.conftest import Installation
from tests.lab.commands.test_profile_inference import SERVER

FAMILY = {
    "family": "images",
    "health_path": "/ready",
    "request": {"path": "/infer", "body": {"x": 1}},
    "variants": [{"name": "small", "command": [sys.executable, "-c", SERVER]}],
}


def profile(installation: Installation, folder: Path, *options: str) -> list[dict[str, str]]:
    """Measure on GPU 3 of the first node; return the rows."""
    (folder / "family.json").write_text(json.dumps(FAMILY))
    command = [
        *(str(Path(sys.executable).parent / "wattshift"), "lab", "profile", "inference"),
        *("family.json", "--out", "out.csv"),
        *("--node", installation.nodes()[0]["id"], "--gpu", "3", "--seconds", "4", "--python", sys.executable),
        *options,
    ]
    environment = os.environ | {"WATTSHIFT_DATA_DIR": str(installation.folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with (folder / "out.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_variant_is_measured_on_a_slice_of_a_simulated_gpu(installation: Installation, tmp_path: Path) -> None:
    (row,) = profile(installation, tmp_path, "--slices", "2g")
    assert (row["gpu"], row["sm_percent"]) == ("simulated A100-SXM4-40GB", "28")
    assert int(row["requests"]) > 1
    # A job that reports no load counts as busy to 90 %, and holds two of the seven sevenths.
    assert abs(float(row["gpu_power_w"]) - (55 + 345 * 0.9 * 2 / 7)) < 8
    gpu = installation.nodes()[0]
    assert not any(device["mig_enabled"] for device in gpu["devices"] if "mig_enabled" in device)
    assert [each["state"] for each in gpu["partitions"] if each["gpu"] == 3] == ["applied"]
    assert not list(tmp_path.glob("*.state"))


def test_two_instances_are_measured_at_once_on_slices_of_one_gpu(installation: Installation, tmp_path: Path) -> None:
    rows = profile(installation, tmp_path, "--shared", "--mixes", "3g+2g")
    assert [(row["sm_percent"], row["concurrent_instances"]) for row in rows] == [("43", "43+28"), ("28", "43+28")]
    assert all(int(row["requests"]) > 1 for row in rows)
    assert all(abs(float(row["gpu_power_w"]) - (55 + 345 * 0.9 * 5 / 7)) < 20 for row in rows), "both were at work"
    assert not list(tmp_path.glob("*.state"))
