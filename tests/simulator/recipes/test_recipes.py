"""Recipes: equal seed, equal workload; measured figures land where they should; bundles have the paper's counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lab.recipes.measured import WAITING_FRACTION
from lab.reproductions.make_traces import DAY_SHARES, shares_of
from services.core.domain.errors import DomainError
from services.core.domain.gpus import GPU_MODELS
from services.simulator.engine import EngineOptions, simulate
from services.simulator.raw import TraceFormatError
from services.simulator.readers.jobs import read_jobs
from services.simulator.recipes.green import MODELS
from services.simulator.recipes.measured import BATCHES, HOST_W_PER_GPU, SIZES, tuning_profile
from services.simulator.workload import ClusterSpec
from tests.support.workloads import a_trace

START = "2023-01-01"


def test_the_year_has_400_jobs_on_each_of_365_days() -> None:
    jobs = read_jobs("green-year", start=START, days=365)

    day = ((jobs.submitted_s - jobs.submitted_s[0]) // 86_400).astype(int)
    assert len(jobs) == 146_000
    assert np.bincount(((jobs.submitted_s - 1_672_531_200) // 86_400).astype(int)).tolist() == [400] * 365
    assert day[-1] in (364, 365)
    assert len(read_jobs("green-year", start=START, days=2)) == 800


def test_the_day_has_791_jobs_in_the_papers_sizes() -> None:
    jobs = read_jobs("green-day", start=START)

    assert len(jobs) == 791
    assert np.ptp(jobs.submitted_s) < 86_400
    assert shares_of(jobs.work_s) == pytest.approx(DAY_SHARES, abs=0.002)
    assert jobs.work_s.max() <= 37 * 3600


def test_equal_seeds_make_equal_workloads() -> None:
    one, same, other = (read_jobs("green-day", start=START, seed=seed, recipe="green-users") for seed in (1, 1, 2))

    assert np.array_equal(one.profile, same.profile)
    assert np.array_equal(one.requested_gpus, same.requested_gpus)
    assert not np.array_equal(one.profile, other.profile)


def test_long_jobs_train_large_models() -> None:
    jobs = read_jobs("green-day", start=START, seed=3)
    names = np.array([jobs.profiles[kind].name.split(",")[0] for kind in jobs.profile])

    assert set(names[jobs.work_s >= 36_000]) == {"deepspeech2", "resnet50", "gpt2"}
    assert set(names[jobs.work_s < 3_600]) == {"shufflenet", "bert"}


@pytest.mark.parametrize("model", MODELS)
def test_profiles_keep_what_was_measured(model: str) -> None:
    for batch in BATCHES[model]:
        truth = tuning_profile(model, batch).true["RTX3090"]
        board = GPU_MODELS["RTX3090"]
        assert truth.speed[0] == 1.0
        assert (truth.speed[1:] <= 1.05 * SIZES[1:]).all()
        assert truth.spread_speed is not None
        assert (truth.spread_speed <= truth.speed + 1e-9).all()
        assert (board.idle_w <= truth.gpu_power_w).all()
        assert (truth.gpu_power_w <= board.peak_w).all()
        assert tuning_profile(model, batch).host_power_w == HOST_W_PER_GPU


def test_gpus_that_wait_for_each_other_draw_less() -> None:
    """BERT at 4 samples per GPU works 56 % of a step on two GPUs; a model that scales draws what it did alone."""
    board, lossy = GPU_MODELS["RTX3090"], tuning_profile("bert", 4).true["RTX3090"]
    smooth = tuning_profile("resnet50", 200)
    waiting_w = board.idle_w + WAITING_FRACTION * (board.peak_w - board.idle_w)
    alone_w = lossy.gpu_power_w[0]

    assert lossy.gpu_power_w[1] == pytest.approx(0.5637 * alone_w + 0.4363 * waiting_w, rel=1e-3)
    assert lossy.spread_power_w is not None
    assert (lossy.spread_power_w <= lossy.gpu_power_w + 1e-9).all()
    assert (lossy.spread_power_w >= waiting_w).all()
    assert smooth.true["RTX3090"].gpu_power_w[1] == smooth.true["RTX3090"].gpu_power_w[0]


def test_one_gpu_is_the_most_efficient_size_but_for_resnet50() -> None:
    """Progress per joule at two GPUs of one node, hosts included, over that at one."""
    gains: dict[str, list[float]] = {}
    for model in MODELS:
        for batch in BATCHES[model]:
            truth = tuning_profile(model, batch).true["RTX3090"]
            efficiency = truth.speed / SIZES / (truth.gpu_power_w + HOST_W_PER_GPU)
            gains.setdefault(model, []).append(float(efficiency[1] / efficiency[0]))
            assert efficiency.argmax() == (1 if model == "resnet50" else 0)

    assert gains.pop("resnet50") == pytest.approx([1.024, 1.043, 1.009], abs=1e-3)
    assert all(gain < 1 for of_model in gains.values() for gain in of_model)


def test_recipes_take_what_they_are_named_after() -> None:
    def waits_w(recipe: str) -> float:
        jobs = read_jobs("green-day", start=START, recipe=recipe)
        lossy = next(each for each in jobs.profiles if each.name == "bert, batch 4").true["RTX3090"]
        return (float(lossy.gpu_power_w[1]) - 0.5637 * float(lossy.gpu_power_w[0])) / 0.4363

    assert waits_w("green-waiting-5") == pytest.approx(30 + 0.05 * 320, abs=0.1)
    assert waits_w("green") == pytest.approx(30 + 0.15 * 320, abs=0.1)
    assert waits_w("green-waiting-30") == pytest.approx(30 + 0.3 * 320, abs=0.1)


def write(folder: Path, text: str) -> Path:
    file = folder / "jobs.csv"
    file.write_text(text, encoding="utf-8")
    return file


def test_sia_jobs_last_as_their_samples_take(tmp_path: Path) -> None:
    file = write(tmp_path, "name,time,application,num_replicas,batch_size\nbert-1,110,bert,6,48\n")
    jobs = read_jobs(file, start=START)

    assert jobs.requested_gpus.tolist() == [6]
    assert 3_600 < jobs.work_s[0] < 24 * 3_600
    assert jobs.profiles[0].name == "bert, batch 8"
    with pytest.raises(TraceFormatError, match="need durations"):
        read_jobs(file, recipe="green")
    with pytest.raises(TraceFormatError, match="not 'llama'"):
        read_jobs(write(tmp_path, "name,time,application,num_replicas,batch_size\na,1,llama,6,48\n"))


HISTORY = """job_id,project,submitted_at,started_at,ended_at,gpus,energy_j
j1,vision,2024-05-01T10:00:00Z,2024-05-01T10:00:00Z,2024-05-01T10:10:00Z,2,360000
j2,vision,2024-05-02T10:00:00Z,2024-05-02T10:05:00Z,2024-05-02T11:05:00Z,1,
"""


def test_history_replays_at_its_own_dates_and_power(tmp_path: Path) -> None:
    jobs = read_jobs(write(tmp_path, HISTORY), start="2024-05-01", days=30)

    assert jobs.submitted_s[0] == 1_714_557_600
    assert [jobs.profiles[kind].name for kind in jobs.profile] == ["300 W", "unknown model"]
    assert jobs.work_s.tolist() == [1200.0, 3600.0]
    assert jobs.min_gpus.tolist() == jobs.max_gpus.tolist() == [2, 1]


@pytest.mark.parametrize("recipe", ["plain", "measured"])
def test_a_gang_runs_as_long_as_it_did_however_wide(recipe: str, tmp_path: Path) -> None:
    jobs = read_jobs(write(tmp_path, HISTORY.replace("10:10:00Z,2,", "10:10:00Z,128,")), recipe=recipe)

    kind = jobs.profiles[jobs.profile[0]].truth("A100")
    assert kind is not None
    assert jobs.work_s[0] / kind.speed_at(jobs.requested_gpus[:1])[0] == 600.0


def test_a_dated_trace_moves_to_another_start_and_keeps_the_hour(tmp_path: Path) -> None:
    jobs = read_jobs(write(tmp_path, HISTORY), start=START, days=1)

    assert jobs.submitted_s.tolist() == [1_672_531_200 + 36_000]
    assert any("moved by" in note for note in jobs.notes)
    assert any("outside the requested days: 1 job" in note for note in jobs.notes)


def test_what_cannot_be_asked_for(tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match="unknown recipe"):
        read_jobs("green-day", recipe="cake")
    with pytest.raises(DomainError, match="above 0"):
        read_jobs("green-day", days=0)
    with pytest.raises(TraceFormatError, match="no job is submitted"):
        read_jobs(write(tmp_path, HISTORY), start="2024-05-01", days=0.1)


SLICES = """job_id,submitted_at,started_at,ended_at,gpus,run_s,energy_j,slice,ran_on
same,2023-01-01T00:00:00Z,2023-01-01T00:00:00Z,2023-01-01T01:00:00Z,1,3600,180000,2g,
whole,2023-01-01T00:00:01Z,2023-01-01T00:00:00Z,2023-01-01T01:00:00Z,1,3600,720000,2g,whole
"""


def test_a_job_on_a_slice_runs_as_long_and_draws_as_much_as_it_did(tmp_path: Path) -> None:
    """50 W on a 2g are 175 W on a GPU; a job that ran on a whole GPU takes 3.5 times as long on a 2g."""
    jobs = read_jobs(write(tmp_path, SLICES), recipe="measured")
    cluster = ClusterSpec.parse("1x1:A100[3g,2g,2g]")

    result = simulate("fifo", jobs, cluster, a_trace(), options=EngineOptions(host_idle_w=0.0))

    restart_s = 30.0
    assert result.columns.jct_s == pytest.approx([3_600 + restart_s, 3.5 * 3_600 + restart_s])
    assert result.columns.energy_j[0] == pytest.approx(50 * (3_600 + restart_s))
    assert any("2 by the slice's share of the compute (assumed" in note for note in jobs.notes)


def test_measured_models_have_measured_speeds_on_slices(tmp_path: Path) -> None:
    assert tuning_profile("bert", 4).slice_speeds[2] == pytest.approx(0.325, abs=1e-3)
    assert tuning_profile("bert", 4).slice_speed(1) == 1 / 7, "it did not fit there"
    assert tuning_profile("deepspeech2", 10).slice_speed(3) == 3 / 7
    speeds = [tuning_profile("shufflenet", 64).slice_speeds[size] for size in (1, 2, 3, 4, 7)]
    assert speeds == sorted(speeds)
    assert speeds[-1] == 1
    with pytest.raises(TraceFormatError, match="this trace has jobs on slices"):
        read_jobs(write(tmp_path, SLICES), recipe="a-srpt")
