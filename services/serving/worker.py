"""Makes plans of pools, one after the other: ``python -m services.serving.worker``, which serving starts itself.

A worker claims a waiting plan, reads the traffic and predicts the demand, waits for its turn over the GPUs that it
shares with other workers, reads carbon forecasts, nodes and instances, and has the optimizer solve the problem. Its
turn ends when the answer is written, so that the next worker knows what is no longer free. The problem is kept with the
plan before the optimizer is asked, and the plan's id is the solve's idempotency key, so that a worker that resumes the
plan after a crash asks for the same solve. It resumes without a turn; whether the plan still fits is checked again when
it is applied.
"""

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from types import FrameType
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded  # pyright: ignore[reportMissingTypeStubs]
from sqlalchemy.ext.asyncio import AsyncEngine

from services.contracts.background import WorkFailure, WorkFailureCode, WorkRecord, WorkState
from services.contracts.optimize import Solve
from services.contracts.pools import PoolsRequest, PoolsResult
from services.contracts.schema import Message
from services.contracts.serving import DemandForecast, PlanForecasts, PlanTrigger, PoolPlanResult, PoolSpec
from services.core.domain.errors import DomainError
from services.core.domain.serving import STEP_S
from services.core.domain.solving import SolveStatus
from services.db.engine import create_engine, is_connection_error
from services.kit import traces, tracing
from services.kit.background.worker import Worker
from services.kit.http import client_of, new_session
from services.kit.logging import Log, configure_logging
from services.kit.problems import ProblemError
from services.kit.settings import settings_or_exit
from services.serving.carbon import place_intensities
from services.serving.planning.cluster import Cluster, gpus_by_place, installed_by_place
from services.serving.planning.demand import predict_demand
from services.serving.planning.problem import check_signals, problem_of, result_of
from services.serving.repository import ServingRepository
from services.serving.repository.cluster import OwnState, read_cluster, read_floors, read_own, read_traffic
from services.serving.repository.plans import plan_repository
from services.serving.repository.turns import Turn
from services.serving.settings import ServingSettings
from services.serving.solver import NotSolvedError, PlanSolver

log = Log(__name__)

SPARE_S = 2.0  #: Left before the deadline for what is done besides solving
IDLE_S = 10.0  #: A worker without a plan ends after so long; until then the next plan is spared its start
LOOK_S = 0.5
TURN_WITHIN_S = 60.0
"""A worker that holds its turn for longer stands still; the plan is then checked against others' when it is applied."""
HARD_LIMIT_S = 30.0  #: After the soft time limit: for code that does not come back to Python


class AskedPlan(Message):
    """What the optimizer was asked for a plan, and the forecasts behind it; kept with the plan until it is answered."""

    request: PoolsRequest
    forecasts: PlanForecasts


class PlanMaker:
    """Makes the plans that a worker has claimed."""

    def __init__(self, engine: AsyncEngine, settings: ServingSettings) -> None:
        self._repository = ServingRepository(engine)
        self._settings = settings
        self._solver: PlanSolver | None = None
        self.turn = Turn(settings.database_url)

    def answer(self, work: WorkRecord, worker: Worker) -> Any:
        """Return the plan, or why there is none."""
        columns, document = work.columns, dict(work.problem)
        assert work.started_at is not None, "it was claimed a moment ago, by the database's clock"
        # when an answer is late, less the time for all but solving, on this process's clock
        deadline_s = time.monotonic() + (columns["deadline_at"] - work.started_at).total_seconds() - SPARE_S
        if kept := document.pop("asked", None):
            asked = AskedPlan.as_stored(kept)
        else:
            prepared = self._prepare(columns, PoolSpec.as_stored(document["spec"]), deadline_s, worker)
            if isinstance(prepared, WorkFailure):
                return prepared
            asked = prepared
            if not worker.save(problem={**document, "asked": asked.model_dump(mode="json")}):
                return _too_late("Another worker has taken the plan over.")
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return _too_late("The forecasts took until the deadline.")
        try:
            solve = worker.ask(lambda: self._solve(work.id, asked.request, left_s))
        except NotSolvedError:
            return _too_late(f"There was no answer within {left_s:.0f} s of solving.")
        except ProblemError as error:
            code = WorkFailureCode.INVALID_PROBLEM if error.status == 422 else WorkFailureCode.UNAVAILABLE
            return WorkFailure(code=code, detail=error.detail)
        finally:
            worker.progress = {"problem": document}  # what was asked is of no use beside the answer
        return _result(asked, solve)

    async def give_up(self) -> None:
        """End the process, because its plan is no longer needed; its solve is cancelled first."""
        if self._solver is not None:
            await self._solver.cancel()
        os._exit(0)

    def _prepare(
        self, columns: Mapping[str, Any], spec: PoolSpec, deadline_s: float, worker: Worker
    ) -> AskedPlan | WorkFailure:
        settings, pool = self._settings, columns["pool"]
        now_s, logs = worker.ask(lambda: read_traffic(settings.database_url, pool, spec))
        from_s = max(columns["from_at"].timestamp(), now_s)
        demand: dict[str, DemandForecast] = {}
        for part in spec.partitions:
            if time.monotonic() >= deadline_s:
                return _too_late("The forecasts took until the deadline.")
            demand[part.name] = predict_demand(
                part,
                logs[part.name],
                from_s=from_s,
                now_s=now_s,
                head_room=spec.head_room,
                max_age_s=settings.traffic_max_age_s,
                quantile=spec.demand_quantile,
                steps=spec.plan_steps,
                is_surge=columns["trigger"] == PlanTrigger.DEMAND,
            )
        try:
            intensity = worker.ask(lambda: place_intensities(settings, spec, from_s, now_s))
        except ProblemError as error:
            if spec.objective == "carbon":
                return WorkFailure(code=WorkFailureCode.UNAVAILABLE, detail=error.detail)
            log.warning("plan.without_intensity", pool=pool, error=error.detail)
            intensity = {}
        check_signals(spec, intensity)
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return _too_late("The forecasts took until the deadline.")
        if not worker.ask(lambda: self.turn.take(spec, min(TURN_WITHIN_S, left_s / 2))):
            log.warning("plan.out_of_turn", pool=pool)
        cluster, own, floors = worker.ask(lambda: self._read(pool, spec))
        gpus, ordered = gpus_by_place(spec, cluster.nodes_for(pool)), cluster.ordered_places(spec)
        limit_s = deadline_s - time.monotonic()
        if limit_s <= 0:
            return _too_late("Other plans of the same GPUs took until the deadline.")
        return AskedPlan(
            request=problem_of(spec, demand, intensity, gpus, own.instances, limit_s, own.in_force, floors, ordered),
            forecasts=PlanForecasts(
                step_s=STEP_S,
                demand=demand,
                intensity=intensity,
                gpus={place: dict(has.models) for place, has in gpus.items()},
                installed=installed_by_place(spec, cluster.installed()),
                ordered=ordered,
            ),
        )

    async def _read(self, pool: str, spec: PoolSpec) -> tuple[Cluster, OwnState, dict[float, float]]:
        async with self._repository.reading() as queries:
            cluster, own = await read_cluster(queries.connection), await read_own(queries.connection, pool)
            return cluster, own, await read_floors(queries.connection, pool, spec)

    async def _solve(self, plan_id: str, request: PoolsRequest, within_s: float) -> Solve:
        settings = self._settings
        async with new_session(tls=settings.tls) as session:
            optimizer = client_of(session, settings, "optimizer")
            self._solver = PlanSolver(optimizer)
            try:
                return await self._solver.solve(plan_id, request, within_s)
            finally:
                self._solver = None


def plan_worker(
    engine: AsyncEngine, settings: ServingSettings, *, on_lost_claim: Callable[[], None] | None = None
) -> Worker:
    """Return a worker that plans pools; one that loses its claim ends its process."""
    maker = PlanMaker(engine, settings)
    leaving: set[asyncio.Task[None]] = set()

    def leave() -> None:
        leaving.add(asyncio.get_running_loop().create_task(maker.give_up()))

    worker = Worker(
        "plan",
        plan_repository(engine),
        maker.answer,
        lease_s=settings.lease_s,
        took="plan_s",
        is_away=is_connection_error,
        on_lost_claim=on_lost_claim or leave,
        on_written=lambda: worker.ask(maker.turn.end),
    )
    return worker


def _result(asked: AskedPlan, solve: Solve) -> Any:
    if solve.failure is not None:
        return solve.failure
    if solve.state is WorkState.CANCELLED or not isinstance(solve.result, PoolsResult):
        return WorkFailure(code=WorkFailureCode.UNAVAILABLE, detail=f"The solve {solve.id} was cancelled.")
    plan = result_of(asked.request, solve.result, asked.forecasts)
    if plan.status is SolveStatus.TIME_LIMIT:
        return _too_late(f"No plan was found in {asked.request.time_limit_s:.0f} s of solving.")
    if plan.partition is None:
        raise DomainError(f"There is no plan: {plan.status}. {plan.note}".rstrip())
    return PoolPlanResult(forecasts=asked.forecasts, plan=plan).model_dump(mode="json")


def _too_late(detail: str) -> WorkFailure:
    return WorkFailure(code=WorkFailureCode.TIME_LIMIT, detail=detail)


@contextlib.contextmanager
def time_limit(soft_s: float) -> Generator[None]:
    """Raise ``SoftTimeLimitExceeded`` in the main thread after ``soft_s``, and end the process some time after that."""

    def exceed(_: int, __: FrameType | None) -> None:
        raise SoftTimeLimitExceeded

    hard = threading.Timer(soft_s + HARD_LIMIT_S, lambda: os._exit(1))
    hard.daemon = True
    before = signal.signal(signal.SIGALRM, exceed)
    signal.setitimer(signal.ITIMER_REAL, soft_s)
    hard.start()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        hard.cancel()


def end_with_serving() -> None:
    """End this process when the one that started it ends, which closes the pipe to it."""

    def watch() -> None:
        os.read(sys.stdin.fileno(), 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Make the waiting plans, and end when there has been none for some seconds."""
    settings = settings_or_exit(ServingSettings, database=True)
    configure_logging("serving-planner", log_format=settings.log_format, level=settings.log_level)
    end_with_serving()
    tracing.start("serving-planner", settings)
    engine = create_engine(settings.database_url, pool_size=1, application_name="serving-planner")
    store, worker = plan_repository(engine), plan_worker(engine, settings)
    limit_s = settings.plan_lead_s + settings.plan_late_s + 30
    idle_since_s = time.monotonic()
    while time.monotonic() - idle_since_s < IDLE_S:
        waiting = worker.ask(lambda: store.queued(0))
        if not waiting:
            time.sleep(LOOK_S)
            continue
        with time_limit(limit_s):  # the first alone: a more urgent one may have come by the time it is made
            worker.run(waiting[0])
        idle_since_s = time.monotonic()
    worker.close(engine.dispose())
    traces.stop()


if __name__ == "__main__":
    main()
