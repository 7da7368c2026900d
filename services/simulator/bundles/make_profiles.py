"""Make the measured tables from their sources: ``python -m services.simulator.bundles.make_profiles SOURCES``.

SOURCES is a folder with ``profiles/sia`` (siasosp23/artifacts), ``profiles/zeus`` (ml-energy/zeus) and
``profiles/h200/training.csv`` (our own). Only aggregates leave here: medians over repeated runs, in samples per second
at a few batch sizes, and the samples a model needed until trained. Nothing here runs in production.
"""

from __future__ import annotations

import csv
import gzip
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
BATCHES = {
    "cifar10": (64, 257, 1024),
    "bert": (4, 8, 12),
    "deepspeech2": (10, 20, 40),
    "imagenet": (57, 115, 200),
    "yolov3": (4, 6, 8),
}
"""Per application the samples per GPU: small, medium and large among those measured."""
GPU_TAGS = ("rtx", "aws", "dgx-ext")
ONE_NODE = {1: "1", 2: "2", 3: "3", 4: "4", 6: "6", 8: "8"}
SPREAD = {2: "11", 3: "12", 4: "22", 6: "33", 8: "44"}
WIDE = (12, 16, 24)
ZEUS = {
    "shufflenet": "shufflenetv2",
    "bert": "bert_base_uncased",
    "deepspeech2": "deepspeech2",
    "resnet50": "resnet50",
}
ZEUS_GPUS = ("V100", "P100")
Table = dict[tuple[str, int], list[tuple[float, float]]]


def rows_of(file: Path) -> list[dict[str, str]]:
    """Return the rows of a table, packed or not."""
    data = file.read_bytes()
    return list(csv.DictReader((gzip.decompress(data) if file.suffix == ".gz" else data).decode().splitlines()))


def step_times(folder: Path, tag: str) -> Table:
    """Return (batch, seconds) pairs by kind of placement and gang size."""
    found: dict[tuple[str, int, float], list[float]] = defaultdict(list)
    placed = {digits: ("one", size) for size, digits in ONE_NODE.items()}
    placed |= {digits: ("spread", size) for size, digits in SPREAD.items()}
    for row in rows_of(folder / f"placements-{tag}.csv"):
        kind = placed.get(row["placement"])
        if kind is not None:
            found[(*kind, float(row["local_bsz"]))].append(float(row["step_time"]))
    for row in rows_of(folder / f"scalability-{tag}.csv"):
        size = int(float(row["num_replicas"]))
        if size in WIDE:
            found[("spread", size, float(row["local_bsz"]))].append(float(row["step_time"]))
    table: Table = defaultdict(list)
    for (kind, size, batch), times in sorted(found.items()):
        table[(kind, size)].append((batch, float(np.median(times))))
    return table


def write_speeds(sources: Path) -> None:
    """Write samples per second by application, GPU, batch, placement and gang size."""
    with (HERE / "speeds.csv").open("w", newline="", encoding="utf-8") as text:
        out = csv.writer(text, lineterminator="\n")
        out.writerow(["application", "gpu", "batch_per_gpu", "placement", "gpus", "samples_per_s"])
        for application, batches in BATCHES.items():
            for tag in GPU_TAGS:
                table = step_times(sources / "profiles" / "sia" / application, tag)
                for batch in batches:
                    for (kind, size), points in sorted(table.items()):
                        sizes, steps_s = np.array(points).T
                        if not sizes[0] <= batch <= sizes[-1]:
                            continue  # never extrapolated: a larger batch takes longer than any that was measured
                        step_s = float(np.interp(batch, sizes, steps_s))
                        out.writerow([application, tag, batch, kind, size, f"{size * batch / step_s:.5g}"])


def write_powers(sources: Path) -> None:
    """Write mean power and time per epoch by model, GPU, batch and power limit, and H200 rows at its own limit."""
    folder = sources / "profiles"
    zeus: dict[tuple[str, str, int, int], list[tuple[float, float]]] = defaultdict(list)
    for gpu in ZEUS_GPUS:
        for row in rows_of(folder / "zeus" / f"summary_power_{gpu.lower()}.csv"):
            for model, network in ZEUS.items():
                if row["network"] == network and row["dataset"] != "sentiment140":
                    key = (model, gpu, int(row["batch_size"]), int(float(row["power_limit"])))
                    zeus[key].append((float(row["average_power"]), float(row["time_per_epoch"])))
    with (HERE / "powers.csv").open("w", newline="", encoding="utf-8") as text:
        out = csv.writer(text, lineterminator="\n")
        out.writerow(["model", "gpu", "batch", "power_limit_w", "power_w", "relative_time"])
        for (model, gpu, batch, limit), runs in sorted(zeus.items(), key=lambda item: (item[0][1] != "V100", item)):
            widest = max(other[3] for other in zeus if other[:3] == (model, gpu, batch))
            power, time_s = np.median(np.array(runs), axis=0)
            relative = time_s / np.median(np.array(zeus[(model, gpu, batch, widest)]), axis=0)[1]
            out.writerow([model, gpu, batch, limit, f"{power:.1f}", f"{relative:.4f}"])
        for row in rows_of(folder / "h200" / "training.csv"):
            if (row["model"], row["precision"]) in (("gpt2", "bf16"), ("inception_v3", "tf32")):
                out.writerow([row["model"], "H200", row["batch_size"], 700, row["mean_power_w"], "1.0000"])


def write_work(sources: Path) -> None:
    """Write how many samples each application took until trained, by total batch size."""
    with (HERE / "sia_work.csv").open("w", newline="", encoding="utf-8") as text:
        out = csv.writer(text, lineterminator="\n")
        out.writerow(["application", "batch", "samples"])
        for application in BATCHES:
            for file in sorted((sources / "profiles" / "sia" / application).glob("validation-*.csv")):
                batch = int(file.stem.split("-")[1])
                last = float(rows_of(file)[-1]["iteration"])
                out.writerow([application, batch, f"{last * batch:.0f}"])


def main() -> None:
    """Make the three tables beside this module."""
    sources = Path(sys.argv[1])
    write_speeds(sources)
    write_powers(sources)
    write_work(sources)


if __name__ == "__main__":
    main()
