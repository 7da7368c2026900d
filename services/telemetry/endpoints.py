"""Telemetry over HTTP: nodes use tokens of their own, all others come through the gateway."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import StreamingResponse

from services.contracts.codes import ProblemCode
from services.contracts.engines import EngineEnergyReport, EngineReply, EngineReport
from services.contracts.nodes import (
    EnergyReceipt,
    EnergyReport,
    GpuPartition,
    GpuPartitionSpec,
    Heartbeat,
    HeartbeatReply,
    Node,
    NodeCredential,
    NodeCredentials,
    NodeEnroller,
    NodeEnrolment,
    NodeEnrolmentSpec,
    NodeKeys,
    NodeList,
    NodeRegistration,
)
from services.contracts.problems import FieldError, Problem
from services.contracts.queries import (
    LINE_MEDIA,
    FootprintQuery,
    LedgerQuery,
    LinesQuery,
    NodeQuery,
    PastJobsQuery,
    RequestQuery,
)
from services.contracts.reports import FootprintReport, InvariantReport, JobFootprintReport, PastJobs, RequestReport
from services.contracts.schema import Name
from services.contracts.secrets import OpenedSecrets, SecretsWanted
from services.contracts.sources import ChunkWanted, OpenedChunk
from services.kit.identity import Admin, Caller, Operator, ProjectCaller
from services.kit.problems import ProblemError, not_found
from services.telemetry.history import past_jobs
from services.telemetry.invariants import check_invariants
from services.telemetry.report_route import ReportRoute
from services.telemetry.reports import footprint_report, job_footprint
from services.telemetry.repository.jobs import owner_of
from services.telemetry.repository.reports import Subject
from services.telemetry.requests import request_report
from services.telemetry.service import Telemetry

NODE_PATHS = re.compile(
    r"/v1/nodes/(register|[^/]+/(enroll|rotate|heartbeat|energy|secrets|upload|engine|engine-energy))"
)
"""Paths whose callers are nodes: they send a token or a credential of their own, and no service's."""

router = APIRouter(prefix="/v1", responses={401: {"model": Problem}, 422: {"model": Problem}, 503: {"model": Problem}})


async def read_telemetry(request: Request) -> Telemetry:
    """Return the use cases of this process."""
    return request.app.state.telemetry


async def read_token(request: Request) -> str:
    """Return the bearer token of the request, or nothing."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else ""


Service = Annotated[Telemetry, Depends(read_telemetry)]
Token = Annotated[str, Depends(read_token)]


GpuIndex = Annotated[int, Path(ge=0, le=1_023)]


async def heartbeat(node_id: Name, body: Heartbeat, token: Token, service: Service) -> HeartbeatReply:
    """Report ranks and devices; the answer renews the node's lease and names the gangs it may run."""
    return await service.heartbeat(node_id, token, body)


async def store_energy(node_id: Name, body: EnergyReport, token: Token, service: Service) -> EnergyReceipt:
    """Report energy intervals; repeated intervals change nothing."""
    return await service.store_energy(node_id, token, body)


for path, endpoint in (("/nodes/{node_id}/heartbeat", heartbeat), ("/nodes/{node_id}/energy", store_energy)):
    # Before all others: what is asked for most is found first.
    router.add_api_route(path, endpoint, methods=["POST"], tags=["nodes"], route_class_override=ReportRoute)


@router.post("/nodes/register", tags=["nodes"])
async def register(registration: NodeRegistration, token: Token, service: Service) -> NodeCredentials:
    """Register a node; needs its credential. A node gets a new token by registering again."""
    return await service.register(registration, token)


@router.post("/nodes/{node_id}/enroll", tags=["nodes"])
async def enroll(node_id: Name, enroller: NodeEnroller, token: Token, service: Service) -> NodeCredential:
    """Become a node; needs a token for that name and role. The answer to the same keys is the same."""
    return await service.enrolment.enrol(node_id, token, enroller)


@router.post("/nodes/{node_id}/rotate", tags=["nodes"])
async def rotate(node_id: Name, keys: NodeKeys, token: Token, service: Service) -> NodeCredential:
    """Replace a node's keys; needs its credential. The old ones end when the new one is shown here."""
    return await service.enrolment.replace(node_id, token, keys)


@router.post("/nodes/{node_id}/engine", tags=["nodes"])
async def mirror_engine(node_id: Name, body: EngineReport, token: Token, service: Service) -> EngineReply:
    """Report an engine's nodes and jobs, for its bridge; repeating a report changes nothing."""
    return await service.mirror(node_id, token, body)


@router.post("/nodes/{node_id}/engine-energy", tags=["nodes"])
async def store_engine_energy(node_id: Name, body: EngineEnergyReport, token: Token, service: Service) -> EnergyReceipt:
    """Report energy of one of an engine's nodes, for its bridge; repeated intervals change nothing."""
    return await service.store_engine_energy(node_id, token, body)


@router.post("/nodes/{node_id}/secrets", tags=["nodes"], responses={404: {"model": Problem}})
async def open_secrets(node_id: Name, body: SecretsWanted, token: Token, service: Service) -> OpenedSecrets:
    """Open the secrets of a gang, for a node that is about to start it."""
    return await service.open_secrets(node_id, token, body.allocation_id)


@router.post("/nodes/{node_id}/upload", tags=["nodes"], responses={404: {"model": Problem}})
async def open_chunk(node_id: Name, body: ChunkWanted, token: Token, service: Service) -> OpenedChunk:
    """Read a part of the archive of a gang, for a node that is about to start it."""
    return await service.open_chunk(node_id, token, body)


@router.get("/nodes", tags=["nodes"], response_model=NodeList)
async def list_nodes(_: Operator, service: Service, query: Annotated[NodeQuery, Query()]) -> Response:
    """List the nodes; they are checked as they are read, and written once."""
    return Response((await service.list_nodes(query)).model_dump_json(), media_type="application/json")


@router.get("/nodes/{node_id}", tags=["nodes"], responses={404: {"model": Problem}})
async def read_node(node_id: Name, _: Operator, service: Service) -> Node:
    """Read one node."""
    return await service.node(node_id)


@router.post("/nodes/{node_id}/drain", tags=["nodes"], responses={404: {"model": Problem}})
async def drain(node_id: Name, operator: Operator, service: Service) -> Node:
    """Drain a node: running jobs continue, and nothing new starts there."""
    return await service.set_draining(node_id, True, operator)


@router.post("/nodes/{node_id}/resume", tags=["nodes"], responses={404: {"model": Problem}})
async def resume(node_id: Name, operator: Operator, service: Service) -> Node:
    """Return a drained node to service."""
    return await service.set_draining(node_id, False, operator)


@router.post("/nodes/{node_id}/gpus/{gpu}/drain", tags=["nodes"], responses={404: {"model": Problem}})
async def drain_gpu(node_id: Name, gpu: GpuIndex, operator: Operator, service: Service) -> Node:
    """Take one GPU out of service: what runs on it continues, and nothing new starts there."""
    return await service.drain_gpu(node_id, gpu, operator)


@router.post(
    "/nodes/{node_id}/gpus/{gpu}/resume",
    tags=["nodes"],
    responses={404: {"model": Problem}, 409: {"model": Problem}},
)
async def resume_gpu(node_id: Name, gpu: GpuIndex, operator: Operator, service: Service) -> Node:
    """Return a GPU to service that was drained, or taken out of it for a fault that is over."""
    return await service.resume_gpu(node_id, gpu, operator)


@router.post("/nodes/{node_id}/enrollments", status_code=201, tags=["nodes"], responses={409: {"model": Problem}})
async def allow_enrolment(node_id: Name, spec: NodeEnrolmentSpec, admin: Admin, service: Service) -> NodeEnrolment:
    """Make a one-time token by which a host becomes this node, or a bridge to an engine does."""
    return await service.enrolment.allow(node_id, spec, admin)


@router.post("/nodes/{node_id}/revoke", status_code=204, tags=["nodes"], responses={404: {"model": Problem}})
async def revoke(node_id: Name, admin: Admin, service: Service) -> None:
    """Let a node in no more."""
    await service.enrolment.revoke(node_id, admin)


@router.put(
    "/nodes/{node_id}/gpus/{gpu}/partition",
    tags=["nodes"],
    responses={404: {"model": Problem}, 409: {"model": Problem}},
)
async def partition(
    node_id: Name,
    gpu: GpuIndex,
    body: GpuPartitionSpec,
    operator: Operator,
    service: Service,
) -> GpuPartition:
    """Cut a GPU into MIG slices, or make it whole again, as soon as no gang runs on it."""
    return await service.partition(node_id, gpu, body.sizes, operator)


@router.get("/jobs/{job_id}/footprint", tags=["reports"], responses={404: {"model": Problem}})
async def read_job_footprint(
    job_id: Name, page: Annotated[LedgerQuery, Query()], caller: ProjectCaller, service: Service
) -> JobFootprintReport:
    """Read a job's energy and emissions, with the intensities used."""
    owner = await owner_of(service.database, job_id)
    if owner is None or not caller.sees(owner.tenant_id, owner.project):
        raise not_found("job")
    return await job_footprint(service.database, job_id, page.cursor, page.limit)


@router.get("/reports/footprint", tags=["reports"])
async def read_footprint(
    query: Annotated[FootprintQuery, Query()], caller: ProjectCaller, service: Service
) -> FootprintReport:
    """Sum energy and emissions.

    A tenant sees its own jobs, a key of a project that project's, an
    operator all, including idle energy."""
    _check_period(query.start, query.end)
    tenant_id = None if caller.is_operator else caller.tenant_id
    return await footprint_report(service.database, query, tenant_id, caller.project, service.settings)


@router.get("/reports/lines", tags=["reports"], responses={403: {"model": Problem}, 429: {"model": Problem}})
async def export_lines(
    query: Annotated[LinesQuery, Query()], caller: ProjectCaller, service: Service
) -> StreamingResponse:
    """Export the ledger's lines, each with what it follows from.

    A tenant sees its own jobs', a key of a project that project's, an operator all, including idle energy."""
    _check_period(query.start, query.end)
    if query.seals and (not caller.is_operator or caller.project is not None):
        raise ProblemError(403, ProblemCode.FORBIDDEN, "Seals are of the whole ledger: an operator exports them.")
    about = Subject(query.start, query.end, None if caller.is_operator else caller.tenant_id, caller.project)
    pieces = await service.exports.begin(about, query.format, service.signer if query.seals else None)
    return StreamingResponse(pieces, media_type=LINE_MEDIA[query.format])


@router.get("/reports/requests", tags=["reports"])
async def read_requests(query: Annotated[RequestQuery, Query()], caller: Caller, service: Service) -> RequestReport:
    """Sum requests to models; a tenant sees its own, an operator all, and the unattributed rest."""
    _check_period(query.start, query.end)
    return await request_report(service.database, query, None if caller.is_operator else caller.tenant_id)


@router.get("/reports/history", tags=["reports"])
async def read_history(query: Annotated[PastJobsQuery, Query()], caller: ProjectCaller, service: Service) -> PastJobs:
    """List jobs as they ran, in order of submission; a tenant sees its own, an operator all."""
    _check_period(query.start, query.end)
    tenant_id = query.tenant if caller.is_operator else caller.tenant_id
    return await past_jobs(service.database, query, tenant_id, caller.project)


@router.get("/invariants", tags=["reports"])
async def read_invariants(_: Operator, service: Service) -> InvariantReport:
    """Check that the live system is consistent."""
    return await check_invariants(service.database)


def _check_period(start: datetime | None, end: datetime | None) -> None:
    if start and end and start > end:
        detail = "The period starts after it ends."
        raise ProblemError(
            422, ProblemCode.INVALID_REQUEST, detail, errors=[FieldError(pointer="?start", detail=detail)]
        )
