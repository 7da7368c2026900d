"""What the router needs to know: which pool serves a model, and where its servers are.

Serving makes the table from its pools, its instances and the endpoints of others. Routers read it every second.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from services.contracts.clocks import ServerClocks
from services.contracts.schema import (
    LEAST,
    Flag,
    Instant,
    Int,
    Message,
    Name,
    Page,
    Real,
    is_empty,
    is_none,
    many,
    maybe,
    said,
)

ModelName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,199}$")]
"""The name of a model as clients send it, such as `meta-llama/Llama-3.1-70B-Instruct`."""
EndpointUrl = Annotated[str, StringConstraints(pattern=r"^https?://[^\s/?#@\x00]{1,255}(/[^\s?#\x00]{0,255})?$")]
RequestClassName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
AccuracyPct = Annotated[Real, Field(ge=0, le=100)]
EVERY_TENANT = "*"


class EndpointSpec(Message):
    """A model server that Wattshift does not run, registered by an operator."""

    url: EndpointUrl = said(
        "Base address without `/v1`. Its addresses must lie within `WATTSHIFT_ENDPOINT_NETWORKS`; with "
        "`https` its certificate is verified."
    )
    models: list[ModelName] = said("Models that it serves.", min_length=1, max_length=100)
    upstream_model: ModelName | None = maybe(
        "Name by which the server itself knows the model; null for the name asked for."
    )
    location: Name = said("Where it runs; the place of a pool, or a name of its own.")
    zone: Name | None = maybe("Grid zone, from which its carbon intensity follows.")
    request_class: RequestClassName | None = maybe("Class of requests that it is for; null for all.")
    weight: Real = said("Its share of requests, relative to others alike.", default=1, ge=LEAST, le=1_000)
    capacity: Int = said("Requests that it is given at once.", default=64, ge=1, le=100_000)
    power_w: Real | None = maybe("Its mean power; null if unknown, and then no energy is stated.", ge=0, le=1e7)
    upstream_key: Name | None = maybe(
        "Name of the file in the router's `ROUTER_KEYS_DIR` that contains its API key; null for none."
    )
    upstream_secret: Name | None = maybe(
        "Name of the secret of the endpoint's tenant that is its API key, instead of `upstream_key`. Set "
        "it again to replace the key."
    )
    tenants: list[Name | Literal["*"]] = many("Other tenants that may use it; `*` for all.", max_length=1_000)
    accuracy_pct: AccuracyPct | None = maybe("Accuracy of its variant of the models; null where all servers are alike.")
    draining: Flag = said("Whether it finishes its requests and is given no more.", default=False)

    @field_validator("url")
    @classmethod
    def _without_slash(cls, value: str) -> str:
        return value.rstrip("/")

    @model_validator(mode="after")
    def _has_one_key(self) -> Self:
        if self.upstream_key is not None and self.upstream_secret is not None:
            raise ValueError("its key is a secret (upstream_secret) or a file (upstream_key): name one of them")
        return self


class Endpoint(Message):
    """A registered endpoint."""

    name: str
    tenant_id: str
    spec: EndpointSpec
    created_at: Instant
    updated_at: Instant


class EndpointList(Page[Endpoint]):
    """Registered endpoints, by name."""


class RoutedClass(Message):
    """A class of requests under the plan in force."""

    name: str
    max_latency_s: float | None = None
    max_ttft_ms: float | None = None
    max_tbt_ms: float | None = None


class RoutedPool(Message):
    """A pool as routers need it."""

    name: str
    tenant_id: str
    tenants: list[str] = many("Other tenants that may use it; `*` for all.")
    models: list[str]
    fallback: list[str] = many("Models to try while no server answers.")
    tokenizer: str | None = None
    passes_priority: bool = False
    partition: str | None = maybe("The partition in force; null without a plan.")
    input_tokens: int | None = maybe("Threshold from which an input is long.")
    output_tokens: int | None = maybe("Threshold from which an output is long.")
    classes: list[RoutedClass] = Field(default_factory=list[RoutedClass])
    accuracy_gco2_per_kwh: float | None = maybe(
        "What a percentage point of its servers' accuracy is worth; null: nothing.",
        exclude_if=is_none,
    )
    starting: int | None = maybe(
        "Its instances that are wanted or start; requests without a server wait for them. Null: none does.",
        exclude_if=is_none,
    )


class Routed(Message):
    """A server that requests are sent to, or were until just now."""

    id: str
    url: str
    location: str
    state: Literal["ready", "draining"]
    job_id: str | None = None
    node_id: str | None = None
    gco2_per_kwh: float | None = maybe("Carbon intensity of its grid now.")
    is_intensity_estimated: bool = True
    pue: float = 1


class RoutedServer(Routed):
    """A model server."""

    pool: str | None = maybe("Null for a registered endpoint.")
    models: list[str] = many("Of a registered endpoint.")
    tenant_id: str
    tenants: list[str] = Field(default_factory=list[str])
    request_class: str | None = None
    keeps_no_class: bool = said("Whether it is kept without requests.", default=False)
    weight: float = 1
    capacity: int = 64
    upstream_model: str | None = None
    upstream_key: str | None = None
    upstream_secret: str | None = None
    upstream_secret_set_at: Instant | None = maybe(
        "When its secret was last set, or the key of an instance made; null if there is none."
    )
    gpus: int = 0
    latency_s: float | None = None
    ttft_ms: float | None = None
    tbt_ms: float | None = None
    power_w: float | None = None
    idle_w: float | None = None
    is_power_measured: bool = False
    full_power_w: float | None = maybe("Power at `max_qps`, by the profile of its class.")
    max_qps: float | None = None
    clocks: ServerClocks | None = maybe("Null where its clocks do not follow latency.")
    accuracy_pct: float | None = maybe("Of its variant of the model.", exclude_if=is_none)
    load_path: str | None = maybe(
        "Path of its metrics: how many requests it holds, and the time between their tokens.",
        exclude_if=is_none,
    )

    @property
    def takes_requests(self) -> bool:
        """Whether it may be given requests at all."""
        return self.state == "ready" and not self.keeps_no_class


class RoutedApp(Message):
    """An application as routers need it."""

    name: str
    tenant_id: str
    tenants: list[str] = many("Other tenants that may use it; `*` for all.")
    sla_p95_ms: float | None = maybe("95th percentile of latency, waiting included.")
    concurrency: int = said("Requests that an instance is given at once.", default=1, ge=1)
    most_accurate: str | None = maybe("Its most accurate variant.")


class RoutedAppServer(Routed):
    """An instance of an application: one variant on one GPU or slice."""

    app: str
    variant: str
    accuracy_pct: float
    slice: str | None = maybe("`1g` to `7g`; null where the GPU's slices are not known.")
    service_ms: float | None = maybe("Mean service time of a request, by the profile.")
    busy_w: float | None = maybe("Power above idle while it works, by the profile.")
    idle_w: float | None = maybe("Its share of its GPU's idle power.")


class RoutingTable(Message):
    """All pools that serve models, all applications, and the servers of both, at one moment."""

    made_at: Instant
    pools: list[RoutedPool]
    servers: list[RoutedServer]
    # left out while there are none, as routers of an older release refuse fields that they do not know
    apps: list[RoutedApp] = Field(default_factory=list[RoutedApp], exclude_if=is_empty)
    app_servers: list[RoutedAppServer] = Field(default_factory=list[RoutedAppServer], exclude_if=is_empty)


def may_use(tenant_id: str, owned: RoutedPool | RoutedApp | RoutedServer) -> bool:
    """Return whether a tenant owns a pool, an application or an endpoint, or its owner shares it with that tenant."""
    return tenant_id == owned.tenant_id or tenant_id in owned.tenants or EVERY_TENANT in owned.tenants


class UpstreamKey(Message):
    """The API key of a registered endpoint or of an instance, for the routers that send requests to it."""

    server: str = said("Its id in the routing table.")
    set_at: Instant
    value: str = Field(repr=False)


class UpstreamKeys(Message):
    """The keys of instances, and of all endpoints whose keys are secrets.

    ``missing`` says, by endpoint, why a key is not available.
    """

    keys: list[UpstreamKey]
    missing: dict[str, str] = Field(default_factory=dict[str, str])


class HeldRequests(Message):
    """How many requests one router process holds at draining servers."""

    router: Name
    held: dict[str, Annotated[Int, Field(ge=0)]] = said("By id of the server.", max_length=10_000)


class RequestUsage(Message):
    """Requests of one key, model and class that a server worked on within one window."""

    job_id: str = said("The server's job, or `endpoint:` and the name of an endpoint.")
    tenant_id: str
    key_id: str
    model: str
    request_class: str
    requests: Int = said("Requests that ended in the window.", ge=0)
    input_tokens: Int = Field(ge=0)
    output_tokens: Int = Field(ge=0)
    # left out while it is 0, as telemetry of an older release refuses fields that it does not know
    estimated_requests: Int = said(
        "Requests whose server did not state their tokens, which are estimates then.",
        default=0,
        ge=0,
        exclude_if=is_empty,
    )
    share_s: Real = said("Seconds of the server, divided equally among the requests it held.", ge=0)
    energy_j: Real = said("The router's own estimate.", ge=0)
    carbon_gco2: Real = said("The router's own estimate.")


class UsageReport(Message):
    """What one router process saw in a one-minute window. Sending it again replaces it."""

    router: Name
    start_at: Instant = said("Start of the window, a whole minute.")
    usages: list[RequestUsage] = Field(max_length=100_000)


class UsageReceipt(Message):
    """The answer to a usage report; it is on disk by then."""

    usages: int


class RouterState(Message):
    """What a router process tells the others."""

    at_s: float = said("When it was written, UTC seconds.")
    held: dict[str, int] = said("Requests that it holds, by server.", default_factory=dict[str, int])
    started_at_s: float | None = maybe("When it was started, UTC seconds.")
    address: str | None = maybe("`HOST:PORT` at which other router processes reach it.")


class LimitsState(Message):
    """What a router process tells other routers, and a gateway other gateways, about tenants' limits."""

    at_s: float = said("When it was written, UTC seconds.")
    started_at_s: float = said("When the process was started, UTC seconds.")
    taken: dict[str, int] = said(
        "Requests that it has let through since then, by tenant; and by `KEY requests` and `KEY tokens`."
    )
    open: dict[str, int] = said("Requests that it has not answered yet, by tenant.")
    months: dict[str, tuple[int, int]] = said(
        "Tokens used since then of budgets for a month, by `KEY MONTH`, and those expected of requests in service.",
        default_factory=dict,
    )


class ServerLatency(Message):
    """What one router process saw of a server's requests of one class in one second."""

    server: str
    job_id: str | None
    request_class: str
    held: int = said("Requests that it holds now.")
    waiting: int = said("Requests that wait in the class's queue.")
    first_tokens: int = said("Answers whose first token came in that second.")
    mean_ttft_ms: float | None = said("Of those, the wait in the queue included. Null without any.")
    max_ttft_ms: float | None
    mean_wait_ms: float | None = maybe("Of those, the wait in the queue alone.")
    tokens: int = said(
        "Tokens of streams that came in that second, first ones left out, and those of whole answers that ended in it.",
        default=0,
    )
    mean_tbt_ms: float | None = said("The mean time that each of these tokens took. Null without any.")
    max_tbt_ms: float | None
    ended: int = said("Complete answers that ended in that second.")
    mean_e2e_s: float | None = maybe("Of those. Null without any.")
    max_e2e_s: float | None = said("Of those. Null without any.")
    ended_tokens: int = said("Of those: all their tokens.", default=0)
    # left out while it is 0, as agents of an older release, which take all tokens for those of that second, refuse it
    oldest_s: float = said(
        "How long ago the oldest of these tokens were begun, where some are of answers that were not "
        "streamed: their mean time is at most the answer's time at the server divided by its tokens, or what the "
        "server itself measured. 0 where all were seen to come in that second.",
        default=0.0,
        exclude_if=is_empty,
    )
    clocks: ServerClocks | None = maybe("How its clocks follow these latencies; null if they do not.")


class LatencyReport(Message):
    """What one router process saw of the servers on one node in the second that ended at `at`."""

    router: str
    at: Instant
    servers: list[ServerLatency]
