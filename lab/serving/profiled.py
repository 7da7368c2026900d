"""Model servers as a pool's profile describes them, and the tokens that their memory holds."""

from __future__ import annotations

import math
from dataclasses import replace

from lab.serving.model_server import ModelServer
from services.core.domain.errors import DomainError
from services.core.policies.freesh.server_choice import BATCH_SLOWDOWN, PREFILL_BASE_TOKENS

MEMORY_SHARE = 0.9
"""Of its GPUs' memory, what a server uses for weights and the KV cache: vLLM's default (gpu_memory_utilization)."""


def profiled_server(
    *,
    max_qps: float,
    latency_s: float,
    ttft_ms: float,
    tbt_ms: float,
    busy_w: float,
    idle_w: float,
    highest_clock_mhz: float,
) -> ModelServer:
    """Return the server that behaves as a pool's profile says at the load that the profile was measured at.

    *Our reading* of a profile: at ``max_qps`` it holds ``max_qps * latency_s`` requests (Little's law), which is its
    capacity; with that many its TBT is ``tbt_ms`` and its TTFT ``ttft_ms``, the interference of prefills included. With
    fewer, steps are shorter by ``BATCH_SLOWDOWN``.

    Args:
        max_qps: Requests per second that it serves, > 0.
        latency_s: Mean time of a request at that load, > 0.
        ttft_ms, tbt_ms: Mean times to the first and between further tokens at that load.
        busy_w, idle_w: Power of the whole instance at its highest clock, with requests and without.
        highest_clock_mhz: Of its GPUs.

    Raises:
        DomainError: A value is not finite, or not above 0 where it must be.
    """
    numbers = (max_qps, latency_s, ttft_ms, tbt_ms)
    if not all(math.isfinite(each) for each in numbers) or not min(max_qps, latency_s, tbt_ms) > 0:
        raise DomainError("a profile needs a rate, a latency and a time between tokens above 0")
    capacity = max(round(max_qps * latency_s), 1)
    alone_s = 1e-3 * tbt_ms / (1.0 + BATCH_SLOWDOWN * (capacity - 1))
    return ModelServer(
        capacity=capacity,
        prefill_base_s=1e-3 * ttft_ms,
        prefill_s_per_token=0.0,
        decode_base_s=alone_s * (1.0 - BATCH_SLOWDOWN),
        decode_s_per_request=alone_s * BATCH_SLOWDOWN,
        highest_clock_mhz=highest_clock_mhz,
        busy_w=busy_w,
        idle_w=idle_w,
    )


def kv_tokens(memory_gib: float, weights_gib: float, kib_per_token: float) -> float:
    """Return how many tokens fit into the memory that a model leaves free.

    Args:
        memory_gib: Of all its GPUs together.
        weights_gib: Of the model.
        kib_per_token: Of the KV cache, over all GPUs, > 0.

    Raises:
        DomainError: The model does not fit, or a value is out of range.
    """
    if not all(math.isfinite(each) and each >= 0 for each in (memory_gib, weights_gib)) or not kib_per_token > 0:
        raise DomainError("memory and weights are finite and not negative, and a token takes more than 0 KiB")
    left_gib = MEMORY_SHARE * memory_gib - weights_gib
    if not left_gib > 0:
        raise DomainError(
            f"{weights_gib:g} GiB of weights leave no room for tokens in {100 * MEMORY_SHARE:g} % of {memory_gib:g} GiB"
        )
    return left_gib * 2**20 / kib_per_token


def for_prompts(server: ModelServer, mean_tokens: float) -> ModelServer:
    """Return a server whose prefills take longer for longer prompts, but as long as before at the given mean.

    Raises:
        DomainError: the mean is not finite or is below 0.
    """
    if not math.isfinite(mean_tokens) or mean_tokens < 0:
        raise DomainError(f"the mean length of prompts is at least 0 tokens, not {mean_tokens}")
    per_token_s = server.prefill_s(mean_tokens, server.highest_clock_mhz) / (PREFILL_BASE_TOKENS + mean_tokens)
    return replace(server, prefill_base_s=PREFILL_BASE_TOKENS * per_token_s, prefill_s_per_token=per_token_s)
