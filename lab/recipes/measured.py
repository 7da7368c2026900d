"""The measured models as job profiles: speed from Sia's tables, power from Zeus's and our own.

========== ======================= ============================== ================= =========================
model      speed by gang           samples per GPU                power             measured power limit, GPU
========== ======================= ============================== ================= =========================
shufflenet cifar10 (ResNet-18)     64, 257, 1024                  shufflenetv2      V100, 250 W (Zeus)
bert       bert (SQuAD)            4, 8, 12                       bert, SQuAD       V100, 250 W (Zeus)
deepspeech2 deepspeech2            10, 20, 40                     deepspeech2       V100, 250 W (Zeus)
resnet50   imagenet (ResNet-50)    57, 115, 200                   resnet50          V100, 250 W (Zeus)
gpt2       bert (SQuAD)            4, 8, 12 for 8, 16, 32         gpt2, bf16        H200, 700 W (own)
yolov3     yolov3                  4, 6, 8 for 16, 32, 64         inception_v3      H200, 700 W (own)
========== ======================= ============================== ================= =========================

The first five are the models the GREEN paper names. Where both sources did not measure one, the nearest stands in:
ShuffleNet scales as ResNet-18 on the same images, GPT-2 as BERT (both transformers of some 110 M parameters); YOLOv3
borrows the power of another convolutional network, as its own was not measured. Batches are paired small, medium,
large.

**Speed.** A gang keeps the samples per GPU its user chose (progress counts samples), so speed is samples per second
relative to one GPU. Up to 8 GPUs on one node or on two are measured; beyond that, two or three nodes of eight. A gang
on more and smaller nodes (such as 4 x 2) was not measured and takes the two-node figure; a gang larger than any
measured at its batch goes no faster. The source's tag ``rtx`` stands for all GPUs but T4 (``aws``) and A100, H100,
H200 (``dgx-ext``), which differ in speed and in scaling.

**Power.** No table has an RTX 3090. Each measurement is taken as a fraction of the measured board's dynamic range,
``(P - idle) / (limit - idle)``, and mapped to the range of the simulated board, ``idle + fraction * (peak - idle)``.
The idle draws and limits of both are those of ``services.core.domain.gpus``. During the part of a step in which the
GPUs of a gang wait for each other, ``1 - speed / (n * speed of one)``, they draw ``WAITING_FRACTION``: boards that
block on communication were measured at 70 W (A40, the RTX 3090's chip, 300 W) and 85 W (A100, 400 W), according to
github.com/ml-energy/kareus at commit 98f0255823bd993399866c64efdea8ccb1ab5a09, file ``model_config.py`` in the folder
``bayesian/common`` of its tests (``p2p_power_w``, "the measured power while the GPU is blocked on P2P communication").
The effect of 0.05 and 0.3 instead on GREEN's day is in ``lab/results/green.md`` (experiment ``green-waiting``).

**Power limits.** Zeus measured four of the models at seven limits of a V100 (100 to 250 W) and six of a P100 (125 to
250 W). Speed and power of the nearest batch are taken, relative to 250 W; limits are mapped to another board's range as
powers are, so that the V100's 100 W is 126 W on an RTX 3090. P100 boards use the P100's table, all others the V100's.
GPT-2 and YOLOv3 were measured only at their board's own limit: a limit has no effect on them, and a policy that
profiles them learns nothing. **Clocks** were not measured by any source: a clock has no effect in any of these recipes.
Jobs of ``plain`` and ``measured`` name no model and have neither.

**Slices.** MISO measured the steps of four models on MIG slices of a 40 GB A100, each alone on its slice; their speeds
relative to the whole GPU stand for all GPUs that can be cut, at the nearest batch. MobileNet's stand for ShuffleNet's
and a transformer's for GPT-2's; DeepSpeech2 and YOLOv3 have none. A size that was not measured, because
the model did not fit there, takes its share of the compute.

**Host.** ``services/simulator/recipes/measured.py`` says what hosts draw. That module reads what ``python -m
lab.recipes.measured`` writes: all of this by a share of boards' dynamic range, for the models of the recipe ``green``.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from lab.recipes.best_batch import BestBatch, NoiseScale, StepTimes, best_batch
from services.core.domain.arrays import Floats
from services.core.domain.control_curves import ControlCurve
from services.core.domain.controls import ControlKind
from services.core.domain.gpus import GPU_MODELS, GpuModel
from services.simulator.bundles import rows_of
from services.simulator.recipes.measured import BATCHES as MODEL_BATCHES
from services.simulator.recipes.measured import (
    FILE,
    HOST_W_PER_GPU,
    KINDS,
    REFERENCE_GPU,
    SIZES,
    TAGS,
    power_w,
    speed_tag,
)
from services.simulator.workload import ANY_MODEL, Behaviour, JobProfile

WAITING_FRACTION = 0.15
"""(70 - 30) / (300 - 30) of an A40's dynamic range, taking 30 W for its idle draw; an A100's (85 - 55) / (400 - 55) is
0.09."""
FAST_LINKS = "dgx-ext"  #: The tag of Sia's tables whose nodes have the fastest links
POWER_BOARDS = {"V100": "V100-PCIE-32GB", "P100": "P100-PCIE-16GB", "H200": "H200-SXM-141GB"}
"""The boards on which the power table's GPUs were measured."""
SPEED_OF = {
    "shufflenet": "cifar10",
    "bert": "bert",
    "deepspeech2": "deepspeech2",
    "resnet50": "imagenet",
    "gpt2": "bert",
    "yolov3": "yolov3",
}
BATCHES = {SPEED_OF[model]: sizes for model, sizes in MODEL_BATCHES.items()} | {"yolov3": (4, 6, 8)}
"""Per application the samples per GPU: small, medium and large among those measured."""
POWER_OF = {"yolov3": "inception_v3"}
POWER_BATCHES = {"gpt2": (8, 16, 32), "yolov3": (16, 32, 64)}
"""Where the batch of the power table is not that of the speed table: small, medium, large."""


@cache
def speeds() -> dict[tuple[str, str, int], dict[tuple[str, int], float]]:
    """Return samples per second by (application, tag, batch), then by (placement, gang size)."""
    table: dict[tuple[str, str, int], dict[tuple[str, int], float]] = defaultdict(dict)
    for row in rows_of("speeds.csv", "lab.bundles"):
        key = row["application"], row["gpu"], int(row["batch_per_gpu"])
        table[key][(row["placement"], int(row["gpus"]))] = float(row["samples_per_s"])
    return dict(table)


def batches_of(model: str) -> tuple[int, ...]:
    """Return the samples per GPU that a job of this model may have, ascending."""
    return BATCHES[SPEED_OF[model]]


@cache
def dynamic_fraction(model: str, batch: float) -> float:
    """Return the share of a board's dynamic range (0 to 1) a model draws at full limit; nearest batch per GPU."""
    name = POWER_OF.get(model, model)
    if model in POWER_BATCHES:
        named = batches_of(model)
        batch = POWER_BATCHES[model][min(range(len(named)), key=lambda at: abs(np.log(named[at] / batch)))]
    rows = [row for row in rows_of("powers.csv", "lab.bundles") if row["model"] == name and row["gpu"] != "P100"]
    rows = [row for row in rows if float(row["power_limit_w"]) == _measured_board(row["gpu"]).peak_w]
    nearest = min(rows, key=lambda row: abs(np.log(float(row["batch"]) / batch)))
    return min(max(_fraction(float(nearest["power_w"]), nearest["gpu"]), 0.0), 1.0)


def _measured_board(measured_gpu: str) -> GpuModel:
    return GPU_MODELS[POWER_BOARDS[measured_gpu]]


def _fraction(power_w: float, measured_gpu: str) -> float:
    board = _measured_board(measured_gpu)
    return (power_w - board.idle_w) / (board.peak_w - board.idle_w)


@cache
def power_limits(model: str, batch: int, gpu_model: str) -> ControlCurve | None:
    """Return a model's speed and power by power limit on a board, at the nearest batch; None if it was not measured."""
    found = limits_of(model, batch, "P100" if GPU_MODELS[gpu_model].chip == "P100" else "V100")
    if found is None:
        return None
    limits, speed, powers = found
    return ControlCurve(np.round(power_w(limits, gpu_model)), speed, power_w(powers, gpu_model))


@cache
def limits_of(model: str, batch: int, measured_gpu: str) -> Floats | None:
    """Return power limits as shares of the board's range, relative speeds, and powers as shares: (3, n_limits)."""
    rows = [row for row in rows_of("powers.csv", "lab.bundles") if row["model"] == model and row["gpu"] == measured_gpu]
    if not rows:
        return None
    nearest = min({int(row["batch"]) for row in rows}, key=lambda size: abs(np.log(size / batch)))
    rows = sorted((row for row in rows if int(row["batch"]) == nearest), key=lambda row: float(row["power_limit_w"]))
    limits, powers = (
        [_fraction(float(row[column]), measured_gpu) for row in rows] for column in ("power_limit_w", "power_w")
    )
    return np.array([limits, [1.0 / float(row["relative_time"]) for row in rows], powers])


@dataclass(frozen=True)
class Assumed:
    """What the measured models leave open; the defaults are those of the recipes."""

    waiting_fraction: float = WAITING_FRACTION  #: Share of its dynamic range that a board draws while its gang waits
    fast_links: bool = False  #: Whether gangs on any board speed up as on nodes with the fastest links (``FAST_LINKS``)


MEASURED = Assumed()


def behaviour(model: str, batch: int, gpu_model: str, assumed: Assumed = MEASURED) -> Behaviour:
    """Return how a model runs at one batch per GPU on one kind of board; speed 1 is one board of the reference tag."""
    table = speeds()[(SPEED_OF[model], speed_tag(gpu_model), batch)]
    if assumed.fast_links:
        fast, alone = speeds()[(SPEED_OF[model], FAST_LINKS, batch)], table[("one", 1)]
        table = {gang: alone * speed / fast[("one", 1)] for gang, speed in fast.items()}
    base = speeds()[(SPEED_OF[model], "rtx", batch)][("one", 1)]
    one = _column(table, "one", "spread")
    spread = _column(table, "spread", "one")
    spread = np.minimum(spread, one)
    shares = dynamic_fraction(model, batch), assumed.waiting_fraction
    busy_w, waiting_w = (power_w(each, gpu_model) for each in shares)

    def drawn_w(speed: Floats) -> Floats:
        """Return the mean draw of a gang's GPUs, which work for part of a step and wait for the rest."""
        working = np.minimum(speed / (SIZES * one[0]), 1.0)
        return working * busy_w + (1.0 - working) * min(waiting_w, busy_w)

    limits = power_limits(model, batch, gpu_model)
    controls = {} if limits is None else {ControlKind.POWER_LIMIT: limits}
    return Behaviour(SIZES, one / base, drawn_w(one), spread / base, drawn_w(spread), controls)


def _column(table: dict[tuple[str, int], float], first: str, second: str) -> Floats:
    known = {size: table.get((first, size), table.get((second, size))) for size in SIZES.tolist()}
    sizes = [size for size, value in known.items() if value is not None]
    return np.interp(SIZES, sizes, [value for value in known.values() if value is not None])


@cache
def profile(model: str, batch: int, assumed: Assumed = MEASURED) -> JobProfile:
    """Return a measured model at one batch per GPU, on every board we know."""
    true = {name: behaviour(model, batch, name, assumed) for name in GPU_MODELS}
    true[ANY_MODEL] = true[REFERENCE_GPU]
    speeds_on_slices = slice_speeds(model, batch)
    return JobProfile(f"{model}, batch {batch}", true, host_power_w=HOST_W_PER_GPU, slice_speeds=speeds_on_slices)


@cache
def slice_speeds(model: str, batch: int) -> dict[int, float]:
    """Return a model's speed on slices relative to one GPU, by their sevenths; empty if it was not measured."""
    rows = [row for row in rows_of("slice_speeds.csv", "lab.bundles") if row["model"] == model]
    nearest = min({int(row["batch"]) for row in rows}, key=lambda size: abs(np.log(size / batch)), default=0)
    return {int(row["sevenths"]): float(row["relative_speed"]) for row in rows if int(row["batch"]) == nearest}


@cache
def median_fraction() -> float:
    """Return the median share of the dynamic range over the measured models and batches."""
    return float(np.median([dynamic_fraction(model, batch) for model, batch in KINDS]))


@cache
def samples_to_train(application: str, batch: int) -> float:
    """Return the samples one of Sia's applications needs until trained, linear between measured total batches."""
    rows = [row for row in rows_of("sia_work.csv", "lab.bundles") if row["application"] == application]
    points = sorted((int(row["batch"]), float(row["samples"])) for row in rows)
    return float(np.interp(batch, [size for size, _ in points], [samples for _, samples in points]))


STAGES = 10
Gang = tuple[str, int]
"""``one`` or ``spread``, and how many GPUs."""


def tuning_profile(model: str, batch: int, total: int) -> JobProfile:
    """Return a measured model at one batch per GPU that can tune its batch; see ``adaptive``."""
    batches = noise_scales(SPEED_OF[model])[0].batch
    permitted = int(batches[0]), int(batches[-1])
    return replace(profile(model, batch), adaptive=partial(adaptive, model, batch, total), batch_range=permitted)


@cache
def adaptive(model: str, batch: int, total: int, gpu_model: str) -> tuple[Behaviour, ...]:
    """Return how a model runs on one kind of board with its batch tuned, by stage, as under Pollux.

    **Goodput.** Among all batches between the application's smallest and largest total batch, the one with the
    highest goodput is chosen (``lab.recipes.best_batch``): throughput, at the resulting samples per GPU and
    accumulation, from the same measured steps as the speed of fixed batches; statistical efficiency from the
    measured gradient noise, which grows during training. A job goes through ten stages, equal shares of its work,
    each with its own noise.

    **Unit.** Work is counted in samples of the application's smallest batch, M0. A fixed-batch job of the same
    profile does one second of work per second on one GPU of the reference tag. Each sample it processes counts for the
    samples needed until trained at M0 over those needed at the batch that job was measured at or asked for. Both are
    interpolated linearly between validated batches; a batch below M0 counts as M0, since nothing was measured there.

    A fixed-batch job that is given a larger gang is not charged for the lower efficiency of its larger total batch;
    a job that tunes its batch is. That favours schedulers without tuning.

    **Power.** The power of the measured batch nearest to the samples per GPU; less during the part of a step in
    which GPUs wait for each other, which is the gang's throughput deficit against the same number of single GPUs,
    as for fixed batches. The effect of a power limit is that of the measured batch nearest to one GPU's: nobody has
    measured limits on jobs that tune.

    Args:
        model: One of ``SPEED_OF``.
        batch: Samples per GPU of the fixed-batch job whose seconds of work are the unit.
        total: The total batch at which its work was counted.
        gpu_model: One of ``GPU_MODELS``; any other runs like the reference board.
    """
    application = SPEED_OF[model]
    gpu_model = gpu_model if gpu_model in GPU_MODELS else REFERENCE_GPU
    tag = speed_tag(gpu_model)
    at_once = speeds()[(application, "rtx", batch)][("one", 1)]
    base = int(noise_scales(application)[0].batch[0])
    unit = at_once * samples_to_train(application, base) / samples_to_train(application, total)
    return tuple(_behaviour(model, gpu_model, application, tag, stage, unit) for stage in range(STAGES))


@cache
def goodputs(application: str, tag: str, stage: int) -> dict[Gang, BestBatch]:
    """Return the best batch of every measured gang at a stage of the training."""
    noise = noise_scales(application)[stage]
    return {gang: best_batch(times, noise, gang[1]) for gang, times in steps(application, tag).items()}


@cache
def steps(application: str, tag: str) -> dict[Gang, StepTimes]:
    """Return the step times of each measured gang."""
    points: dict[Gang, list[tuple[float, float, float]]] = defaultdict(list)
    for row in rows_of("speeds.csv", "lab.bundles"):
        if (row["application"], row["gpu"]) == (application, tag):
            gang, batch = (row["placement"], int(row["gpus"])), float(row["batch_per_gpu"])
            step_s = gang[1] * batch / float(row["samples_per_s"])
            points[gang].append((batch, step_s, step_s * float(row["sync_share"])))
    return {gang: StepTimes(*np.array(sorted(rows)).T) for gang, rows in points.items()}


@cache
def noise_scales(application: str) -> tuple[NoiseScale, ...]:
    """Return the gradient noise by stage."""
    points: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for row in rows_of("noise.csv", "lab.bundles"):
        if row["application"] == application:
            points[int(row["stage"])].append((float(row["batch"]), float(row["noise"])))
    return tuple(NoiseScale(*np.array(sorted(points[stage])).T) for stage in range(STAGES))


def _behaviour(model: str, gpu_model: str, application: str, tag: str, stage: int, unit: float) -> Behaviour:
    best, times = goodputs(application, tag, stage), steps(application, tag)
    alone = times[("one", 1)]
    waiting_w = power_w(WAITING_FRACTION, gpu_model)

    def drawn_w(gang: Gang) -> float:
        chosen = best[gang]
        at_once, passes = np.array([chosen.batch_per_gpu]), np.array([chosen.accumulated])
        ideal = gang[1] * alone.throughput(1, at_once, np.zeros_like(at_once))
        working = min(float((times[gang].throughput(gang[1], at_once, passes) / ideal)[0]), 1.0)
        busy_w = power_w(dynamic_fraction(model, chosen.batch_per_gpu), gpu_model)
        return working * busy_w + (1.0 - working) * min(waiting_w, busy_w)

    def total(gang: Gang) -> int:
        chosen = best[gang]
        return gang[1] * chosen.batch_per_gpu * (chosen.accumulated + 1)

    def columns(first: str, second: str) -> tuple[Floats, Floats, Floats]:
        gangs = [(first if (first, size) in best else second, size) for size in SIZES.tolist()]
        gangs = [gang for gang in gangs if gang in best]
        sizes = [size for _, size in gangs]
        speed = np.interp(SIZES, sizes, [best[gang].goodput / unit for gang in gangs])
        drawn = np.interp(SIZES, sizes, [drawn_w(gang) for gang in gangs])
        return speed, drawn, np.interp(SIZES, sizes, [total(gang) for gang in gangs]).round()

    (one, one_w, one_batch), (spread, spread_w, spread_batch) = columns("one", "spread"), columns("spread", "one")
    limits = power_limits(model, best[("one", 1)].batch_per_gpu, gpu_model)
    controls = {} if limits is None else {ControlKind.POWER_LIMIT: limits}
    batches = np.array((one_batch, spread_batch), dtype=np.int64)
    return Behaviour(SIZES, one, one_w, np.minimum(spread, one), spread_w, controls, batches=batches)


def _tuned_curves(model: str, tag: str, curves: Callable[[str, int], list[int]]) -> list[list[int]]:
    best = [goodputs(SPEED_OF[model], tag, stage)[("one", 1)] for stage in range(STAGES)]
    return [curves(model, each.batch_per_gpu) for each in best]


def for_the_product() -> dict[str, np.ndarray[Any, Any]]:
    """Return what ``services.simulator.recipes.measured`` reads, by the names that it gives it there."""
    boards = {"rtx": REFERENCE_GPU, "aws": "T4", "dgx-ext": "A100-SXM4-40GB"}
    found: dict[str, Any] = {"median_power": np.array(median_fraction())}
    limits: list[Floats] = []

    def curves(model: str, batch: int) -> list[int]:
        of = [limits_of(model, batch, gpu) for gpu in ("V100", "P100")]
        new = [each for each in of if each is not None and not any(each is known for known in limits)]
        limits.extend(new)
        return [-1 if each is None else next(at for at, known in enumerate(limits) if known is each) for each in of]

    def columns(behaviour: Behaviour, board: str) -> tuple[list[Floats], list[Floats]]:
        assert behaviour.spread_speed is not None
        assert behaviour.spread_power_w is not None
        watts = behaviour.gpu_power_w, behaviour.spread_power_w
        idle_w, range_w = power_w(0.0, board), power_w(1.0, board) - power_w(0.0, board)
        return [behaviour.speed, behaviour.spread_speed], [(each - idle_w) / range_w for each in watts]

    shown = [[columns(behaviour(*kind, boards[tag]), boards[tag]) for tag in TAGS] for kind in KINDS]
    found["speed"], found["power"] = np.moveaxis(np.array(shown), 2, 0)
    tuned = [[adaptive(*kind, kind[1], boards[tag]) for tag in TAGS] for kind in KINDS]
    shown = [[[columns(each, boards[tag]) for each in of] for tag, of in zip(TAGS, row, strict=True)] for row in tuned]
    found["tuned_speed"], found["tuned_power"] = np.moveaxis(np.array(shown), 3, 0)
    found["tuned_batch"] = np.array([[[each.batches for each in of] for of in row] for row in tuned])
    found["batch_range"] = np.array([tuning_profile(*kind, kind[1]).batch_range for kind in KINDS])
    found["curve"] = np.array([[curves(*kind)] * len(TAGS) for kind in KINDS])
    found["tuned_curve"] = np.array([[_tuned_curves(model, tag, curves) for tag in TAGS] for model, _ in KINDS])
    most = max(each.shape[1] for each in limits)
    widths = [((0, 0), (0, most - each.shape[1])) for each in limits]
    padded = [np.pad(each, width, constant_values=np.nan) for each, width in zip(limits, widths, strict=True)]
    found["limit"] = np.array(padded)
    found["slice_speed"] = np.array([[slice_speeds(*kind).get(at, np.nan) for at in range(8)] for kind in KINDS])
    return found


if __name__ == "__main__":
    np.savez_compressed(FILE, allow_pickle=False, **for_the_product())
