"""Settings of admission."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_settings import NoDecode, SettingsConfigDict

from services.contracts.schema import Account
from services.kit.networks import Network, read_networks
from services.kit.settings import SealingSettings


def _networks(value: Any) -> Any:
    return read_networks(value) if isinstance(value, str) else value


Networks = Annotated[tuple[Network, ...], NoDecode, BeforeValidator(_networks)]


class ModelPrice(BaseModel):
    """What a million tokens cost."""

    model_config = ConfigDict(extra="forbid")

    input: float = Field(ge=0, le=1e9)
    output: float = Field(ge=0, le=1e9)


class AdmissionSettings(SealingSettings):
    """``ADMISSION_*``, and the settings that all processes share."""

    model_config = SettingsConfigDict(env_prefix="ADMISSION_")

    host: str = "127.0.0.1"
    port: int = Field(default=8020, ge=0, le=65_535)
    first_account: Account | Literal[""] = Field(
        default="",
        description="Account that the jobs of the installation's own admin key run as on nodes; empty: its tenant's.",
    )
    webhook_key: str = Field(
        "", description="Secret that those of webhooks follow from; by default WATTSHIFT_SERVICE_TOKEN."
    )
    max_jobs_per_commit: int = Field(
        default=2_000, ge=1, description="Jobs in one commit; submissions beyond that wait for the next commit."
    )
    commit_patience_s: float = Field(
        default=4, gt=0, description="How long a submission waits for an unreachable database before it is refused."
    )
    budget_interval_s: float = Field(
        default=10, gt=0, le=3_600, description="How often what is used of budgets is counted."
    )
    model_prices: dict[str, ModelPrice] = Field(
        default_factory=dict[str, ModelPrice],
        description="What keys' budgets in money are counted by: the price of a million tokens of prompts and answers, "
        'by model, as JSON: {"llama-70b": {"input": 0.6, "output": 2.4}}.',
    )
    capacity_max_age_s: float = Field(
        default=5, gt=0, description="How old the nodes' capacity may be when a gang is checked against it."
    )
    upload_max_bytes: int = Field(default=64 * 2**20, ge=1, description="Largest archive of a job's files, compressed.")
    upload_quota_bytes: int = Field(default=2**30, ge=1, description="All archives of a tenant together.")
    upload_retention_s: float = Field(
        default=7 * 86_400,
        ge=3_600,
        description="How long after its last use an archive is kept that no job needs any more.",
    )
    jobs_keep_days: float = Field(
        default=90,
        ge=0,
        le=36_500,
        description="How long jobs are kept after their end, with all that happened to them; 0: for ever. Their sums "
        "stay in reports.",
    )
    idempotency_keep_days: float = Field(
        default=30, ge=0, le=36_500, description="How long an idempotency key stands for its submission; 0: for ever."
    )
    audit_keep_days: float = Field(
        default=730, ge=0, le=36_500, description="How long the audit log is kept; 0: for ever."
    )
    event_poll_s: float = Field(
        default=0.15, gt=0, description="How often new events are read while clients follow them."
    )
    change_poll_s: float = Field(
        default=1.0, gt=0, description="How often pages that are open are told what else than jobs has changed."
    )
    event_buffer: int = Field(default=10_000, ge=1, description="Events kept in memory for clients that follow them.")
    keep_alive_s: float = Field(
        default=15, gt=0, description="An event stream without events gets a comment this often."
    )
    log_poll_s: float = Field(default=0.4, gt=0, description="How often new output is read while a client follows it.")
    webhook_networks: Networks = Field(
        default=(),
        description="Networks besides public addresses that webhooks may be sent to, also over http, such as "
        "10.0.0.0/8,127.0.0.0/8.",
    )
    webhook_poll_s: float = Field(
        default=1, gt=0, le=3_600, description="How often webhooks' messages are made and sent."
    )
    webhook_timeout_s: float = Field(default=10, gt=0, le=25, description="How long one attempt may take.")
    webhook_settle_s: float = Field(
        default=10, ge=0, le=3_600, description="How long after a job's end its message is made, for the last energy."
    )
    webhook_retry_s: float = Field(
        default=3 * 86_400, gt=0, le=30 * 86_400, description="How long a message is attempted before it is given up."
    )
    webhook_disable_after_s: float = Field(
        default=5 * 86_400, gt=0, le=60 * 86_400, description="A webhook that only failed for so long is disabled."
    )
    webhook_retention_s: float = Field(
        default=14 * 86_400, gt=0, description="How long messages are kept once they were accepted or given up."
    )
    webhooks_per_tenant: int = Field(default=20, ge=0, le=1_000, description="Most webhooks of one tenant.")
    agent_timeout_s: float = Field(
        default=5, gt=0, description="How long a node may take to answer a request for output."
    )
    exec_sessions_per_key: int = Field(
        default=20, ge=0, description="Commands in running jobs that one API key may have open at once."
    )
