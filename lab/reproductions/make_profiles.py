"""Make the measured tables from their sources: ``python -m lab.reproductions.make_profiles SOURCES``.

SOURCES is a folder with ``profiles/sia`` (siasosp23/artifacts; its T4 tables and trainings are petuum/adaptdl's),
``profiles/zeus`` (ml-energy/zeus), ``profiles/miso/mig_step_time.csv`` (boringlee24/socc22-miso) and
``profiles/h200/training.csv`` (our own). What is written is computed from the
sources' rows: samples per second at a few batch sizes, from the median step where a batch was measured more than once
and from the one row where it was not; the samples a model needed until trained; its gradient noise over tenths of the
training; medians of power over optimizers; the speed of training on a MIG slice over
that on the whole GPU, from median steps. ``NOTICE`` counts the rows. The files are written to
``lab/bundles``.
"""

from __future__ import annotations

import csv
import gzip
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from lab import bundles
from lab.recipes.measured import BATCHES, STAGES

BUNDLES = Path(bundles.__file__).parent
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
MISO = {"shufflenet": "mobilenet", "bert": "bert", "resnet50": "resnet", "gpt2": "transformer"}
"""Whose steps on slices stand for a model's. Those of DeepSpeech2, of inputs of any length, are too uneven to
compare."""
LARGEST_NOISE = 1e9
"""Stands for a gradient whose mean was measured as nothing."""
Table = dict[tuple[str, int], list[tuple[float, float, float]]]


def rows_of(file: Path) -> list[dict[str, str]]:
    """Return the rows of a table, packed or not."""
    data = file.read_bytes()
    return list(csv.DictReader((gzip.decompress(data) if file.suffix == ".gz" else data).decode().splitlines()))


def step_times(folder: Path, tag: str) -> Table:
    """Return (batch, seconds, seconds of synchronising alone) by kind of placement and gang size."""
    found: dict[tuple[str, int, float], list[tuple[float, float]]] = defaultdict(list)
    placed = {digits: ("one", size) for size, digits in ONE_NODE.items()}
    placed |= {digits: ("spread", size) for size, digits in SPREAD.items()}
    for row in rows_of(folder / f"placements-{tag}.csv"):
        kind = placed.get(row["placement"])
        if kind is not None:
            found[(*kind, float(row["local_bsz"]))].append((float(row["step_time"]), float(row["sync_time"])))
    for row in rows_of(folder / f"scalability-{tag}.csv"):
        size = int(float(row["num_replicas"]))
        if size in WIDE:
            times = float(row["step_time"]), float(row["sync_time"])
            found[("spread", size, float(row["local_bsz"]))].append(times)
    table: Table = defaultdict(list)
    for (kind, size, batch), times in sorted(found.items()):
        step_s, sync_s = np.median(np.array(times), axis=0).tolist()
        table[(kind, size)].append((batch, step_s, sync_s))
    return table


def batches_between(named: tuple[int, ...], smallest: float, largest: float) -> list[int]:
    """Return the batches to keep: the named ones, and doublings of the smallest measured up to the largest."""
    doubled = smallest * 2.0 ** np.arange(np.ceil(np.log2(largest / smallest)))
    return sorted({*named, *np.round(doubled).astype(int).tolist(), int(largest)})


def write_speeds(sources: Path) -> None:
    """Write samples per second, and the share of a step that only synchronises.

    By application, GPU, batch, placement and gang size.
    """
    with (BUNDLES / "speeds.csv").open("w", newline="", encoding="utf-8") as text:
        out = csv.writer(text, lineterminator="\n")
        out.writerow(["application", "gpu", "batch_per_gpu", "placement", "gpus", "samples_per_s", "sync_share"])
        for application, named in BATCHES.items():
            for tag in GPU_TAGS:
                table = step_times(sources / "profiles" / "sia" / application, tag)
                measured = [point[0] for points in table.values() for point in points]
                for batch in batches_between(named, min(measured), max(measured)):
                    for (kind, size), points in sorted(table.items()):
                        sizes, steps_s, syncs_s = np.array(points).T
                        if not sizes[0] <= batch <= sizes[-1]:
                            continue  # never extrapolated: a larger batch takes longer than any that was measured
                        step_s = float(np.interp(batch, sizes, steps_s))
                        share = float(np.interp(batch, sizes, syncs_s)) / step_s
                        speed = f"{size * batch / step_s:.5g}"
                        out.writerow([application, tag, batch, kind, size, speed, f"{share:.4f}"])


def write_noise(sources: Path) -> None:
    """Write the gradient noise scale of each application by stage of its training and total batch, samples.

    It is the one at which the efficiency formula gives the mean, over the epochs of a stage, of the efficiencies that
    follow from the variance and the square of the gradient in each. At the smallest batch, where that is 1 whatever the
    noise, it is the mean ratio of variance to square instead.
    """
    with (BUNDLES / "noise.csv").open("w", newline="", encoding="utf-8") as text:
        out = csv.writer(text, lineterminator="\n")
        out.writerow(["application", "stage", "batch", "noise"])
        for application in BATCHES:
            files = sorted(
                (sources / "profiles" / "sia" / application).glob("validation-*.csv"),
                key=lambda file: int(file.stem.split("-")[1]),
            )
            base = int(files[0].stem.split("-")[1])
            for stage in range(STAGES):
                for file in files:
                    batch = int(file.stem.split("-")[1])
                    epochs = rows_of(file)
                    first = stage * len(epochs) // STAGES
                    last = max((stage + 1) * len(epochs) // STAGES, first + 1)
                    noise = noise_of(epochs[first:last], batch / base) * base
                    out.writerow([application, stage, batch, f"{min(noise, LARGEST_NOISE):.4g}"])


def noise_of(epochs: list[dict[str, str]], scale: float) -> float:
    """Return the noise scale of some epochs at a multiple of the smallest batch, in smallest batches."""
    sqr = np.array([float(row["grad_sqr"]) for row in epochs])
    var = np.array([float(row["grad_var"]) for row in epochs])
    if scale == 1.0:
        return float(np.median(var / np.maximum(sqr, var / LARGEST_NOISE)))
    efficiency = float(np.mean((var + sqr) / (var + scale * sqr)))
    return (efficiency * scale - 1.0) / max(1.0 - efficiency, 1.0 / LARGEST_NOISE)


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
    with (BUNDLES / "powers.csv").open("w", newline="", encoding="utf-8") as text:
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
    with (BUNDLES / "sia_work.csv").open("w", newline="", encoding="utf-8") as text:
        out = csv.writer(text, lineterminator="\n")
        out.writerow(["application", "batch", "samples"])
        for application in BATCHES:
            for file in sorted((sources / "profiles" / "sia" / application).glob("validation-*.csv")):
                batch = int(file.stem.split("-")[1])
                last = float(rows_of(file)[-1]["iteration"])
                out.writerow([application, batch, f"{last * batch:.0f}"])


def write_slices(sources: Path) -> None:
    """Write how fast models train on slices of an A100 of 40 GB over the whole GPU, by samples per step."""
    steps_s: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for row in rows_of(sources / "profiles" / "miso" / "mig_step_time.csv"):
        key = row["model"], int(row["batch_size"])
        steps_s[key][int(row["mig_slice"][0])] = float(row["step_time_median_s"])
    with (BUNDLES / "slice_speeds.csv").open("w", newline="", encoding="utf-8") as text:
        out = csv.writer(text, lineterminator="\n")
        out.writerow(["model", "batch", "sevenths", "relative_speed"])
        for model, measured in MISO.items():
            for (name, batch), by_size in sorted(steps_s.items()):
                for size, step_s in sorted(by_size.items()) if name == measured else ():
                    out.writerow([model, batch, size, f"{min(by_size[7] / step_s, 1.0):.4f}"])


def main() -> None:
    """Make the five tables."""
    sources = Path(sys.argv[1])
    write_speeds(sources)
    write_powers(sources)
    write_work(sources)
    write_noise(sources)
    write_slices(sources)


if __name__ == "__main__":
    main()
