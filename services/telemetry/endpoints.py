"""Telemetry over HTTP: nodes use tokens of their own, all others come through the gateway."""

import re
from collections.abc import Callable, Coroutine
from datetime import datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from services.contracts import nodes, queries, reports
from services.contracts.codes import ProblemCode
from services.contracts.engines import EngineEnergyReport, EngineReply, EngineReport
from services.contracts.invalid import NAME_PATTERN
from services.contracts.routing import UsageReceipt, UsageReport
from services.contracts.schema import Name
from services.contracts.secrets import OpenedSecrets, SecretsWanted
from services.contracts.slim import slim
from services.contracts.sources import ChunkWanted, OpenedChunk
from services.contracts.streams import StreamEntries, StreamRead
from services.kit.identity import Admin, Caller, Operator, ProjectCaller
from services.kit.ids import utc_now
from services.kit.problems import ProblemError, invalid, not_found
from services.kit.projects import check_project, check_tenant
from services.kit.routes import Lines, from_state
from services.telemetry.reports import (
    footprint_report,
    hourly_report,
    invariant_report,
    job_footprint,
    past_jobs,
    request_report,
)
from services.telemetry.repository.jobs import owner_of
from services.telemetry.repository.reports import Subject
from services.telemetry.repository.requests import replace_usages
from services.telemetry.service import Telemetry

NODE_PATHS = re.compile(
    r"/v1/nodes/(register|[^/]+/(enroll|rotate|certificate|leave|heartbeat|energy|stream|secrets|upload|engine|engine-energy))"
)
"""Paths whose callers are nodes: they send a token or a credential of their own, and no service's."""

LONGEST_HOURLY = timedelta(days=100)

router = APIRouter(prefix="/v1")
internal_router = APIRouter()


async def read_token(request: Request) -> str:
    """Return the bearer token of the request, or nothing."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else ""


Service = Annotated[Telemetry, from_state("telemetry")]
Token = Annotated[str, Depends(read_token)]


GpuIndex = Annotated[int, Path(ge=0, le=1_023)]


JSON = "application/json"


class ReportRoute(APIRoute):
    """A route on which nodes report: hundreds of requests a second, nearly all of them well-formed.

    Its parameters are a node's name, a body, and two that depend on the request alone. Pydantic reads the body from its
    bytes and writes the answer, which takes half the time that the framework takes on any route. Requests that are not
    well-formed are left to the framework, so that they are answered as on all routes
    (``tests/telemetry/test_report_route.py``).
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the function that answers a request."""
        usual = super().get_route_handler()
        (field,) = self.dependant.body_params
        body_type: type[BaseModel] = field.field_info.annotation  # pyright: ignore[reportAssignmentType]
        dependencies = {each.name or "": each.call for each in self.dependant.dependencies}
        (path_name,) = (each.name for each in self.dependant.path_params)
        name = re.compile(NAME_PATTERN)

        async def answer(request: Request) -> Response:
            node_id = request.path_params[path_name]
            if not name.fullmatch(node_id) or request.headers.get("content-type") != JSON:
                return await usual(request)
            try:
                body = body_type.model_validate_json(await request.body())
            except ValidationError:
                return await usual(request)
            others = {each: await call(request) for each, call in dependencies.items() if call is not None}
            reply: BaseModel = await self.endpoint(**{path_name: node_id, field.name: body}, **others)
            return Response(reply.model_dump_json(), media_type=JSON)

        return answer


async def heartbeat(node_id: Name, body: nodes.Heartbeat, token: Token, service: Service) -> nodes.HeartbeatReply:
    """Report ranks and devices; the answer renews the node's lease and names the gangs it may run."""
    return await service.heartbeat(node_id, token, body)


async def store_energy(node_id: Name, body: nodes.EnergyReport, token: Token, service: Service) -> nodes.EnergyReceipt:
    """Report energy intervals; repeated intervals change nothing."""
    return await service.store_energy(node_id, token, body)


for path, endpoint in (("/nodes/{node_id}/heartbeat", heartbeat), ("/nodes/{node_id}/energy", store_energy)):
    # Before all others: what is asked for most is found first.
    router.add_api_route(path, endpoint, methods=["POST"], tags=["nodes"], route_class_override=ReportRoute)


@router.post("/nodes/register")
async def register(registration: nodes.NodeRegistration, token: Token, service: Service) -> nodes.NodeCredentials:
    """Register a node; needs its credential. A node gets a new token by registering again."""
    return await service.register(registration, token)


@router.post("/nodes/{node_id}/enroll")
async def enroll(node_id: Name, enroller: nodes.NodeEnroller, token: Token, service: Service) -> nodes.NodeCredential:
    """Become a node; needs a token for that name and role. The same keys get the same answer."""
    return await service.enrolment.enrol(node_id, token, enroller)


@router.post("/nodes/{node_id}/rotate")
async def rotate(node_id: Name, keys: nodes.NodeKeys, token: Token, service: Service) -> nodes.NodeCredential:
    """Replace a node's keys; needs its credential. The old ones end when the new credential is first shown here."""
    return await service.enrolment.replace(node_id, token, keys)


@router.post("/nodes/{node_id}/certificate")
async def certify(node_id: Name, token: Token, service: Service) -> nodes.NodeCertificate:
    """Get a new certificate for a node's agent; needs its credential. From then on the agent is known by that alone."""
    return await service.enrolment.certify(node_id, token)


@router.post("/nodes/{node_id}/leave", status_code=204)
async def leave(node_id: Name, token: Token, service: Service) -> None:
    """Stop being a node; needs its credential, which ends."""
    await service.enrolment.leave(node_id, token)


@router.post("/nodes/{node_id}/engine")
async def mirror_engine(node_id: Name, body: EngineReport, token: Token, service: Service) -> EngineReply:
    """Report an engine's nodes and jobs, for its bridge; repeating a report changes nothing."""
    return await service.mirror(node_id, token, body)


@router.post("/nodes/{node_id}/engine-energy")
async def store_engine_energy(
    node_id: Name, body: EngineEnergyReport, token: Token, service: Service
) -> nodes.EnergyReceipt:
    """Report energy of one of an engine's nodes, for its bridge; repeated intervals change nothing."""
    return await service.store_engine_energy(node_id, token, body)


@router.post("/nodes/{node_id}/stream")
async def read_stream(node_id: Name, body: StreamRead, token: Token, service: Service) -> StreamEntries:
    """Read a node's commands, or what routers saw of its servers, if it cannot reach Valkey or Redis itself."""
    return await service.read_stream(node_id, token, body)


@router.post("/nodes/{node_id}/secrets")
async def open_secrets(node_id: Name, body: SecretsWanted, token: Token, service: Service) -> OpenedSecrets:
    """Open a gang's secrets, for a node that is about to start it."""
    return await service.open_secrets(node_id, token, body.allocation_id)


@router.post("/nodes/{node_id}/upload")
async def open_chunk(node_id: Name, body: ChunkWanted, token: Token, service: Service) -> OpenedChunk:
    """Read a part of a gang's archive, for a node that is about to start it."""
    return await service.open_chunk(node_id, token, body)


@router.get("/nodes", response_model=nodes.NodeList, tags=["nodes"])
async def list_nodes(_: Operator, service: Service, query: Annotated[queries.NodeQuery, Query()]) -> Response:
    """List nodes."""
    return Response(slim(await service.list_nodes(query), query.fields), media_type="application/json")


@router.get("/nodes/{node_id}", tags=["nodes"])
async def get_node(node_id: Name, _: Operator, service: Service) -> nodes.Node:
    """Get a node."""
    return await service.node(node_id)


@router.post("/nodes/{node_id}/drain", tags=["nodes"])
async def drain_node(node_id: Name, operator: Operator, service: Service) -> nodes.Node:
    """Drain a node.

    Running jobs continue; nothing new starts on the node.
    """
    return await service.set_draining(node_id, True, operator)


@router.post("/nodes/{node_id}/resume", tags=["nodes"])
async def resume_node(node_id: Name, operator: Operator, service: Service) -> nodes.Node:
    """Return a drained node to service."""
    return await service.set_draining(node_id, False, operator)


@router.post("/nodes/{node_id}/gpus/{gpu}/drain", tags=["nodes"])
async def drain_gpu(node_id: Name, gpu: GpuIndex, operator: Operator, service: Service) -> nodes.Node:
    """Drain one GPU.

    What runs on it continues; nothing new starts there, and the node's other GPUs stay in service.
    """
    return await service.drain_gpu(node_id, gpu, operator)


@router.post(
    "/nodes/{node_id}/gpus/{gpu}/resume",
    tags=["nodes"],
    responses={409: {"description": "The fault lasts: `conflict`."}},
)
async def resume_gpu(node_id: Name, gpu: GpuIndex, operator: Operator, service: Service) -> nodes.Node:
    """Return a GPU to service.

    The GPU was drained, or taken out of service for a fault that is over.
    """
    return await service.resume_gpu(node_id, gpu, operator)


@router.post(
    "/nodes/{node_id}/enrollments",
    status_code=201,
    tags=["nodes"],
    responses={409: {"description": "The name is that of a node in the other role: `conflict`."}},
)
async def allow_node_enrollment(
    node_id: Name, spec: nodes.NodeEnrolmentSpec, admin: Admin, service: Service
) -> nodes.NodeEnrolment:
    """Let a host become a node, or a bridge to an engine.

    The returned token can be used once, in its role. A host that enrols under the name of a node takes its place.
    """
    return await service.enrolment.allow(node_id, spec, admin)


@router.post(
    "/nodes/invitations",
    status_code=201,
    tags=["nodes"],
    responses={409: {"description": "Hosts cannot join here, or not under this name: `conflict`."}},
)
async def invite_node(spec: nodes.NodeInvitationSpec, admin: Admin, service: Service) -> nodes.NodeInvitation:
    """Let a host join, by `wattshift join`.

    The returned token can be used once, under a name that no node has, or under the one given here.
    """
    return await service.enrolment.invite(spec, admin)


@router.post("/nodes/{node_id}/revoke", status_code=204, tags=["nodes"])
async def revoke_node(node_id: Name, admin: Admin, service: Service) -> None:
    """Revoke a node's credential.

    From now on the node gets no answers and no commands; what runs there ends when its lease does.
    """
    await service.enrolment.revoke(node_id, admin)


@router.put(
    "/nodes/{node_id}/gpus/{gpu}/partition",
    tags=["nodes"],
    responses={
        409: {"description": "The GPU cannot be cut: `capability_missing`; or it is reserved for a fleet: `conflict`."}
    },
)
async def partition_gpu(
    node_id: Name, gpu: GpuIndex, body: nodes.GpuPartitionSpec, operator: Operator, service: Service
) -> nodes.GpuPartition:
    """Cut a GPU into MIG slices, or make it whole again.

    The node does it once no gang runs on the GPU; nothing new starts there until then. Jobs that ask for a slice run on
    the slices; all others need a whole GPU.
    """
    return await service.partition(node_id, gpu, body.sizes, operator)


@router.get("/jobs/{job_id}/footprint", tags=["footprint"])
async def get_job_footprint(
    job_id: Name, page: Annotated[queries.LedgerQuery, Query()], caller: ProjectCaller, service: Service
) -> reports.JobFootprintReport:
    """Get a job's energy and emissions, with the carbon intensities used."""
    owner = await owner_of(service.database, job_id)
    if owner is None or not caller.sees(*owner):
        raise not_found("job")
    return await job_footprint(service.database, job_id, page.cursor, page.limit)


@router.get("/reports/footprint", response_model=reports.FootprintReport, tags=["footprint"])
async def report_footprint(
    query: Annotated[reports.FootprintQuery, Query()], caller: ProjectCaller, service: Service
) -> Response:
    """Sum energy and emissions by job, user, project, tenant, GPU model, zone, node, day, week or month.

    A user sees its tenant's jobs; an operator sees everything, idle energy included.
    """
    _check_period(query.start, query.end)
    project = check_project(query.project, caller.project)
    report = await footprint_report(service.database, query, caller.only_tenant, project, service.settings)
    return Response(slim(report, query.fields, "lines"), media_type="application/json")


@router.get("/reports/hours", tags=["footprint"])
async def report_hours(
    query: Annotated[queries.HoursQuery, Query()], caller: ProjectCaller, service: Service
) -> reports.HourlyReport:
    """Sum energy and emissions hour by hour.

    A user sees its tenant's jobs; an operator sees everything, and how much of it was idle.
    """
    end_at = query.end or utc_now()
    _check_period(query.start, end_at, LONGEST_HOURLY)
    return await hourly_report(service.database, query.start, end_at, caller.only_tenant, caller.project)


@router.get("/reports/lines", tags=["footprint"], responses={200: {"model": reports.LedgerLine}}, response_class=Lines)
async def export_ledger_lines(
    query: Annotated[queries.LinesQuery, Query()], caller: ProjectCaller, service: Service
) -> StreamingResponse:
    """Export the lines of the ledger.

    Every line has its node, devices, meters, and the provider, fetch time and kind of its carbon intensity. Lines are
    in order of time, as of one instant. The columns are those of `LedgerLine`. A user sees its tenant's jobs; an
    operator sees everything, idle energy included.
    """
    _check_period(query.start, query.end)
    if query.seals and (not caller.is_operator or caller.project is not None):
        raise ProblemError(403, ProblemCode.FORBIDDEN, "Seals are of the whole ledger: an operator exports them.")
    if query.seals and query.job is not None:
        raise invalid("?job", "Seals are of all lines of a period: leave it out, or `seals`.")
    about = Subject(query.start, query.end, caller.only_tenant, caller.project)
    pieces = await service.exports.begin(about, query.format, service.signer if query.seals else None, query.job)
    return StreamingResponse(pieces, media_type=queries.LINE_MEDIA[query.format])


@router.get("/reports/requests", tags=["footprint"])
async def report_requests(
    query: Annotated[queries.RequestQuery, Query()], caller: Caller, service: Service
) -> reports.RequestReport:
    """Sum requests to models with their energy and emissions by model, key, class, tenant or day.

    The energy is a part of that of the servers' jobs, which `/v1/reports/footprint` sums. A user sees its tenant's
    requests; an operator sees everything, and the part that belongs to no request.
    """
    _check_period(query.start, query.end)
    return await request_report(service.database, query, caller.only_tenant)


@router.get("/reports/history", tags=["jobs"])
async def export_past_jobs(
    query: Annotated[queries.PastJobsQuery, Query()], caller: ProjectCaller, service: Service
) -> reports.PastJobs:
    """Export past jobs as they ran, to replay them."""
    _check_period(query.start, query.end)
    return await past_jobs(service.database, query, check_tenant(query.tenant, caller), caller.project)


@router.get("/invariants", tags=["footprint"])
async def check_invariants(_: Operator, service: Service) -> reports.InvariantReport:
    """Check that the live system is consistent."""
    return await invariant_report(service.database)


def _check_period(start: datetime | None, end: datetime | None, longest: timedelta = timedelta.max) -> None:
    detail = ""
    if start and end and start > end:
        detail = "The period starts after it ends."
    elif start and end and end - start > longest:
        detail = f"The period is longer than {longest.days} days."
    if detail:
        raise invalid("?start", detail)


@internal_router.post("/internal/request-usage")
async def report_usage(report: UsageReport, service: Service) -> UsageReceipt:
    """Take in what a router saw in a minute; reporting it again replaces it."""
    await replace_usages(service.database, report)
    return UsageReceipt(usages=len(report.usages))
