"""The worker for what-if runs: how it computes a row that it has claimed."""

from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from services.contracts.background import WorkRecord
from services.contracts.simulations import FILE_OPTIONS, StoredFile, TrainingProblem
from services.db.engine import is_connection_error
from services.kit.background.worker import Worker
from services.simulator.repository import SimulationRepository
from services.simulator.training import Content, opened


def simulation_worker(engine: AsyncEngine, lease_s: float) -> Worker:
    repository = SimulationRepository(engine)

    def answer(work: WorkRecord, worker: Worker) -> Any:
        problem = TrainingProblem.as_stored(work.problem)
        files = {name: file for name in FILE_OPTIONS if isinstance(file := getattr(problem, name), StoredFile)}
        stored = worker.ask(lambda: repository.fetch([file.sha256 for file in files.values()]))
        contents = {name: Content(file.name, stored[file.sha256]) for name, file in files.items()}
        ended: dict[str, int] = {}

        def report(policy: str, done: int, _: int) -> None:
            ended[policy] = done
            worker.progress = {"done": sum(ended.values())}

        with opened(problem, contents) as run:
            return run.answer(report)

    return Worker("simulation", repository, answer, lease_s=lease_s, took="run_s", is_away=is_connection_error)
