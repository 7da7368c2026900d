"""Settings of admission."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_settings import NoDecode, SettingsConfigDict

from services.contracts.schema import Account, said
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
    first_account: Account | Literal[""] = said(
        "Account that the jobs of the installation's own admin key run as on nodes; empty: its tenant's.", default=""
    )
    webhook_key: str = Field(
        "", description="Secret that those of webhooks follow from; by default WATTSHIFT_SERVICE_TOKEN."
    )
    max_jobs_per_commit: int = said(
        "Jobs in one commit; submissions beyond that wait for the next commit.", default=2_000, ge=1
    )
    commit_patience_s: float = said(
        "How long a submission waits for an unreachable database before it is refused.", default=4, gt=0
    )
    budget_interval_s: float = said("How often what is used of budgets is counted.", default=10, gt=0, le=3_600)
    model_prices: dict[str, ModelPrice] = said(
        "What keys' budgets in money are counted by: the price of a million tokens of prompts and answers, "
        'by model, as JSON: {"llama-70b": {"input": 0.6, "output": 2.4}}.',
        default_factory=dict[str, ModelPrice],
    )
    capacity_max_age_s: float = said(
        "How old the nodes' capacity may be when a gang is checked against it.", default=5, gt=0
    )
    upload_max_bytes: int = said("Largest archive of a job's files, compressed.", default=64 * 2**20, ge=1)
    upload_quota_bytes: int = said("All archives of a tenant together.", default=2**30, ge=1)
    upload_retention_s: float = said(
        "How long after its last use an archive is kept that no job needs any more.", default=7 * 86_400, ge=3_600
    )
    jobs_keep_days: float = said(
        "How long jobs are kept after their end, with all that happened to them; 0: for ever. Their sums "
        "stay in reports.",
        default=90,
        ge=0,
        le=36_500,
    )
    idempotency_keep_days: float = said(
        "How long an idempotency key stands for its submission; 0: for ever.", default=30, ge=0, le=36_500
    )
    audit_keep_days: float = said("How long the audit log is kept; 0: for ever.", default=730, ge=0, le=36_500)
    event_poll_s: float = said("How often new events are read while clients follow them.", default=0.15, gt=0)
    change_poll_s: float = said(
        "How often pages that are open are told what else than jobs has changed.", default=1.0, gt=0
    )
    event_buffer: int = said("Events kept in memory for clients that follow them.", default=10_000, ge=1)
    keep_alive_s: float = said("An event stream without events gets a comment this often.", default=15, gt=0)
    log_poll_s: float = said("How often new output is read while a client follows it.", default=0.4, gt=0)
    cells_poll_s: float = said("How often cells are asked what their jobs do.", default=2, gt=0, le=60)
    cells_again_s: float = said(
        "How often jobs that wait are compared with what other cells offer by then.", default=300, gt=0
    )
    webhook_networks: Networks = said(
        "Networks besides public addresses that webhooks may be sent to, also over http, such as "
        "10.0.0.0/8,127.0.0.0/8.",
        default=(),
    )
    webhook_poll_s: float = said("How often webhooks' messages are made and sent.", default=1, gt=0, le=3_600)
    webhook_timeout_s: float = said("How long one attempt may take.", default=10, gt=0, le=25)
    webhook_settle_s: float = said(
        "How long after a job's end its message is made, for the last energy.", default=10, ge=0, le=3_600
    )
    webhook_retry_s: float = said(
        "How long a message is attempted before it is given up.", default=3 * 86_400, gt=0, le=30 * 86_400
    )
    webhook_disable_after_s: float = said(
        "A webhook that only failed for so long is disabled.", default=5 * 86_400, gt=0, le=60 * 86_400
    )
    webhook_retention_s: float = said(
        "How long messages are kept once they were accepted or given up.", default=14 * 86_400, gt=0
    )
    webhooks_per_tenant: int = said("Most webhooks of one tenant.", default=20, ge=0, le=1_000)
    agent_timeout_s: float = said("How long a node may take to answer a request for output.", default=5, gt=0)
    exec_sessions_per_key: int = said(
        "Commands in running jobs that one API key may have open at once.", default=20, ge=0
    )
