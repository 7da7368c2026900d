"""``wattshift profile inference``, live: a GPU is cut, measured by its agent, and whole again."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.cli.test_profile_inference import SERVER
from tests.integration.conftest import Installation

FAMILY = {
    "family": "images",
    "health_path": "/ready",
    "request": {"path": "/infer", "body": {"x": 1}},
    "variants": [{"name": "small", "command": [sys.executable, "-c", SERVER]}],
}


def test_a_variant_is_measured_on_a_slice_of_a_simulated_gpu(installation: Installation, tmp_path: Path) -> None:
    (tmp_path / "family.json").write_text(json.dumps(FAMILY))
    node = installation.nodes()[0]
    command = [
        *(str(Path(sys.executable).parent / "wattshift"), "profile", "inference", "family.json", "--out", "out.csv"),
        *("--node", node["id"], "--gpu", "3", "--slices", "2g", "--seconds", "4", "--python", sys.executable),
    ]
    environment = os.environ | {"WATTSHIFT_DATA_DIR": str(installation.folder)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "out.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["gpu"], row["sm_percent"]) == ("simulated A100-SXM4-40GB", "28")
    assert int(row["requests"]) > 1
    # A job that reports no load counts as busy to 90 %, and holds two of the seven sevenths.
    assert abs(float(row["gpu_power_w"]) - (55 + 345 * 0.9 * 2 / 7)) < 8
    gpu = next(each for each in installation.nodes() if each["id"] == node["id"])
    assert not any(device["mig_enabled"] for device in gpu["devices"] if "mig_enabled" in device)
    assert [each["state"] for each in gpu["partitions"] if each["gpu"] == 3] == ["applied"]
    assert not list(tmp_path.glob("*.state"))
