"""Composition root of admission: ``python -m services.admission.app``."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import aiohttp
from fastapi import FastAPI, Request, Response
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from services.admission import (
    access_endpoints,
    agent_metrics,
    endpoints,
    input_endpoints,
)
from services.admission.access import Access
from services.admission.agent_metrics import AgentMetrics
from services.admission.agents import AgentTokens
from services.admission.budgets import Budgets
from services.admission.capacity import Capacity, CapacityCache
from services.admission.cells import endpoints as cell_endpoints
from services.admission.cells.placing import Placing
from services.admission.cells.remote import Reach
from services.admission.cells.service import Cells
from services.admission.changes import Changes
from services.admission.exec_sessions import Exec
from services.admission.figures import show_figures
from services.admission.first_start import ensure_first_admin_patiently, show_secret
from services.admission.jobs import Arrays, Jobs
from services.admission.logs import Logs
from services.admission.repository.jobs import JobRepository
from services.admission.repository.retention import Kept, forget
from services.admission.repository.submissions import SubmissionRepository
from services.admission.repository.webhooks import WebhookRepository
from services.admission.secrets import Secrets
from services.admission.service import Committer, References, Submissions
from services.admission.settings import AdmissionSettings
from services.admission.streaming import EventFeed, EventStreams
from services.admission.uploads import UploadLimits, Uploads
from services.admission.webhooks import endpoints as webhook_endpoints
from services.admission.webhooks.addresses import AddressRules
from services.admission.webhooks.sending import Sender, SendingRules, Signer
from services.admission.webhooks.service import Publisher, Webhooks
from services.contracts.explanations import StartEstimate
from services.contracts.identity import Identity, Role
from services.db.engine import create_engine, is_connection_error, ping
from services.db.sealing import Sealer
from services.kit.app import DegradedError, answer_unavailable, create_service, serve
from services.kit.disk import DiskWatch
from services.kit.http import ServiceClient, client_of, new_session
from services.kit.logging import Log
from services.kit.presence import Presence
from services.kit.problems import as_problem, problem_response, unavailable
from services.kit.redis import JobHints, connect
from services.kit.repeating import repeat
from services.kit.settings import settings_or_exit
from services.kit.tasks import end_tasks

log = Log(__name__)

MAX_GROUP_BYTES = 128 * 1024 * 1024
FORGET_S = 3_600.0
CLEAR_S = 600.0
ROOMS = (endpoints, agent_metrics, access_endpoints, webhook_endpoints, input_endpoints, cell_endpoints)


def create_app(settings: AdmissionSettings) -> FastAPI:
    """Return the service; its parts are created at startup, on the event loop that runs it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        redis = connect(settings.redis_url, settings)
        session, exec_session = new_session(tls=settings.tls), new_session(connections=0, tls=settings.tls)
        outside, scheduler = aiohttp.ClientSession(), client_of(session, settings, "scheduler")
        reach = Reach(outside, Sealer(settings.secrets_key))
        hints = JobHints(redis)
        jobs = Jobs(engine, hints.give)
        arrays = Arrays(engine, hints.give)
        feed = EventFeed(engine, poll_s=settings.event_poll_s, buffer=settings.event_buffer)
        changes = Changes(engine, poll_s=settings.change_poll_s)
        streams = EventStreams(feed, changes, jobs, settings.keep_alive_s)
        per_commit, patience_s = settings.max_jobs_per_commit, settings.commit_patience_s
        repository = SubmissionRepository(settings.database_url)
        committer = Committer(repository, hints.give, max_jobs=per_commit, patience_s=patience_s)
        agent_tokens = AgentTokens(settings.credential, settings.service_token)
        logs = Logs(engine, jobs, session, agent_tokens, reach, settings)
        capacity = CapacityCache(read_capacity, settings.capacity_max_age_s)
        submissions = Submissions(committer, capacity, References(engine), arrays.find, disk)
        sessions = Exec(engine, jobs, exec_session, agent_tokens, settings)
        budgets = Budgets(engine, hints.give, prices=settings.model_prices)
        show_figures(app.state.metrics, engine, disk)
        addresses = AddressRules(settings.webhook_networks)
        signer = Signer(settings.webhook_key or settings.service_token)
        rules = SendingRules(settings.webhook_timeout_s, settings.webhook_retry_s, settings.webhook_disable_after_s)
        sender = Sender(engine, signer, addresses, rules)
        publisher = Publisher(engine, settings.webhook_settle_s)
        presence, most = Presence(publisher.has_work), settings.webhooks_per_tenant
        webhooks = Webhooks(engine, signer, addresses, sender, presence.written.set, max_per_tenant=most)
        limits = UploadLimits(settings.upload_max_bytes, settings.upload_quota_bytes, settings.upload_retention_s)
        uploads = Uploads(engine, limits, disk)
        app.state.submissions, app.state.jobs, app.state.streams, app.state.logs = submissions, jobs, streams, logs
        app.state.arrays, app.state.budgets, app.state.exec_sessions = arrays, budgets, sessions
        app.state.webhooks, app.state.uploads = webhooks, uploads
        app.state.access, app.state.secrets = Access(engine), Secrets(engine, reach.sealer)
        app.state.cells = Cells(engine, reach)
        app.state.agent_metrics = AgentMetrics(engine, session, agent_tokens)
        if secret := await ensure_first_admin_patiently(engine, settings.data_dir, settings.first_account):
            show_secret(secret, settings.data_dir)
        clearing = repeat(uploads.clear, CLEAR_S, failed="uploads.not_cleared")
        counting = repeat(budgets.count, settings.budget_interval_s, failed="budgets.not_counted")
        when, poll_s = presence.wait, settings.webhook_poll_s
        publishing = repeat(publisher.publish, poll_s, failed="webhooks.not_published", when=when)
        sending = repeat(sender.start_due, poll_s, failed="webhooks.not_sent", when=when)
        forgetting = repeat(forget_messages, FORGET_S, failed="webhooks.not_forgotten")
        kept = Kept(settings.jobs_keep_days, settings.idempotency_keep_days, settings.audit_keep_days)
        trimming = repeat(partial(forget, engine, kept), FORGET_S, failed="jobs.not_forgotten")
        placing = Placing(engine, reach.cell, partial(estimate_here, scheduler), hints.give, settings.cells_again_s)
        following = repeat(placing.turn, settings.cells_poll_s, failed="cells.not_followed", traceback=True)
        loops = (committer.run(), hints.run(), clearing, trimming, counting, publishing, sending, forgetting, following)
        tasks = [asyncio.create_task(work) for work in loops]
        try:
            yield
        finally:
            await end_tasks(tasks)
            await sender.aclose()
            await sessions.close()
            await exec_session.close()
            await outside.close()
            await session.close()
            await redis.aclose()
            await engine.dispose()

    async def read_capacity() -> Capacity:
        async with engine.connect() as connection:
            return await JobRepository(connection).capacity()

    async def readiness() -> None:
        await ping(engine)
        if problem := disk.problem():
            raise DegradedError(f"the database's disk {problem} Nothing new is accepted until there is room.")

    async def forget_messages() -> None:
        async with engine.begin() as connection:
            await WebhookRepository(connection).forget(settings.webhook_retention_s)

    engine = create_engine(settings.database_url, application_name="admission")
    disk = DiskWatch(settings.database_dir, settings.database_reserve_bytes)
    app = create_service(
        "Wattshift admission", settings, lifespan=lifespan, readiness=readiness, max_body_bytes=MAX_GROUP_BYTES
    )
    for room in ROOMS:
        app.include_router(room.router)
    answer_unavailable(app, "The database", (OSError, PoolTimeoutError))
    app.add_exception_handler(DBAPIError, answer_database_error)
    return app


async def estimate_here(scheduler: ServiceClient, tenant_id: str, body: bytes) -> StartEstimate:
    """Return what would become of a tenant's job in this installation."""
    caller = Identity(tenant_id=tenant_id, role=Role.USER, key_id="cells")
    return await scheduler.call("POST", "/v1/jobs:estimate", StartEstimate, body=body, identity=caller)


async def answer_database_error(request: Request, error: Exception) -> Response:
    """Answer 503 while the database cannot be reached, and 500 for every other error."""
    if is_connection_error(error):
        return problem_response(unavailable("The database"))
    log.exception("request.failed", method=request.method, path=request.url.path)
    return problem_response(as_problem(error))


def main() -> None:
    settings = settings_or_exit(AdmissionSettings, database=True)
    serve(create_app(settings), "admission", settings, settings.host, settings.port)


if __name__ == "__main__":
    main()
