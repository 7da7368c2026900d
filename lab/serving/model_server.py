"""How long a model server with continuous batching takes, and what it draws, by batch, tokens and clock.

All requests that it holds are decoded together, one token each per step. A step takes longer the more requests take
part and the lower the clock. A new request is first prefilled, which produces its first token. The delay that prefills
cause to other requests is part of the step times, if these were measured under load.

The stand-in server (``examples/pools/stand_in_server.py``) answers by the same times, in real time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from services.core.domain.errors import DomainError

CLOCK_SHARE = 0.9
"""Share of prefill and decode time that is inversely proportional to the clock; memory and host take the rest.

Source: FREESH Table 10: the 99th percentiles of TBT (122.68 against 28.19 ms) and TTFT (195.64 against 44.52 ms) under
MIAD (1.5, 100) are those of the lowest clock, 300 MHz of 1,410 MHz (appendix B.2): ``1 - share + share * 4.7 = 4.35``.
"""
POWER_FLOOR = 0.085
"""Power at clock 0, as a share of that at the highest: the line through the paper's points.

Source: FREESH Figure 14 (power is linear in the clock) and appendix B.2: two A100s draw about 200 W at 300 MHz and over
700 W at 1,410 MHz.
"""
HIGHEST_CLOCKS_MHZ = {"A100": 1_410.0, "H100": 1_980.0}
LOWEST_CLOCK_MHZ = 300.0


@dataclass(frozen=True, slots=True)
class ModelServer:
    """One instance: times at its highest clock, how they follow the clock, and its power.

    Attributes:
        highest_clock_mhz, lowest_clock_mhz: The range of its clock.
    """

    capacity: int  #: The most requests that it decodes together
    prefill_base_s: float  #: Seconds of a prefill, whatever its length
    prefill_s_per_token: float  #: Seconds for each token of the prompt
    decode_base_s: float  #: Seconds of a step, whatever its batch, > 0
    decode_s_per_request: float  #: Seconds for each request in the batch
    highest_clock_mhz: float = HIGHEST_CLOCKS_MHZ["A100"]
    lowest_clock_mhz: float = LOWEST_CLOCK_MHZ
    busy_w: float = 0.0  #: Power of all its GPUs with requests, at the highest clock
    idle_w: float = 0.0  #: Their power without requests
    clock_share: float = CLOCK_SHARE  #: Share of times that is inversely proportional to the clock, 0 .. 1.
    power_floor: float = POWER_FLOOR  #: Power at clock 0 as a share of that at the highest, 0 .. 1.
    kv_tokens: float = 0.0  #: Tokens of prompts and answers that its memory holds; 0 for any number

    def __post_init__(self) -> None:
        numbers = {each.name: float(getattr(self, each.name)) for each in fields(self)}
        if not all(math.isfinite(value) and value >= 0 for value in numbers.values()):
            raise DomainError("a model server's times, powers and shares are finite and not negative")
        if self.capacity < 1 or not self.decode_base_s > 0:
            raise DomainError("a model server decodes at least one request, in more than 0 s")
        if not 0 < self.lowest_clock_mhz <= self.highest_clock_mhz:
            raise DomainError("a model server's lowest clock is above 0 and not above its highest")
        if max(self.clock_share, self.power_floor) > 1:
            raise DomainError("shares of a model server are at most 1")

    def slowdown(self, clock_mhz: float) -> float:
        """Return times at a clock as multiples of those at the highest; clocks outside the range are clamped to it."""
        clock = min(max(clock_mhz, self.lowest_clock_mhz), self.highest_clock_mhz)
        return 1.0 + self.clock_share * (self.highest_clock_mhz / clock - 1.0)

    def prefill_s(self, input_tokens: float, clock_mhz: float) -> float:
        """Return the seconds from the start of a prefill to the first token."""
        return (self.prefill_base_s + self.prefill_s_per_token * input_tokens) * self.slowdown(clock_mhz)

    def has_memory(self, held_tokens: float, tokens: float) -> bool:
        """Return whether a request with this many tokens, prompt and answer, fits in addition to those that it holds.

        *Our reading*: a request's tokens are reserved when it begins, so that none has to give way later. One that is
        larger than the memory runs alone.
        """
        return not self.kv_tokens or held_tokens <= 0 or held_tokens + tokens <= self.kv_tokens

    def step_s(self, batch: float, clock_mhz: float) -> float:
        """Return the seconds of a decode step, which is the time between tokens of each request in the batch."""
        return (self.decode_base_s + self.decode_s_per_request * batch) * self.slowdown(clock_mhz)

    def power_w(self, clock_mhz: float, *, is_busy: bool) -> float:
        """Return the power of all its GPUs, watts: linear in the clock (FREESH Figure 14)."""
        clock = min(max(clock_mhz, self.lowest_clock_mhz), self.highest_clock_mhz)
        share = self.power_floor + (1.0 - self.power_floor) * clock / self.highest_clock_mhz
        return share * (self.busy_w if is_busy else self.idle_w)


LLAMA_70B: Mapping[str, ModelServer] = {
    "a100-tp2": ModelServer(64, 0.0329, 0.3373e-3, 0.05723, 0.489e-3),
    "a100-tp4": ModelServer(64, 0.0300, 0.2078e-3, 0.04322, 0.399e-3),
    "a100-tp8": ModelServer(64, 0.0362, 0.1334e-3, 0.04372, 0.393e-3),
    "h100-tp2": ModelServer(64, 0.0215, 0.1413e-3, 0.03673, 0.449e-3, HIGHEST_CLOCKS_MHZ["H100"]),
    "h100-tp4": ModelServer(64, 0.0271, 0.0897e-3, 0.02868, 0.326e-3, HIGHEST_CLOCKS_MHZ["H100"]),
    "h100-tp8": ModelServer(64, 0.0322, 0.0620e-3, 0.02974, 0.306e-3, HIGHEST_CLOCKS_MHZ["H100"]),
}
"""Llama-2-70B by GPU and tensor-parallel degree, as Splitwise measured it with batches of up to 64; without power.

Fitted by ``python -m lab.reproductions.serving_profiles``: steps within 7 %, prefills within 36 % at the shortest
prompts.
"""
