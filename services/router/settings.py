"""Settings of the router."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from services.contracts.schema import maybe, said
from services.core.policies.freesh.laxity import Order
from services.kit.edge.settings import EdgeSettings
from services.kit.extras import first_missing


class RouterSettings(EdgeSettings):
    """``ROUTER_*``, and what all processes share."""

    model_config = SettingsConfigDict(env_prefix="ROUTER_")

    host: str = "127.0.0.1"
    port: int = Field(default=8050, ge=0, le=65_535)
    workers: int = said("Processes that share the port.", default=1, ge=1, le=256)
    max_body_bytes: int = said("Of a request.", default=32 * 1024 * 1024, ge=1024)
    max_answer_bytes: int = said("Of an answer that is no stream.", default=64 * 1024 * 1024, ge=1024)

    stream_comment: bool = said("Whether streams end with a comment line of their energy and grams.", default=True)

    order: Order = said("Of waiting requests: llf, fcfs, edf or srtf.", default=Order.LLF)
    placement: Literal["carbon", "weights"] = said(
        "The cleanest server in time, or shares by weight as in the paper.", default="carbon"
    )
    max_queue: int = said("Waiting requests of a class; beyond it requests get 429.", default=1_000, ge=0)
    queue_timeout_s: float = said("How long a request waits for a server.", default=60, gt=0)
    preemptions: int = said("How often a request may be preempted; 0 for never.", default=1, ge=0)
    flex_wait_s: float = said(
        "How long a request of the service tier flex waits for what others leave free; then it gets 429.",
        default=540,
        ge=0,
    )
    attempts: int = said("Servers that a request is sent to, one after another.", default=3, ge=1, le=20)
    max_requests_per_tenant: int = said("Of a tenant at once, in all processes.", default=4_096, ge=1)

    connect_timeout_s: float = Field(default=2, gt=0)
    first_byte_timeout_s: float = said("Until a server begins to answer.", default=300, gt=0)
    stream_first_byte_timeout_s: float = said(
        "Until a server begins a stream that another one could answer.", default=20, gt=0
    )
    silence_timeout_s: float = said("Between two pieces of an answer.", default=60, gt=0)
    total_timeout_s: float = Field(default=3_600, gt=0)

    drain_s: float = said("How long a process that is told to end finishes requests.", default=8, ge=0)

    table_poll_s: float = said("How often servers are asked for.", default=0.4, gt=0, le=1)
    peer_host: str = said(
        "Address at which router processes, also those on other machines, reach this one.",
        default="127.0.0.1",
        min_length=1,
    )
    probe_s: float = said("How often each server is probed.", default=5, gt=0)
    network_ms: dict[str, dict[str, float]] = said(
        "Milliseconds there and back from each region of clients to each place, as JSON: "
        '{"eu-west": {"germany": 12}}. Clients name theirs in x-wattshift-region; `default` is for all others.',
        default_factory=dict[str, dict[str, float]],
    )
    keys_dir: Path | None = maybe("Folder with a file for each upstream key.")

    picker_port: int | None = maybe(
        "Port at which gateways of Kubernetes' Gateway API ask for servers (Envoy's ext_proc); none by default.",
        ge=0,
        le=65_535,
    )
    picker_key_file: Path | None = maybe(
        "File with the API key that requests of such gateways count as if they have none of their own."
    )

    @field_validator("picker_port")
    @classmethod
    def _has_packages(cls, value: int | None) -> int | None:
        if value is not None and (hint := first_missing("grpc")) is not None:
            raise ValueError(hint)
        return value

    @field_validator("network_ms")
    @classmethod
    def _not_negative(cls, value: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        for region, places in value.items():
            for place, ms in places.items():
                if not 0 <= ms <= 60_000:
                    raise ValueError(f"{region}.{place} must be milliseconds between 0 and 60000")
        return value
