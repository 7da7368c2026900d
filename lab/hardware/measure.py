"""Measure the control plane on this host's first GPU: `python -m lab.hardware.measure READINGS.json [PART ...]`.

It starts an installation that may set nothing on the device, and reads the device's own energy counter beside it:

- `training`: a job bare and under the agent: seconds per step, and what the ledger books to it;
- `stop`: the same job, held in the middle and released: the steps that it made twice, and how long the GPU was kept;
- `levels`: a model server at each number of requests at once, as `wattshift profile pool` measures it;
- `loads`: a pool of that server behind the router, at several loads: the energy that its answers state, what the ledger
  books to the server's job, and what the device counted. It takes the profile of `levels`.

Without parts it does all, in this order; with some, the file's other readings stay. Programs of jobs are copied to a
folder that their account may read. The host needs PyTorch with CUDA.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_agent.devices.nvml import NvmlDriver
from lab.hardware import plane
from services.standalone.stack import down, up

HERE = Path(__file__).parent
STEPS = 400
TRAINING = (sys.executable, "train.py", "--steps", str(STEPS))
LEVELS, LENGTHS = (1, 2, 4, 8, 16, 32, 64), (256, 128)
LOADS = (4, 32)
WARM_S, LOAD_S = 120.0, 60.0
"""Of a load, before it counts and while it does: an answer's power is that of the last two minutes."""
SETTLE_S = 8.0
"""After which the agent's last interval is in the ledger."""


def main(out: Path, *parts: str) -> None:
    """Measure, and write what was found so far after each part."""
    driver = NvmlDriver(may_probe=False)
    device = next(each for each in driver.devices() if each.index == 0)
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    found |= {"gpu": device.model, "limit_w": device.power_limit_w, "lengths": LENGTHS}

    def counted_j() -> float:
        return float(driver.read(0).energy_j or 0.0)

    folder, data = (Path(tempfile.mkdtemp(prefix=f"wattshift-{name}-")) for name in ("programs", "data"))
    for program in ("train.py", "llm_server.py"):
        shutil.copy(HERE / program, folder)
    folder.chmod(0o755)
    doing = parts or ("training", "stop", "levels", "loads")
    if "training" in doing:  # before an agent is there, which would take the GPU out of service meanwhile
        found |= {"idle": _over(counted_j, 5.0), "alone": _alone(folder, counted_j)}
    with plane.settings_of_a_guest():
        status = up(data)
    try:
        site = plane.Plane(data, str(status.gateway_url))
        for name, part in (
            ("training", lambda: _training(site, folder, counted_j)),
            ("stop", lambda: _stop(site, folder)),
            ("levels", lambda: _levels(site, folder, device.model)),
            ("loads", lambda: _loads(site, found["levels"]["spec"], folder, counted_j)),
        ):
            if name in doing:
                found[name] = part()
                out.write_text(json.dumps(found, indent=1) + "\n")
                print(name, json.dumps(found[name]), flush=True)
    finally:
        down(data)


def _over(counted_j: Callable[[], float], seconds: float) -> dict[str, float]:
    first, began_s = counted_j(), time.monotonic()
    time.sleep(seconds)
    took_s = time.monotonic() - began_s
    return {"seconds": took_s, "watts": (counted_j() - first) / took_s}


def _alone(folder: Path, counted_j: Callable[[], float]) -> dict[str, Any]:
    first = counted_j()
    environment = {"PATH": "/usr/bin:/bin", "WATTSHIFT_CHECKPOINT_DIR": tempfile.mkdtemp()}
    done = subprocess.run(TRAINING, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return {"device_j": counted_j() - first, **json.loads(done.stdout.splitlines()[-1])}


def _training(site: plane.Plane, folder: Path, counted_j: Callable[[], float]) -> dict[str, Any]:
    first, began_s = counted_j(), time.monotonic()
    job = site.submitted(folder, "--work", f"{STEPS}:steps", "--command", " ".join(TRAINING))
    ended = site.ended(job)
    device_j, took_s = counted_j() - first, time.monotonic() - began_s
    time.sleep(SETTLE_S)
    said = json.loads(site.logs(job).splitlines()[-1])
    footprint = site.asked(f"/v1/jobs/{job}")["footprint"]
    return {**said, "state": ended, "seconds": took_s, "device_j": device_j, **footprint}


def _stop(site: plane.Plane, folder: Path) -> dict[str, Any]:
    job = site.submitted(folder, "--work", f"{STEPS}:steps", "--command", " ".join(TRAINING))

    def done() -> float:
        return float((site.asked(f"/v1/jobs/{job}").get("progress") or {}).get("done") or 0.0)

    plane.wait_until(lambda: done() >= STEPS / 4, 120.0)
    began_s, before = time.monotonic(), done()
    site.command("hold", job)
    plane.wait_until(lambda: site.asked(f"/v1/jobs/{job}")["state"] == "held")
    stopped_s = time.monotonic() - began_s
    site.command("release", job)
    ended = site.ended(job)
    time.sleep(SETTLE_S)
    lives = [json.loads(line) for line in site.logs(job).splitlines() if line.startswith("{")]
    return {"state": ended, "seen_at_stop": before, "stopped_s": stopped_s, "lives": lives}


def _spec(folder: Path, model: str) -> dict[str, Any]:
    mode = {"name": "one", "gpu_model": model, "gpus": 1, "working_dir": str(folder)}
    mode |= {"command": [sys.executable, "llm_server.py"]}
    classes = [{"name": "any", "profiles": [{"mode": "one", "max_qps": 1, "power_w": 300}]}]
    return {
        "objective": "carbon",
        "models": ["made-up"],
        "places": [{"name": "here", "zone": "US-CAL-CISO"}],
        "modes": [mode],
        "partitions": [{"name": "all", "classes": classes, "assumed_qps": {"any": 1}}],
        "probes": {"ready_timeout_s": 120, "drain_timeout_s": 20},
    }


def _levels(site: plane.Plane, folder: Path, model: str) -> Any:
    file = site.folder / "pool.json"
    file.write_text(json.dumps(_spec(folder, model)))
    lengths = f"any={LENGTHS[0]},{LENGTHS[1]}"
    levels = ",".join(str(level) for level in LEVELS)
    said = ("--levels", levels, "--lengths", lengths, "--seconds", "8", "--warmup", "2", "--json")
    measured = json.loads(site.command("profile", "pool", str(file), "--python", sys.executable, *said))["measured"]
    return {"measured": measured, "spec": json.loads(file.read_text())}


def _loads(site: plane.Plane, spec: dict[str, Any], folder: Path, counted_j: Callable[[], float]) -> Any:
    spec["modes"][0] |= {"working_dir": str(folder), "command": [sys.executable, "llm_server.py"]}
    (site.folder / "chat.json").write_text(json.dumps(spec))
    site.command("pools", "set", "chat", str(site.folder / "chat.json"))
    plane.wait_until(lambda: any(each["state"] == "ready" for each in site.instances("chat")), 180.0)
    time.sleep(5.0)
    job = next(each["job_id"] for each in site.instances("chat") if each["state"] == "ready")
    readings: list[dict[str, Any]] = []
    for clients in LOADS:
        _ask(site, clients, WARM_S)
        booked, first = site.asked(f"/v1/jobs/{job}")["footprint"], counted_j()
        began_s = time.monotonic()
        answers = _ask(site, clients, LOAD_S)
        took_s = time.monotonic() - began_s
        device_j = counted_j() - first
        after = site.asked(f"/v1/jobs/{job}")["footprint"]
        readings.append(
            {
                "clients": clients,
                "seconds": took_s,
                "answers": len(answers),
                "stated_j": 3_600.0 * sum(wh for wh, _ in answers),
                "stated_gco2": sum(gco2 for _, gco2 in answers),
                "device_j": device_j,
                "booked_gpu_j": after["gpu_energy_j"] - booked["gpu_energy_j"],
                "booked_j": after["energy_j"] - booked["energy_j"],
            }
        )
    return readings


def _ask(site: plane.Plane, clients: int, seconds: float) -> list[tuple[float, float]]:
    """Return what each answer of `clients` clients states of itself, Wh and gCO2."""
    until_s = time.monotonic() + seconds
    answers: list[tuple[float, float]] = []

    def run() -> None:
        body = {"model": "made-up", "prompt": "word " * LENGTHS[0], "max_tokens": LENGTHS[1], "ignore_eos": True}
        while time.monotonic() < until_s:
            request = urllib.request.Request(
                f"{site.router_url()}/v1/completions", json.dumps(body).encode(), site.headers()
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()
                answers.append((float(answer.headers["x-wattshift-wh"]), float(answer.headers["x-wattshift-gco2"])))

    threads = [threading.Thread(target=run) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
