"""An application, live: its GPUs are cut anew under load, with two router processes before it and agents killed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.cli.commands import CliError
from services.contracts.apps import AppSpec
from tests.integration.conftest import Installation
from tests.support.servers import ROOT, scratch_folder, wait_until

H200 = "H200-SXM-141GB"
SERVER = [sys.executable, str(ROOT / "examples" / "apps" / "variant_server.py"), "--slower", "10", "--load-s", "0"]
CLIENTS = 5
LATE_MS = 60_000.0
"""A limit of latency that a busy machine keeps, so that plans follow from what the test asks for alone."""


def a_spec(carbon_weight: float) -> dict[str, Any]:
    """Return an application that is all accuracy on whole GPUs at 0, and all frugality on the smallest slices at 1."""
    profiles = {"b7": ("7g", 60.7, 138.0, 84.6), "b1": ("1g", 25.2, 17.1, 78.4)}
    variants = [
        {
            "name": name,
            "accuracy_pct": accuracy,
            "command": SERVER,
            "profiles": [{"slice": size, "service_ms": service_ms, "busy_w": watts}],
        }
        for name, (size, service_ms, watts, accuracy) in profiles.items()
    ]
    terms = {"fleet": "images", "variants": variants, "sla_p95_ms": LATE_MS, "requests_per_s": 20}
    probes = {"health_path": "/v2/health/ready", "load_path": None, "drain_min_s": 1, "grace_s": 2}
    return terms | {"carbon_weight": carbon_weight, "min_interval_s": 1, "repartition": "any_time", "probes": probes}


class Photos:
    """The application, and clients that ask it all the time."""

    def __init__(self, installation: Installation) -> None:
        self.installation = installation
        self.gateway = installation.gateway
        self.url = f"http://127.0.0.1:{installation.process('router').port}"

    def put(self, carbon_weight: float) -> None:
        self.gateway.call("PUT", "/v1/apps/photos", body=a_spec(carbon_weight))

    def put_fleet(self, **changes: Any) -> None:
        self.gateway.call("PUT", "/v1/fleets/images", body={"gpus": 2, "gpu_model": H200, "zone": "GB", **changes})

    def plan(self) -> Any:
        return self.gateway.get("/v1/fleets/images")["plan"]

    def fault(self, **fault: Any) -> None:
        """Have the drivers of all nodes make an error while they cut; none without one."""
        for path in self.installation.folder.glob("nodes/*/simulated.json"):
            faults = path.with_name("simulated_faults.json")
            faults.write_text(json.dumps([fault] if fault else []))

    def gpus(self) -> list[Any]:
        return self.gateway.get("/v1/fleets/images")["gpus"]

    def running(self) -> set[tuple[str, str]]:
        """Return variants and slices of the instances that are ready, if nothing else is alive."""
        found = self.gateway.get("/v1/apps/photos/instances")["items"]
        return {(each["variant"], each["slice"]) for each in found if each["state"] == "ready"} if found else set()

    def is_settled(self, *running: tuple[str, str]) -> bool:
        plan = self.gateway.get("/v1/fleets/images").get("plan")
        return self.running() == set(running) and (plan is None or plan["state"] == "applied")

    def saved_pct(self) -> float | None:
        return self.gateway.get("/v1/apps/photos/report", hours=0.02, step_s=10)["carbon_saving_pct"]

    @contextmanager
    def asked(self) -> Iterator[Counter[str]]:
        """Have clients ask all the time; the answers by variant, and whatever else they got, are counted."""
        found: Counter[str] = Counter()
        is_over = threading.Event()

        def ask() -> None:
            with httpx.Client(base_url=self.url, headers=self.headers, timeout=120) as http:
                while not is_over.is_set():
                    try:
                        answer = http.post("/v2/models/photos/infer", json=INFERENCE)
                    except httpx.HTTPError as error:
                        found[repr(error)] += 1
                        continue
                    is_right = answer.status_code == 200 and answer.json()["parameters"][
                        "variant"
                    ] == answer.headers.get("x-wattshift-variant")
                    found[
                        answer.headers["x-wattshift-variant"] if is_right else f"{answer.status_code} {answer.text}"
                    ] += 1

        threads = [threading.Thread(target=ask) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield found
        finally:
            is_over.set()
            for thread in threads:
                thread.join()

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {(self.installation.folder / 'admin.key').read_text().strip()}"}


INFERENCE = {"inputs": [{"name": "image", "datatype": "FP32", "shape": [1, 1], "data": [0.5]}]}


@pytest.fixture(scope="module")
def photos() -> Iterator[Photos]:
    with scratch_folder() as folder:
        made = Installation(
            *(folder / "data", f"1x1:{H200}@GB,1x1:{H200}@GB"),
            **{
                "CARBON_ZONES": "GB",
                "CARBON_REPLAY_SPEED": "1",
                "SERVING_INSTANCE_LOOK_S": "0.3",
                "SERVING_FLEET_CUT_S": "30",
                "SERVING_FLEET_RETRY_S": "3",
                "GPU_AGENT_PARTITION_RETRY_S": "0.5",
                "ROUTER_WORKERS": "2",
            },
        )
        made.up()
        found = Photos(made)
        found.put_fleet()
        found.put(0)
        wait_until(lambda: found.is_settled(("b7", "7g")), 180)
        wait_until(lambda: httpx.get(f"{found.url}/v2/models/photos/ready", headers=found.headers).status_code == 200)
        yield found
        made.down()


def test_no_request_is_lost_while_gpus_are_cut_anew_and_agents_and_serving_are_killed(photos: Photos) -> None:
    with photos.asked() as answers:
        wait_until(lambda: answers["b7"] > 20)
        wait_until(lambda: photos.saved_pct() is not None)
        wait_until(lambda: abs(photos.saved_pct() or 0) < 30, 120)  # it runs BASE, which saves nothing against itself
        photos.put(1)
        changing: list[str] = []

        def is_being_cut() -> bool:
            changing[:] = [gpu["node_id"] for gpu in photos.gpus() if gpu["sizes"] != gpu["wanted"]]
            return bool(changing)

        wait_until(is_being_cut, 120)
        photos.installation.kill("serving")
        wait_until(lambda: photos.is_settled(("b1", "1g")), 240)
        wait_until(lambda: answers["b1"] > 20)
        assert any(len(gpu["sizes"]) == 7 for gpu in photos.gpus())

        photos.put(0)
        wait_until(is_being_cut, 120)
        photos.installation.kill(f"agent-{changing[0]}")
        wait_until(lambda: photos.is_settled(("b7", "7g")), 240)
        before = answers["b7"]
        wait_until(lambda: answers["b7"] > before + 20)
    assert set(answers) == {"b7", "b1"}, json.dumps(answers)


def test_what_the_page_asks_is_answered(photos: Photos) -> None:
    page = (ROOT / "docs" / "apps.md").read_text()
    lines = [line.partition("#")[0].strip() for line in re.findall(r"^wattshift .*$", page, re.MULTILINE)]
    asked = [shlex.split(line.replace(" edge", " images")) for line in lines]
    asked = [words for words in asked if words[2] in ("show", "plans", "report", "list")]
    assert len({(words[1], words[2]) for words in asked}) == 4
    program = str(Path(sys.executable).with_name("wattshift"))
    environment = os.environ | {"WATTSHIFT_DATA_DIR": str(photos.installation.folder)}
    for words in asked:
        found = subprocess.run(
            [program, *words[1:]], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert found.returncode == 0, (words, found.stderr)
        assert found.stdout.strip(), words


def test_the_specs_of_the_page_are_specs() -> None:
    page = (ROOT / "docs" / "apps.md").read_text()
    (document,) = re.findall(r"^```json\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert AppSpec.model_validate_json(document).fleet == "edge"
    for name, rate in re.findall(r"apps set (\w+) examples\S+ +# (\d+) requests/s", page):
        spec = json.loads((ROOT / "examples" / "apps" / f"{name}.json").read_text())
        assert spec["requests_per_s"] == int(rate), name
        assert f" {name}={rate}" in page


@pytest.mark.slow
def test_a_driver_that_says_busy_is_asked_again_and_given_up_while_traffic_goes_on(photos: Photos) -> None:
    with photos.asked() as answers:
        photos.fault(step="create", outcome="busy", times=2)
        photos.put(1)
        wait_until(lambda: photos.is_settled(("b1", "1g")), 240)
        left = [
            json.loads(path.read_bytes()) for path in photos.installation.folder.glob("nodes/*/simulated_faults.json")
        ]
        assert any(not entry["times"] for entries in left for entry in entries), "nobody said busy"

        photos.fault(step="destroy", outcome="busy")
        photos.put(0)
        wait_until(lambda: photos.plan()["state"] == "failed", 240)
        plan = photos.plan()
        assert re.search(r"could not be cut into one whole GPU: .*In use by another client", plan["detail"]), plan
        assert any(len(gpu["sizes"]) == 7 for gpu in photos.gpus()), "the GPU has its slices as before"
        before = answers.total()
        wait_until(lambda: answers.total() > before + 50)

        photos.fault()
        wait_until(lambda: photos.is_settled(("b7", "7g")), 240)  # by itself
    assert set(answers) == {"b7", "b1"}, json.dumps(answers)


@pytest.mark.slow
def test_a_search_by_measurement_finds_a_configuration_and_no_request_is_lost(photos: Photos) -> None:
    with photos.asked() as answers:
        photos.put_fleet(evaluation="measured", evaluation_s=5, search_s=60)
        photos.put(1)
        wait_until(lambda: photos.plan()["state"] == "measuring", 120)
        photos.installation.kill("serving")
        wait_until(lambda: [gpu for gpu in photos.gpus() if gpu["sizes"] != gpu["wanted"]] != [], 120)
        photos.installation.kill(f"agent-{photos.gpus()[0]['node_id']}")

        def is_over() -> bool:
            plan = photos.plan()
            return plan["state"] == "applied" and plan["search"] is not None and plan["search"]["evaluations"][1:]

        wait_until(is_over, 420)
        plan = photos.plan()
        of_photos = [each["applications"][0] for each in plan["search"]["evaluations"]]
        assert of_photos[0]["instances"][0]["variant"] == "b7"
        measured = [each for each in of_photos if each["measured"]]
        assert [each for each in measured if each["is_tried"]]
        assert all(each["answered"] >= 20 for each in measured)
        best = max(measured, key=lambda each: each["measured"]["objective_pct"])
        assert plan["applications"][0]["instances"] == best["instances"]
        shown = photos.gateway.get("/v1/apps/photos")
        assert sorted(map(str, shown["running"])) == sorted(map(str, best["instances"]))
        report = photos.gateway.get("/v1/apps/photos/report", hours=1, step_s=60)["evaluations"]
        assert report["evaluations"] >= len(measured)
        assert report["energy_error_pct"] is not None
    assert set(answers) <= {"b7", "b1"}, json.dumps(answers)
    photos.put_fleet()


def test_what_answered_is_in_the_ledger_by_variant(photos: Photos) -> None:
    with photos.asked() as answers:
        wait_until(lambda: sum(answers.values()) >= 20)

    def requests() -> dict[str, int]:
        found = photos.gateway.get("/v1/reports/requests", group_by="class")
        return {line["group"]: line["requests"] for line in found["lines"]}

    wait_until(lambda: requests().get("b7", 0) > 0 and requests().get("b1", 0) > 0, 120)


def test_a_deleted_application_answers_no_more(photos: Photos) -> None:
    photos.gateway.call("DELETE", "/v1/apps/photos")

    def is_gone() -> bool:
        try:
            photos.gateway.get("/v1/apps/photos")
        except CliError:
            return True
        return False

    wait_until(is_gone, 120)
    wait_until(lambda: httpx.post(f"{photos.url}/v2/models/photos/infer", headers=photos.headers).status_code == 404)
