"""The times of Llama-2-70B on A100s and H100s, fitted to Splitwise's measurements.

    python -m lab.reproductions.serving_profiles DATA

DATA is a folder with ``profiles/splitwise_llama2_70b.csv`` (data/perf_model.csv of Splitwise's simulator). Prints what
``lab/serving/model_server.py`` has as constants: for each kind of instance the coefficients of prefill and
decode, and by what share each further request lengthens a step.

Prefill is a line through one prompt at a time, of 128 to 8,192 tokens; decode a line through batches of 1 to 64
requests of 512 tokens. Medians of repeated runs. Batches of 64 on two GPUs are left out: their prefill took as long as
that of four requests, so that not all can have been in memory.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from lab.serving.model_server import LLAMA_70B

KINDS = {
    f"{short}-tp{degree}": (name, degree)
    for short, name in (("a100", "a100-80gb"), ("h100", "h100-80gb"))
    for degree in (2, 4, 8)
}
TOKENS = 128
"""Length of the answers in the runs that vary prompts and batches."""


def medians(path: Path) -> dict[tuple[str, int, int, int], tuple[float, float]]:
    """Return (prefill, step) in seconds by hardware, degree, prompt and batch."""
    rows: defaultdict[tuple[str, int, int, int], list[tuple[float, float]]] = defaultdict(list)
    for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
        if int(row["token_size"]) == TOKENS:
            key = (row["hardware"], int(row["tensor_parallel"]), int(row["prompt_size"]), int(row["batch_size"]))
            rows[key].append((float(row["prompt_time"]) / 1e3, float(row["token_time"]) / 1e3))
    return {
        key: (statistics.median(prefill for prefill, _ in seen), statistics.median(step for _, step in seen))
        for key, seen in rows.items()
    }


def fitted(measured: dict[tuple[str, int, int, int], tuple[float, float]], kind: str) -> tuple[float, ...]:
    """Return prefill base and per token, decode base and per request, seconds; and the largest relative errors."""
    own = {key[2:]: times for key, times in measured.items() if key[:2] == KINDS[kind]}
    prompts = sorted((prompt, times[0]) for (prompt, batch), times in own.items() if batch == 1)
    batches = sorted(
        (batch, times[1])
        for (prompt, batch), times in own.items()
        if prompt == 512 and not (batch == 64 and KINDS[kind][1] == 2)
    )
    found: list[float] = []
    for points in (prompts, batches):
        x, y = np.array(points, dtype=np.float64).T
        slope, base = np.polyfit(x, y, 1, w=1 / y)
        found += [float(base), float(slope), float(np.abs((base + slope * x) / y - 1).max())]
    return (found[0], found[1], found[3], found[4], found[2], found[5])


def main() -> None:
    """Print the constants, and how far they are from those in use."""
    measured = medians(Path(sys.argv[1]) / "profiles" / "splitwise_llama2_70b.csv")
    print("kind      prefill ms  per token ms   step ms  per request ms  share   errors      in use")
    for kind in KINDS:
        base, token, step, request, prefill_error, step_error = fitted(measured, kind)
        core = LLAMA_70B[kind]
        same = np.allclose(
            (base, token, step, request),
            (core.prefill_base_s, core.prefill_s_per_token, core.decode_base_s, core.decode_s_per_request),
            rtol=0.01,
        )
        print(
            f"{kind:9} {1e3 * base:10.1f} {1e3 * token:13.4f} {1e3 * step:9.2f} {1e3 * request:15.3f} "
            f"{request / (step + request):6.4f}  {prefill_error:4.0%} {step_error:4.0%}  "
            f"{'the same' if same else 'DIFFERS'}"
        )


if __name__ == "__main__":
    main()
