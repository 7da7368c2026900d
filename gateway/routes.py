"""The public API as one table: which path goes to which service, who may ask, and what goes in and comes out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from services.contracts import (
    carbon,
    carbon_aware,
    identity,
    jobs,
    nodes,
    optimize,
    policies,
    pools,
    predictions,
    profiles,
    queries,
    reports,
    serving,
    simulations,
)
from services.contracts.identity import IDEMPOTENCY_HEADER, Role

JSON = "application/json"
EVENTS = "text/event-stream"
TEXT = "text/plain"


class Upstream(StrEnum):
    """The services behind the gateway."""

    ADMISSION = "admission"
    CARBON = "carbon service"
    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"
    SIMULATOR = "simulator"
    TELEMETRY = "telemetry"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One operation of the public API.

    Attributes:
        path: Segments in braces match one segment of ``services.kit.edge.matching.SEGMENT``.
        body: Type of the JSON body; None where the operation takes none.
        answer: Type of the JSON answer; None where ``media`` is not JSON or there is no body.
        status: Of success.
        headers: Request headers the operation reads, besides the usual ones.
        statuses: What else it answers, besides the problems every operation may answer.
        has_large_body: Whether the body may be as large as a batch's.
    """

    method: str
    path: str
    to: Upstream
    summary: str
    tag: str
    role: Role = Role.USER
    query: Any = None
    body: Any = None
    answer: Any = None
    media: str = JSON
    status: int = 200
    headers: tuple[str, ...] = ()
    statuses: tuple[tuple[int, str], ...] = ()
    has_large_body: bool = False

    @property
    def answers_head(self) -> bool:
        """Whether a GET answers HEAD too, which a stream does not."""
        return self.media == JSON

    @property
    def operation_id(self) -> str:
        """A name for generated clients: `get_jobs_job_id_events`."""
        words = self.path.replace("/v1/", "/").replace("{", "").replace("}", "").replace(":", "_").replace("-", "_")
        return self.method.lower() + words.replace("/", "_")


def _route(method: str, path: str, to: Upstream, tag: str, summary: str, **more: Any) -> Route:
    return Route(method=method, path=path, to=to, tag=tag, summary=summary, **more)


_A, _C, _O, _S, _T, _W = (
    Upstream.ADMISSION,
    Upstream.CARBON,
    Upstream.OPTIMIZER,
    Upstream.SCHEDULER,
    Upstream.TELEMETRY,
    Upstream.SIMULATOR,
)
_UNPOWERED = ((409, "Its state does not allow it: `conflict`, or nobody can power it: `capability_missing`."),)
_CONFLICT = (409, "The job's state does not allow it: `invalid_transition`.")

SUBMIT = _route(
    *("POST", "/v1/jobs", _A, "jobs", "Submit a job; a 201 is on disk"),
    body=jobs.JobSpec,
    answer=jobs.SubmittedJob,
    status=201,
    headers=(IDEMPOTENCY_HEADER,),
)
SUBMIT_BATCH = _route(
    *("POST", "/v1/jobs:batch", _A, "jobs", "Submit up to 1,000 jobs, all or none"),
    body=jobs.JobBatch,
    answer=jobs.SubmittedBatch,
    status=201,
    headers=(IDEMPOTENCY_HEADER,),
    has_large_body=True,
)

JOBS = (
    SUBMIT,
    SUBMIT_BATCH,
    _route("GET", "/v1/jobs", _A, "jobs", "List jobs, newest first", query=queries.JobQuery, answer=jobs.JobList),
    _route(
        *("GET", "/v1/jobs/{job_id}", _A, "jobs", "Look at a job"),
        answer=jobs.Job,
        headers=("if-none-match",),
        statuses=((304, "Unchanged since the `ETag` in `If-None-Match`."),),
    ),
    _route(
        *("POST", "/v1/jobs/{job_id}/cancel", _A, "jobs", "Cancel a job; twice is as good as once"),
        answer=jobs.Job,
        statuses=(_CONFLICT,),
    ),
    _route(
        *("POST", "/v1/jobs/{job_id}/hold", _A, "jobs", "Hold a job back; one that runs is stopped with its grace"),
        answer=jobs.Job,
        statuses=(_CONFLICT,),
    ),
    _route(
        *("POST", "/v1/jobs/{job_id}/release", _A, "jobs", "Let a held job run"),
        answer=jobs.Job,
        statuses=(_CONFLICT,),
    ),
    _route(
        *("GET", "/v1/jobs/{job_id}/events", _A, "events", "Follow a job's events to its end"),
        query=queries.EventQuery,
        media=EVENTS,
        headers=("last-event-id",),
        statuses=((204, "The job has ended and the client has seen it all; it need not come back."),),
    ),
    _route(
        *("GET", "/v1/events", _A, "events", "Follow the events of all one's jobs, from now on"),
        query=queries.EventQuery,
        media=EVENTS,
        headers=("last-event-id",),
    ),
    _route(*("GET", "/v1/jobs/{job_id}/logs", _A, "jobs", "Read what a job wrote"), query=queries.LogQuery, media=TEXT),
    _route(
        *("GET", "/v1/jobs/{job_id}/profile", _S, "jobs", "What power limits and clocks do to jobs of its kind"),
        answer=profiles.JobProfile,
    ),
    _route(
        *("GET", "/v1/predictions/{job_id}", _S, "jobs", "How long a job was foretold to run, and how sure that was"),
        answer=predictions.JobPrediction,
        statuses=((409, "Nothing was foretold of it: `conflict`."),),
    ),
    _route(
        *("GET", "/v1/jobs/{job_id}/footprint", _T, "footprint", "A job's energy and emissions, with the intensities"),
        query=queries.LedgerQuery,
        answer=reports.JobFootprintReport,
    ),
)

ACCESS = (
    _route(
        *("POST", "/v1/tenants", _A, "access", "Make a tenant"),
        role=Role.ADMIN,
        body=identity.TenantSpec,
        answer=identity.Tenant,
        status=201,
        statuses=((409, "There is such a tenant: `conflict`."),),
    ),
    _route(
        *("GET", "/v1/tenants", _A, "access", "List tenants"),
        role=Role.OPERATOR,
        query=queries.PageQuery,
        answer=identity.TenantList,
    ),
    _route(
        *("GET", "/v1/tenants/{tenant_id}", _A, "access", "Look at a tenant"),
        role=Role.OPERATOR,
        answer=identity.Tenant,
    ),
    _route(
        *("PATCH", "/v1/tenants/{tenant_id}", _A, "access", "Change a tenant's limits"),
        role=Role.ADMIN,
        body=identity.TenantChange,
        answer=identity.Tenant,
    ),
    _route(
        *("POST", "/v1/keys", _A, "access", "Make an API key; only this answer holds its secret"),
        role=Role.ADMIN,
        body=identity.KeySpec,
        answer=identity.NewApiKey,
        status=201,
    ),
    _route(
        *("GET", "/v1/keys", _A, "access", "List API keys"),
        role=Role.ADMIN,
        query=queries.PageQuery,
        answer=identity.KeyList,
    ),
    _route(
        *("DELETE", "/v1/keys/{key_id}", _A, "access", "Revoke an API key"),
        role=Role.ADMIN,
        status=204,
        statuses=((409, "It is the last admin key: `conflict`."),),
    ),
    _route(
        *("GET", "/v1/audit", _A, "access", "What operators and admins did, newest first"),
        role=Role.OPERATOR,
        query=queries.PageQuery,
        answer=identity.AuditList,
    ),
)

CLUSTER = (
    _route("GET", "/v1/nodes", _T, "nodes", "List the nodes", role=Role.OPERATOR, answer=nodes.NodeList),
    _route("GET", "/v1/nodes/{node_id}", _T, "nodes", "Look at a node", role=Role.OPERATOR, answer=nodes.Node),
    _route(
        *("POST", "/v1/nodes/{node_id}/drain", _T, "nodes", "Start nothing more on a node"),
        role=Role.OPERATOR,
        answer=nodes.Node,
    ),
    _route(
        *("POST", "/v1/nodes/{node_id}/resume", _T, "nodes", "Let a drained node take work again"),
        role=Role.OPERATOR,
        answer=nodes.Node,
    ),
    *(
        _route(
            *("POST", f"/v1/nodes/{{node_id}}/{verb}", _S, "nodes", summary),
            role=Role.OPERATOR,
            answer=nodes.NodePower,
            statuses=statuses,
        )
        for verb, summary, statuses in (
            ("sleep", "Power an idle node down", _UNPOWERED),
            ("wake", "Wake a node", _UNPOWERED),
            ("pin-awake", "Keep a node awake, and wake it", ()),
            ("unpin", "Let plans power a node down again", ()),
        )
    ),
    _route(
        *("GET", "/v1/reports/footprint", _T, "footprint", "Energy and emissions by job, project, tenant or node"),
        query=queries.FootprintQuery,
        answer=reports.FootprintReport,
    ),
    _route(
        *("GET", "/v1/reports/history", _T, "jobs", "Past jobs as they ran, for export and replay"),
        query=queries.PastJobsQuery,
        answer=reports.PastJobs,
    ),
    _route(
        *("GET", "/v1/invariants", _T, "footprint", "Hold the live system against its own rules"),
        role=Role.OPERATOR,
        answer=reports.InvariantReport,
    ),
    _route("GET", "/v1/policies", _S, "policies", "List the policies", answer=policies.PolicyList),
    _route("GET", "/v1/policies/active", _S, "policies", "Which policy decides now", answer=policies.ActivePolicy),
    _route(
        *("PUT", "/v1/policies/active", _S, "policies", "Choose the policy and its parameters"),
        role=Role.OPERATOR,
        body=policies.PolicyChoice,
        answer=policies.ActivePolicy,
        statuses=((409, "Changed by somebody else meanwhile: `conflict`."),),
    ),
    _route(
        *(
            "GET",
            "/v1/predictions/models",
            _S,
            "policies",
            "Versions of the model of job lengths, and how good they are",
        ),
        role=Role.OPERATOR,
        answer=predictions.LengthModelList,
    ),
    _route("GET", "/v1/policies/{name}", _S, "policies", "Look at a policy", answer=policies.PolicyDescription),
    _route(
        *("GET", "/v1/plans", _S, "policies", "List the rounds that were held, newest first"),
        role=Role.OPERATOR,
        query=queries.PlanQuery,
        answer=policies.PlanList,
    ),
    _route(
        *("GET", "/v1/plans/{round_number}", _S, "policies", "Look at a round"),
        role=Role.OPERATOR,
        answer=policies.PlanSummary,
    ),
)

CARBON = (
    _route("GET", "/v1/carbon/zones", _C, "carbon", "List the grid zones", answer=carbon.ZoneList),
    _route(
        *("GET", "/v1/carbon/{zone}/current", _C, "carbon", "The intensity in force now"),
        query=queries.SignalQuery,
        answer=carbon.CurrentIntensity,
    ),
    _route(
        *("GET", "/v1/carbon/{zone}/history", _C, "carbon", "Past intensities, oldest first"),
        query=queries.HistoryQuery,
        answer=carbon.IntensityHistory,
    ),
    _route(
        *("GET", "/v1/carbon/{zone}/forecast", _C, "carbon", "Intensities ahead"),
        query=queries.ForecastQuery,
        answer=carbon.IntensityForecast,
    ),
    _route(
        *("GET", "/v1/carbon/{zone}/forecast/backtest", _C, "carbon", "How far our own forecasts were off"),
        query=queries.SignalQuery,
        answer=carbon.ForecastBacktest,
    ),
    _route(
        *("GET", "/v1/carbon/{zone}/outlook", _C, "carbon", "History, now and forecast as one curve"),
        query=queries.OutlookQuery,
        answer=carbon.IntensityOutlook,
    ),
)

_NOTHING = ((204, "Nothing was measured in that period."),)
_NO_FORECAST = ((501, "There is no forecast: `no_forecast`."),)

CARBON_AWARE = (
    _route(
        *("GET", "/emissions/bylocation", _C, "carbon-aware", "What was measured at a location"),
        query=carbon_aware.OneLocation,
        answer=list[carbon_aware.EmissionsData],
        statuses=_NOTHING,
    ),
    _route(
        *("GET", "/emissions/bylocations", _C, "carbon-aware", "What was measured at several locations"),
        query=carbon_aware.Locations,
        answer=list[carbon_aware.EmissionsData],
        statuses=_NOTHING,
    ),
    _route(
        *("GET", "/emissions/bylocations/best", _C, "carbon-aware", "The cleanest intervals"),
        query=carbon_aware.Locations,
        answer=list[carbon_aware.EmissionsData],
        statuses=_NOTHING,
    ),
    _route(
        *("GET", "/emissions/forecasts/current", _C, "carbon-aware", "Current forecasts in sliding windows"),
        query=carbon_aware.ForecastsQuery,
        answer=list[carbon_aware.EmissionsForecast],
        statuses=_NO_FORECAST,
    ),
    _route(
        *("POST", "/emissions/forecasts/batch", _C, "carbon-aware", "Forecasts as they were known at other times"),
        body=carbon_aware.ForecastRequests,
        answer=list[carbon_aware.EmissionsForecast],
        statuses=_NO_FORECAST,
    ),
    _route(
        *("GET", "/emissions/average-carbon-intensity", _C, "carbon-aware", "The mean of a period"),
        query=carbon_aware.OneLocation,
        answer=carbon_aware.CarbonIntensity,
        statuses=_NOTHING,
    ),
    _route(
        *("POST", "/emissions/average-carbon-intensity/batch", _C, "carbon-aware", "The means of several periods"),
        body=carbon_aware.IntensityRequests,
        answer=list[carbon_aware.CarbonIntensity],
    ),
    _route(
        *("GET", "/locations", _C, "carbon-aware", "The locations there are"),
        answer=dict[str, carbon_aware.Location],
    ),
)

_ENDED = (409, "The solve has ended: `invalid_transition`.")

OPTIMIZER = (
    _route(
        *("POST", "/v1/optimize/carbon-bound", _O, "optimizer", "The least carbon any schedule could reach"),
        body=optimize.CarbonBoundRequest,
        answer=optimize.SolveSummary,
        status=202,
        headers=(IDEMPOTENCY_HEADER,),
        statuses=((200, "The same problem is solved already."),),
        has_large_body=True,
    ),
    _route(
        *("POST", "/v1/optimize/pools", _O, "optimizer", "LLM instances by place, mode and class of requests"),
        body=pools.PoolsRequest,
        answer=optimize.SolveSummary,
        status=202,
        headers=(IDEMPOTENCY_HEADER,),
        statuses=((200, "The same problem is solved already."),),
        has_large_body=True,
    ),
    _route(
        *("GET", "/v1/optimize", _O, "optimizer", "List solves, newest first"),
        query=optimize.SolveQuery,
        answer=optimize.SolveList,
    ),
    _route("GET", "/v1/optimize/{solve_id}", _O, "optimizer", "Look at a solve", answer=optimize.Solve),
    _route(
        *("DELETE", "/v1/optimize/{solve_id}", _O, "optimizer", "Cancel a solve that is queued or running"),
        answer=optimize.SolveSummary,
        statuses=(_ENDED,),
    ),
)

_DELETED = (409, "It is being deleted: `conflict`.")

POOLS = (
    _route(*("GET", "/v1/pools", _O, "pools", "List pools, by name"), query=queries.PageQuery, answer=serving.PoolList),
    _route("GET", "/v1/pools/{pool}", _O, "pools", "Look at a pool", answer=serving.Pool),
    _route(
        *("PUT", "/v1/pools/{pool}", _O, "pools", "Make a pool, or replace its spec"),
        role=Role.OPERATOR,
        body=serving.PoolSpec,
        answer=serving.Pool,
        headers=("if-match",),
        statuses=((201, "It is new."), _DELETED, (412, "It is not, or no longer, as `If-Match` says: `conflict`.")),
        has_large_body=True,
    ),
    _route(
        *("PATCH", "/v1/pools/{pool}", _O, "pools", "Have plans carried out, or only proposed"),
        role=Role.OPERATOR,
        body=serving.PoolChange,
        answer=serving.Pool,
        statuses=(_DELETED,),
    ),
    _route(
        *("DELETE", "/v1/pools/{pool}", _O, "pools", "Drain a pool, and have it gone"),
        role=Role.OPERATOR,
        answer=serving.Pool,
        status=202,
    ),
    _route(
        *("GET", "/v1/pools/{pool}/plans", _O, "pools", "List a pool's plans, newest first"),
        query=serving.PlanQuery,
        answer=serving.PoolPlanList,
    ),
    _route(
        *("POST", "/v1/pools/{pool}/plans", _O, "pools", "Plan a pool now"),
        role=Role.OPERATOR,
        answer=serving.PoolPlanSummary,
        status=202,
        statuses=(_DELETED,),
    ),
    _route(
        *("GET", "/v1/pools/{pool}/plans/{plan_id}", _O, "pools", "Look at a plan"),
        answer=serving.PoolPlanDetail,
    ),
    _route(
        *("POST", "/v1/pools/{pool}/plans/{plan_id}/apply", _O, "pools", "Put a proposal in force"),
        role=Role.OPERATOR,
        answer=serving.PoolPlanSummary,
        statuses=((409, "It is no proposal: `invalid_transition`, or an outdated one: `conflict`."),),
    ),
    _route(
        *("GET", "/v1/pools/{pool}/instances", _O, "pools", "List a pool's instances, newest first"),
        query=serving.InstanceQuery,
        answer=serving.InstanceList,
    ),
    _route(
        *("POST", "/v1/pools/{pool}/traffic", _O, "pools", "Report requests; a window said again is replaced"),
        body=serving.TrafficReport,
        answer=serving.TrafficReceipt,
        has_large_body=True,
    ),
)

SIMULATIONS = (
    _route(
        *("POST", "/v1/simulations", _W, "simulations", "Ask what policies would have done with past jobs"),
        body=simulations.TrainingRequest,
        answer=simulations.SimulationSummary,
        status=202,
        headers=(IDEMPOTENCY_HEADER,),
        statuses=((200, "The same run has succeeded already."),),
        has_large_body=True,
    ),
    _route(
        *("GET", "/v1/simulations", _W, "simulations", "List what-if runs, newest first"),
        query=simulations.SimulationQuery,
        answer=simulations.SimulationList,
    ),
    _route(
        *("GET", "/v1/simulations/{simulation_id}", _W, "simulations", "Look at a what-if run"),
        answer=simulations.Simulation,
    ),
    _route(
        *("DELETE", "/v1/simulations/{simulation_id}", _W, "simulations", "Cancel a run that is queued or running"),
        answer=simulations.SimulationSummary,
        statuses=((409, "The run has ended: `invalid_transition`."),),
    ),
)

ROUTES: tuple[Route, ...] = (*JOBS, *ACCESS, *CLUSTER, *CARBON, *CARBON_AWARE, *OPTIMIZER, *POOLS, *SIMULATIONS)
