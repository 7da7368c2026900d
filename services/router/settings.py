"""Settings of the router."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from services.contracts.schema import maybe
from services.core.policies.freesh.laxity import Order
from services.kit.edge.settings import EdgeSettings


class RouterSettings(EdgeSettings):
    """``ROUTER_*``, and what all processes share."""

    model_config = SettingsConfigDict(env_prefix="ROUTER_")

    host: str = "127.0.0.1"
    port: int = Field(default=8050, ge=0, le=65_535)
    workers: int = Field(default=1, ge=1, le=256, description="Processes that share the port.")
    max_body_bytes: int = Field(default=32 * 1024 * 1024, ge=1024, description="Of a request.")
    max_answer_bytes: int = Field(default=64 * 1024 * 1024, ge=1024, description="Of an answer that is no stream.")

    stream_comment: bool = Field(
        default=True, description="Whether streams end with a comment line of their energy and grams."
    )

    order: Order = Field(default=Order.LLF, description="Of waiting requests: llf, fcfs, edf or srtf.")
    placement: Literal["carbon", "weights"] = Field(
        default="carbon", description="The cleanest server in time, or shares by weight as in the paper."
    )
    max_queue: int = Field(default=1_000, ge=0, description="Waiting requests of a class; beyond it requests get 429.")
    queue_timeout_s: float = Field(default=60, gt=0, description="How long a request waits for a server.")
    preemptions: int = Field(default=1, ge=0, description="How often a request may be preempted; 0 for never.")
    flex_wait_s: float = Field(
        default=540,
        ge=0,
        description="How long a request of the service tier flex waits for what others leave free; then it gets 429.",
    )
    attempts: int = Field(default=3, ge=1, le=20, description="Servers that a request is sent to, one after another.")
    max_requests_per_tenant: int = Field(default=4_096, ge=1, description="Of a tenant at once, in all processes.")

    connect_timeout_s: float = Field(default=2, gt=0)
    first_byte_timeout_s: float = Field(default=300, gt=0, description="Until a server begins to answer.")
    stream_first_byte_timeout_s: float = Field(
        default=20, gt=0, description="Until a server begins a stream that another one could answer."
    )
    silence_timeout_s: float = Field(default=60, gt=0, description="Between two pieces of an answer.")
    total_timeout_s: float = Field(default=3_600, gt=0)

    drain_s: float = Field(default=8, ge=0, description="How long a process that is told to end finishes requests.")

    table_poll_s: float = Field(default=0.4, gt=0, le=1, description="How often servers are asked for.")
    peer_host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address at which router processes, also those on other machines, reach this one.",
    )
    probe_s: float = Field(default=5, gt=0, description="How often each server is probed.")
    network_ms: dict[str, dict[str, float]] = Field(
        default_factory=dict[str, dict[str, float]],
        description="Milliseconds there and back from each region of clients to each place, as JSON: "
        '{"eu-west": {"germany": 12}}. Clients name theirs in x-wattshift-region; `default` is for all others.',
    )
    keys_dir: Path | None = maybe("Folder with a file for each upstream key.")

    @field_validator("network_ms")
    @classmethod
    def _not_negative(cls, value: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        for region, places in value.items():
            for place, ms in places.items():
                if not 0 <= ms <= 60_000:
                    raise ValueError(f"{region}.{place} must be milliseconds between 0 and 60000")
        return value
