"""``powerflow``: as the PowerFlow paper's simulator does, each job trains one of a few models at one of a few batches.

=============== =========================== ========================================================
paper, Table 1  stands for it here          measured
=============== =========================== ========================================================
ResNet18        ResNet-18 (``shufflenet``)  speed by Sia on CIFAR-10, power limits by Zeus (ShuffleNet)
VGG16           ResNet-50 (``resnet50``)    speed by Sia on ImageNet, power limits by Zeus
Inception V3    ResNet-50 (``resnet50``)    the same
GPT-2           BERT (``bert``)             speed by Sia on SQuAD, power limits by Zeus
Deep Speech 2   Deep Speech 2               speed by Sia, power limits by Zeus
=============== =========================== ========================================================

Every row is equally likely, and so are its three batches per GPU; draws come from the seed and the job's place in the
trace alone. GPT-2 and Inception V3 themselves were measured at one power limit only, so that nothing could be set for
them. **No source measured clocks: the control is the power limit.** The batch per GPU stays when a gang grows (weak
scaling), as in Sia's measurements and the paper's Figures 2 and 4.

``powerflow-strong`` keeps the batch of the whole job and splits it, ``bs = BS / n``, as the paper's scheduler does;
``strong.py`` says how that follows from the measured batches. ``BS`` is the drawn batch per GPU times the gang that the
user asks for, so that jobs do there what they do in ``powerflow``.

The public sample of the Alibaba trace has no GPU counts. Users ask for gangs as in Microsoft's Philly trace, by
category of duration (``green.PHILLY_SHARES``); the trace's duration is that gang's. Sizes are open from 1 to 16.

``powerflow-fitted`` and ``powerflow-strong-fitted`` are the same, but policies see predictions of the fitted models
(``core.profiles.capped``) on a V100: each kind is fitted to nine tenths of its points (sizes 1 to 16 x power limits),
as the paper's Table 2 does. The fits are bundled, for they depend on the machine: another processor's linear algebra
differs in the last digits, and where two optima are close the search may end in the other one. Of a schedule that such
a digit turns, completion times then differ by some 1 %.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from lab.bundles import json_of
from lab.recipes.green import users_sizes
from lab.recipes.measured import batches_of, profile
from lab.recipes.strong import strong_profile
from services.core.domain.arrays import Floats
from services.core.domain.control_curves import ControlCurve
from services.core.domain.controls import ControlKind
from services.core.profiles.capped import fit_capped
from services.core.profiles.observations import Observations
from services.simulator.raw import RawJobs, TraceFormatError
from services.simulator.recipes.green import EDGES_S
from services.simulator.recipes.recipe import reference_work_s, workload
from services.simulator.workload import Behaviour, JobProfile, Workload

TABLE_1 = ("shufflenet", "resnet50", "resnet50", "bert", "deepspeech2")
BOARD = "V100-SXM2-32GB"
GPUS_PER_NODE = 8
MAX_GPUS = 16
SIZES = np.array([1, 2, 4, 8, 16], dtype=np.int64)
FITS = "powerflow_fits.json"
LEFT_OUT = 10
"""Every tenth point is left out of the fit."""


def powerflow(raw: RawJobs, seed: int) -> Workload:
    """Return the jobs with what was measured of their models; see the module."""
    return _make(raw, seed, strong=False, fitted=False)


def powerflow_fitted(raw: RawJobs, seed: int) -> Workload:
    """Return the same with policies seeing fitted models."""
    return _make(raw, seed, strong=False, fitted=True)


def powerflow_strong(raw: RawJobs, seed: int) -> Workload:
    """Return the jobs with the batch of the whole job split over its gang."""
    return _make(raw, seed, strong=True, fitted=False)


def powerflow_strong_fitted(raw: RawJobs, seed: int) -> Workload:
    """Return the same with policies seeing fitted models."""
    return _make(raw, seed, strong=True, fitted=True)


def _make(raw: RawJobs, seed: int, *, strong: bool, fitted: bool) -> Workload:
    if np.isnan(raw.duration_s).any():
        raise TraceFormatError("recipes 'powerflow' need durations, which this trace does not state; use recipe 'sia'")
    rng = np.random.default_rng(seed)
    model_draw, batch_draw, size_draw = rng.random((3, len(raw)))
    names = [TABLE_1[int(draw * len(TABLE_1))] for draw in model_draw]
    batches = [batches_of(name)[int(draw * 3)] for name, draw in zip(names, batch_draw, strict=True)]
    asked = users_sizes(np.digitize(raw.duration_s, EDGES_S), size_draw)
    requested = np.where(raw.gpus > 0, raw.gpus, asked)
    note = "models and batches of PowerFlow's Table 1 by measured ones; the control is the power limit (no clocks)"
    if strong:
        drawn = list(zip(names, batches, requested.tolist(), strict=True))
        kinds = sorted(set(drawn))
        profiles = tuple((fitted_strong_profile if fitted else strong_profile)(*each) for each in kinds)
        kind = np.array([kinds.index(each) for each in drawn], dtype=np.int64)
        note += "; the batch of the whole job is split over its GPUs"
    else:
        pairs = list(dict.fromkeys((model, batch) for model in TABLE_1 for batch in batches_of(model)))
        profiles = tuple((fitted_profile if fitted else profile)(model, batch) for model, batch in pairs)
        kind = np.array([pairs.index(each) for each in zip(names, batches, strict=True)], dtype=np.int64)
    work_s = reference_work_s(raw, profiles, kind, requested, BOARD)
    return workload(raw, profiles, kind, work_s, requested, max_gpus=MAX_GPUS, notes=(note,))


@cache
def fitted_profile(model: str, batch: int) -> JobProfile:
    """Return a measured model of which policies see the fitted form on a V100."""
    return replace(profile(model, batch), predicted={BOARD: seen_of(model, batch)})


@cache
def fitted_strong_profile(model: str, batch: int, gang: int) -> JobProfile:
    """Return the same of a job that splits the batch of its user's gang."""
    return replace(strong_profile(model, batch, gang), predicted={BOARD: seen_of(model, batch, gang)})


def seen_of(model: str, batch: int, gang: int | None = None) -> Behaviour:
    """Return what policies see of a model on a V100: the bundled fit, or one made now where there is none.

    Args:
        model, batch: Of the job; samples per GPU.
        gang: Whose batch is split over the job's GPUs; None: the batch per GPU stays.
    """
    known = _bundled().get((model, batch, gang))
    return fit_now(model, batch, gang) if known is None else known


@cache
def _bundled() -> dict[tuple[str, int, int | None], Behaviour]:
    """Return the fits that come with the product, by model, batch and gang."""
    found: dict[tuple[str, int, int | None], Behaviour] = {}
    for row in json_of(FITS):
        limits = ControlCurve(*(np.array(row[name]) for name in ("limits_w", "limited_speed", "limited_power_w")))
        found[row["model"], row["batch"], row["gang"]] = Behaviour(
            SIZES,
            np.array(row["speed"]),
            np.array(row["power_w"]),
            controls={ControlKind.POWER_LIMIT: limits},
            power_error=row["power_error"],
        )
    return found


def fit_now(model: str, batch: int, gang: int | None) -> Behaviour:
    """Fit the form to what was measured; arguments as for ``seen_of``."""
    gpus = SIZES.astype(np.float64)
    if gang is None:
        return _fit(profile(model, batch), np.full(gpus.shape, float(batch)), gpus)
    return _fit(strong_profile(model, batch, gang), batch * gang / gpus, np.ones(gpus.shape))


def _fit(measured: JobProfile, local_batch: Floats, work: Floats) -> Behaviour:
    """Return the fitted form of a measured model.

    Args:
        measured: What really happens.
        local_batch: (n_sizes,) samples per GPU at each of ``SIZES``.
        work: (n_sizes,) what a step does at each, in some unit: a step takes ``work / speed``.
    """
    truth = measured.true[BOARD]
    curve = truth.controls[ControlKind.POWER_LIMIT]
    size, limit = (
        each.ravel() for each in np.meshgrid(np.arange(SIZES.size), np.arange(curve.values.size), indexing="ij")
    )
    gpus = SIZES[size]
    nodes = np.ceil(gpus / GPUS_PER_NODE)
    spans = nodes > 1
    speed = np.where(spans, truth.speed_at(gpus, spread=True), truth.speed_at(gpus)) * curve.speed[limit]
    board_w = np.where(spans, truth.power_w_at(gpus, spread=True), truth.power_w_at(gpus))
    points = Observations.of(
        work[size] / speed,
        gpus=gpus.astype(np.float64),
        local_batch=local_batch[size],
        control=curve.values[limit],
        nodes=nodes,
        mean_power_w=board_w * (curve.power_w / curve.at(None)[1])[limit],
        axis=ControlKind.POWER_LIMIT,
    )
    kept = np.arange(gpus.size) % LEFT_OUT != LEFT_OUT - 1
    fit = fit_capped(points.take(kept))
    step_s, energy_j = fit.step_and_energy(gpus, local_batch[size], curve.values[limit], nodes)
    shape = SIZES.size, curve.values.size
    speed, power_w = (work[size] / step_s).reshape(shape), (energy_j / step_s / gpus).reshape(shape)
    seen_curve = ControlCurve(curve.values, speed[0] / speed[0, -1], power_w[0])
    stated = fit.time_quality.mape + fit.energy_quality.mape  # power is energy over time
    return Behaviour(
        SIZES, speed[:, -1], power_w[:, -1], controls={ControlKind.POWER_LIMIT: seen_curve}, power_error=stated
    )
