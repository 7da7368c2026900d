"""The tables of what was measured on one real GPU, in ``lab/results/one-gpu.md``.

    python -m lab.reproductions.one_gpu PAGE [READINGS]

READINGS is a file that ``lab.hardware.measure`` has written; without one, what is kept in ``lab/bundles``.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from lab.bundles import json_of
from lab.reproductions.marked import fill


def kept() -> dict[str, Any]:
    """Return the readings that were kept."""
    return dict(json_of("one_gpu_h200.json"))


def change(here: float, there: float) -> str:
    """Return by how much a value is above another."""
    return f"{100 * (here / there - 1):+.2f} %"


def booked(found: dict[str, Any]) -> str:
    """Return what the ledger booked beside what the device's counter counted, and what answers stated."""
    job, lines = found["training"], ["| what ran | seconds | counted | booked | | booked with the host | stated | |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|---:|"]
    rows = [("training", job["seconds"], job["device_j"], job["gpu_energy_j"], job["energy_j"], None)]
    for load in found["loads"]:
        name = f"answers to {load['clients']} clients"
        rows += [
            (name, load["seconds"], load["device_j"], load["booked_gpu_j"], load["booked_j"], load["stated_j"]),
        ]
    for name, seconds, counted_j, gpu_j, all_j, stated_j in rows:
        stated = (f"{stated_j / 1e3:.2f} kJ", change(stated_j, all_j)) if stated_j else ("", "")
        cells = (f"{seconds:.1f}", f"{counted_j / 1e3:.2f} kJ", f"{gpu_j / 1e3:.2f} kJ", change(gpu_j, counted_j))
        lines.append(f"| {' | '.join((name, *cells, f'{all_j / 1e3:.2f} kJ', *stated))} |")
    return "\n".join(lines)


def levels(found: dict[str, Any]) -> str:
    """Return rate, latency and power by requests at once, and what one more request adds, J."""
    lines = [
        "| at once | requests/s | tokens/s | first token | between tokens | power | a request | one more a second |"
    ]
    lines += ["|---:|---:|---:|---:|---:|---:|---:|---:|"]
    qps, power_w = 0.0, found["idle"]["watts"]
    for level in found["levels"]["measured"]:
        added_j = (level["power_w"] - power_w) / (level["qps"] - qps)
        qps, power_w = level["qps"], level["power_w"]
        lines.append(
            f"| {level['at_once']} | {qps:.1f} | {qps * level['output_tokens']:.0f} | {level['ttft_ms']:.0f} ms "
            f"| {level['tbt_ms']:.1f} ms | {power_w:.0f} W | {power_w / qps:.0f} J | {added_j:+.0f} W |"
        )
    return "\n".join(lines)


def job(found: dict[str, Any]) -> str:
    """Return a training job's step bare and under the agent, and a stop in its middle."""
    alone, under, stop = found["alone"], found["training"], found["stop"]
    slower = change(under["seconds_per_step"], alone["seconds_per_step"])
    bare_ms, under_ms = (1e3 * each["seconds_per_step"] for each in (alone, under))
    lines = ["| | bare | under the agent | |", "|---|---:|---:|---:|"]
    lines += [f"| a step | {bare_ms:.2f} ms | {under_ms:.2f} ms | {slower} |"]
    lines += [f"| held: asked, until all of it has stopped | | {stop['stopped_s']:.1f} s | |"]
    lines += [f"| last step that was reported when it was held | | {stop['seen_at_stop']:.0f} | |"]
    lines += [f"| step from which it goes on | | {stop['lives'][-1]['first']} | |"]
    return "\n".join(lines)


def main(page: Path, readings: Path | None = None) -> None:
    """Make the page's tables anew."""
    found = kept() if readings is None else json.loads(readings.read_text())
    fill(page, {make.__name__: partial(make, found) for make in (booked, levels, job)})


if __name__ == "__main__":
    main(*(Path(word) for word in sys.argv[1:]))
