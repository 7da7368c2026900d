"""Places jobs in cells, follows them there, and takes back those that are better elsewhere."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import orjson
from sqlalchemy.ext.asyncio import AsyncEngine

from services.admission.cells.remote import COPY_LABEL, HOME_LABEL, RemoteCell, RemoteJob, UnreadableError, copy_of
from services.admission.repository.cells import SETTLES_S, CellRepository, CellRow, GivenRow, Room, WaitingRow
from services.admission.steering import Command
from services.contracts.cells import ANY, GIVEN_BACK, HOME, WITHDRAWN
from services.contracts.codes import ProblemCode
from services.contracts.explanations import StartEstimate
from services.contracts.jobs import JobSpec
from services.core.domain.jobs import GENERATIONS, JobState
from services.core.domain.reasons import Reason
from services.core.domain.transfers import Transfer
from services.core.policies.cells import Offer, Rest, Terms, emissions, for_the_rest, is_worth_a_move, ranked
from services.core.profiles.recurrence import job_group
from services.db.engine import is_connection_error
from services.kit.ids import utc_now
from services.kit.logging import Log
from services.kit.problems import ProblemError
from services.kit.text import visible

log = Log(__name__)

FOLLOWED_S = 30.0  #: After so long in one turn, a slow cell's other jobs wait for the next: so do the other cells
PLACED_S = 5.0  #: For so long in one turn, places are chosen
PLACED_AT_ONCE = 50  #: Jobs that are read at once for that
ASKED_AT_ONCE = 10  #: Jobs about which cells are asked at the same time
MOST_DIGITS = 8  #: Of an attempt's number
NOTED_EVERY = timedelta(seconds=10)  #: How old it may be when a cell was heard last
LOOKED_AT_AT_ONCE = 2  #: Jobs about which the cells are asked again in one turn
LONGEST_S = 365 * 86_400.0  #: That a spec may have as its time limit
FULL = "Its tenant has the GPUs that it may hold at once, here and in all cells."

Connect = Callable[[str, str, bytes], RemoteCell]
"""Return how a cell of a name, address and sealed key is asked; ``ProblemError`` if its key cannot be opened."""

EstimateHere = Callable[[str, bytes], Awaitable[StartEstimate]]
"""Return what would become of a tenant's job in this installation; ``ProblemError`` if that is not known."""


@dataclass
class Heard:
    """A cell in one turn; it is not asked again once it did not answer."""

    row: CellRow
    remote: RemoteCell
    answers: bool = True
    is_whole: bool = False  #: Whether each copy there is noted or not wanted


@dataclass(frozen=True)
class Waits:
    """A job that waits; every installation says the same of jobs of one ``kind``."""

    row: WaitingRow
    spec: JobSpec
    kind: bytes

    @classmethod
    def of(cls, row: WaitingRow) -> Waits:
        group, _ = job_group(row.tenant_id, row.spec)  # by which lengths are predicted
        told = {name: value for name, value in row.spec.items() if name not in ("name", "command", "env")}
        return cls(row, JobSpec.as_stored(row.spec), orjson.dumps((row.tenant_id, group, told)))


@dataclass
class Told:
    """What an installation offers to a job, or why nothing, and to equal ones until it has been given too many."""

    offer: Offer | str
    gpus: int = 0  #: That the job would have
    most: float = math.inf  #: So many GPUs are given there before it is asked again
    given: int = 0

    @property
    def holds(self) -> bool:
        return not self.given or self.given + self.gpus <= self.most


@contextmanager
def _alone(job_id: str) -> Generator[None]:
    """Go on with other jobs, whatever befalls this one; what is a cell's fault, or the database's, is raised."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ProblemError) or is_connection_error(error):
            raise
        log.exception("cell.job_failed", job=job_id)


class Placing:
    """The loop over an installation's cells; ``turn`` may be cancelled, or its process killed, anywhere."""

    def __init__(
        self,
        engine: AsyncEngine,
        connect: Connect,
        here: EstimateHere,
        on_change: Callable[[], None],
        again_s: float,
    ) -> None:
        """Take whom to tell of jobs that stay at home; ``again_s``: how often cells are asked about a waiting job."""
        self._engine, self._connect, self._here, self._on_change = engine, connect, here, on_change
        self._again_s = again_s
        self._looked_at, self._next_lap_s = "", 0.0
        self._placed_up_to = ""  # jobs that nobody takes now keep no others from their turn
        self._heard = set[str]()  #: Cells of whose copies all have been claimed since this process began
        self._refused: dict[tuple[str, str], float] = {}  #: By job and cell: until when it is not offered there again
        self._strays: dict[tuple[str, str], str] = {}  #: Copies that are not wanted, by cell and id: of which job
        self._told: dict[tuple[str, bytes], Told] = {}  #: In this turn, by installation and kind of job
        self._rooms: dict[str, Room] = {}  #: In this turn, by tenant

    async def turn(self) -> None:
        """Follow what cells have, choose places, and look at some jobs again."""
        now_s = time.monotonic()
        self._refused = {each: until_s for each, until_s in self._refused.items() if until_s > now_s}
        self._told = {}
        async with self._engine.connect() as connection:
            repository = CellRepository(connection)
            if not await repository.is_needed():
                return
            rows = await repository.cells()
        cells = [found for found in await asyncio.gather(*map(self._follow, rows)) if found is not None]
        by_name = {cell.row.name: cell for cell in cells if cell.answers}
        self._heard |= {cell.row.name for cell in cells if cell.is_whole}
        silent = {row.name for row in rows} - self._heard
        until_s = time.monotonic() + PLACED_S
        while time.monotonic() < until_s:
            async with self._engine.connect() as connection:
                waiting = await CellRepository(connection).to_place(self._placed_up_to, PLACED_AT_ONCE)
                self._rooms = await CellRepository(connection).rooms()
            self._placed_up_to = waiting[-1].id if len(waiting) == PLACED_AT_ONCE else ""
            jobs = list[Waits]()
            for row in waiting:
                with _alone(row.id):
                    try:
                        job = Waits.of(row)
                    except ValueError:  # the scheduler says that it cannot be read
                        await self._keep(row, None)
                        continue
                    if await self._may_go(job, silent, any_cells=bool(rows)):
                        jobs.append(job)
            for at, job in enumerate(jobs):
                if at % ASKED_AT_ONCE == 0:  # at once, and once about equal ones
                    kinds = {each.kind: each for each in jobs[at : at + ASKED_AT_ONCE] if self._has_room(each)}
                    offers = (self._offers(each, by_name) for each in kinds.values())
                    await asyncio.gather(*offers, return_exceptions=True)  # what fails does so again in its job's turn
                with _alone(job.row.id):
                    await self._place(job, by_name)
            if not self._placed_up_to:
                break
        await self._look_again(by_name)

    async def _may_go(self, job: Waits, silent: Set[str], *, any_cells: bool) -> bool:
        """Whether a job may be offered to cells; have it stay, or say why it waits, if not."""
        if not any_cells or job.spec.stays_because is not None:
            await self._keep(job.row, None)
        elif job.row.generation >= GENERATIONS and (unheard := may_have(job.spec, silent)):
            async with self._engine.begin() as connection:
                detail = f"Cells may have it since before a restore: {', '.join(sorted(unheard))}."
                await CellRepository(connection).say(job.row.id, detail)
        else:
            return True
        return False

    async def _follow(self, row: CellRow) -> Heard | None:
        """Do what is to be done in one cell; return it if it answers."""
        problem: str | None = None
        cell: Heard | None = None
        try:
            remote = self._connect(row.name, row.url, row.key)
            live = await remote.live(row.home)
            cell = Heard(row, remote)
            async with self._engine.connect() as connection:
                given = await CellRepository(connection).given(row.name)
            until_s = time.monotonic() + FOLLOWED_S
            for each in given:
                if time.monotonic() < until_s and not (each.settles and each.remote_id not in live):
                    with _alone(each.job_id):
                        problem = await self._advance(cell, each, live) or problem
            for remote_id in live.keys() - {each.remote_id for each in given}:
                if (copy := live[remote_id]) is not None and time.monotonic() < until_s:
                    with _alone(copy.id):
                        problem = await self._claim(cell, copy) or problem
            for name, remote_id in self._strays.keys() - {(row.name, each) for each in live}:
                if name == row.name:
                    with _alone(remote_id):
                        await self._account(cell, remote_id)
            cell.is_whole = time.monotonic() < until_s
        except Exception as error:  # whatever befalls one cell, the others have their turn
            if is_connection_error(error):
                raise
            if not isinstance(error, ProblemError):
                log.exception("cell.not_followed", cell=row.name)
            cell, problem = None, visible(str(error))
        is_old = row.heard_at is None or utc_now() > row.heard_at + NOTED_EVERY
        if problem != row.problem or (cell is not None and is_old):
            async with self._engine.begin() as connection:
                await CellRepository(connection).note(row.name, problem, heard=cell is not None)
        return cell

    async def _advance(self, cell: Heard, row: GivenRow, live: Mapping[str, RemoteJob | None]) -> str | None:
        """Do what is next for a job in a cell; return what it refused, if that is worth an operator's look."""
        try:
            if row.handing == "sending":
                await self._send(cell, row)
            elif row.remote_id is not None:
                copy = live.get(row.remote_id) or await cell.remote.job(row.remote_id)
                waits_anew = copy.state is JobState.QUEUED and copy.generation == 0
                if row.handing == "there" and cell.row.draining and waits_anew:
                    async with self._engine.begin() as connection:
                        await CellRepository(connection).turn(row.job_id, row.attempt, "there", "leaving")
                elif row.handing == "leaving" and copy.generation == 0:
                    await self._withdraw(cell, row, row.remote_id, Command.WITHDRAW)
                elif copy.state is JobState.CANCELLED and copy.detail == WITHDRAWN:  # before a restore of this database
                    await self._take_back(cell, row)
                elif copy.state is JobState.CANCELLED and copy.detail == GIVEN_BACK:
                    row = await self._priced(cell, row, copy)
                    async with self._engine.begin() as connection:
                        detail = f"Cell {cell.row.name} stopped it, and gave it back."
                        await CellRepository(connection).left(row, copy.model_dump(mode="json"), detail)
                elif row.handing == "leaving" and row.seen.get("generation") and not copy.state.is_final:
                    await self._withdraw(cell, row, row.remote_id, Command.GIVE_BACK)
                else:
                    await self._mirror(cell, row, copy)
        except ProblemError as error:
            if error.problem_code is ProblemCode.UNAVAILABLE and not isinstance(error, UnreadableError):
                raise  # it is no fault of the cell over this one job
            if error.problem_code is ProblemCode.NOT_FOUND and row.remote_id is not None and row.cancel_requested:
                async with self._engine.begin() as connection:
                    detail = f"Cell {cell.row.name} does not know it any more."
                    await CellRepository(connection).back(row.job_id, row.attempt, detail)
                return None
            log.warning("cell.refused", cell=cell.row.name, job=row.job_id, error=error.detail)
            return f"{row.job_id}: {error.detail}"
        return None

    async def _claim(self, cell: Heard, copy: RemoteJob) -> str | None:
        """Note a copy that is not noted, or cancel it: either installation may have been restored from a backup."""
        job_id, _, attempt = copy.spec.labels.get(COPY_LABEL, "").partition(".")
        if not attempt.isdecimal() or len(attempt) > MOST_DIGITS:
            return None
        async with self._engine.begin() as connection:
            wanted = await CellRepository(connection).claim(job_id, int(attempt), cell.row.name, copy.id)
        if wanted is None:
            return f"{copy.id} is a copy of {job_id}, which is not known here."
        if not wanted:
            log.warning("cell.stray", cell=cell.row.name, job=job_id, copy=copy.id)
            self._strays[cell.row.name, copy.id] = job_id
            try:
                await self._account(cell, copy.id)
                await cell.remote.steer(copy.id, Command.CANCEL)
            except ProblemError as error:
                if error.problem_code is ProblemCode.UNAVAILABLE:
                    raise
                return f"{copy.id}, a copy of {job_id} that is no longer wanted: {error.detail}"
        return None

    async def _account(self, cell: Heard, remote_id: str) -> None:
        """Note what a copy used that is not wanted, until a minute after its end."""
        key = cell.row.name, remote_id
        try:
            copy = await cell.remote.job(remote_id)
            terms = await cell.remote.terms(remote_id) if copy.footprint.energy_j > 0 else None
        except ProblemError as error:
            if error.problem_code is ProblemCode.UNAVAILABLE and not isinstance(error, UnreadableError):
                raise
            del self._strays[key]
            return
        if terms is not None:
            document = copy.model_dump(mode="json")
            async with self._engine.begin() as connection:
                await CellRepository(connection).note_stray(self._strays[key], cell.row.name, document, terms)
        if copy.ended_at is not None and utc_now() > copy.ended_at + timedelta(seconds=SETTLES_S):
            del self._strays[key]

    async def _send(self, cell: Heard, row: GivenRow) -> None:
        """Submit a job's copy; take the job back if it is refused, and no earlier submission may still arrive."""
        async with self._engine.begin() as connection:
            doubt = await CellRepository(connection).doubt(row)
        if doubt is None:
            return
        copy = f"{row.job_id}.{row.attempt}"
        refusal: ProblemError | None = None
        try:
            remote_id = await cell.remote.submit(row.body.encode(), f"cell-{copy}")
        except ProblemError as error:
            if error.status >= 500 or error.problem_code is ProblemCode.RATE_LIMITED:
                raise
            refusal = error
            remote_id = await cell.remote.made(copy) if doubt.before is not None else None
        async with self._engine.begin() as connection:
            repository = CellRepository(connection)
            if remote_id is not None:
                await repository.arrived(row, remote_id)
            elif doubt.in_doubt:
                await repository.undoubt(row, doubt)
            else:
                self._refused[row.job_id, cell.row.name] = time.monotonic() + self._again_s
                detail = f"Cell {cell.row.name} refused it: {refusal}"
                await repository.back(row.job_id, row.attempt, detail, doubt=doubt)

    async def _withdraw(self, cell: Heard, row: GivenRow, remote_id: str, command: Command) -> None:
        """Withdraw a copy, or stop it; take the job back at once if the cell has said that it never started."""
        try:
            copy = await cell.remote.steer(remote_id, command)
        except ProblemError as error:
            if error.status not in (404, 409):
                raise
            async with self._engine.begin() as connection:  # it has started, or ended, or the cell is older: it stays
                await CellRepository(connection).turn(row.job_id, row.attempt, "leaving", "there")
            return
        if copy.state is JobState.CANCELLED and copy.generation == 0:
            await self._take_back(cell, row)

    async def _take_back(self, cell: Heard, row: GivenRow) -> None:
        async with self._engine.begin() as connection:
            detail = f"Cell {cell.row.name} gave it back before it had started."
            await CellRepository(connection).back(row.job_id, row.attempt, detail)

    async def _mirror(self, cell: Heard, row: GivenRow, copy: RemoteJob) -> None:
        """Note how a copy is, or have it become as its user wants."""
        state = JobState(row.state)
        seen = JobState(row.seen["state"]) if row.seen else None
        command = wanted(state, seen, copy.state, row.cancel_requested, row.hold_requested)
        if command is not None:
            await cell.remote.steer(copy.id, command)
            return  # the next turn sees what has become of it
        document = copy.model_dump(mode="json")
        if document == row.seen and state is copy.state and not copy.state.is_final:
            return
        row = await self._priced(cell, row, copy)
        async with self._engine.begin() as connection:
            if row.handing == "leaving":
                await CellRepository(connection).turn(row.job_id, row.attempt, "leaving", "there")
            await CellRepository(connection).mirror(row, cell.row.name, document)

    async def _priced(self, cell: Heard, row: GivenRow, copy: RemoteJob) -> GivenRow:
        """Note by which terms a copy's energy is priced, if it is not known yet."""
        if copy.footprint.energy_j <= 0 or row.zone or (terms := await cell.remote.terms(copy.id)) is None:
            return row
        async with self._engine.begin() as connection:
            await CellRepository(connection).terms(row.job_id, *terms)
        return row._replace(zone=terms[0])

    def _has_room(self, job: Waits) -> bool:
        """Whether a job's tenant may have its GPUs in a cell now, or could never have as many there."""
        room = self._rooms.get(job.row.tenant_id)
        return room is None or not room.left < job.spec.gpus.largest <= room.most

    async def _place(self, job: Waits, cells: Mapping[str, Heard]) -> None:
        """Choose where a job is to run, and have it go there."""
        offers, said = await self._offers(job, cells) if self._has_room(job) else ([], [FULL])
        best = ranked(offers, terms_of(job))
        if not best:
            async with self._engine.begin() as connection:
                await CellRepository(connection).say(job.row.id, f"No installation takes it now. {' '.join(said)}")
        elif best[0].cell == HOME:
            await self._keep(job.row, why(best))
            self._count(job, HOME)
        else:
            await self._give(job, cells[best[0].cell], why(best), moved=False)

    def _count(self, job: Waits, place: str) -> None:
        """Count a job for what was told of the installation that has it now."""
        gpus = self._told[place, job.kind].gpus
        for (name, _), told in self._told.items():
            if name == place:
                told.given += gpus

    async def _keep(self, row: WaitingRow, words: str | None) -> None:
        async with self._engine.begin() as connection:
            kept = await CellRepository(connection).keep(row.id, words)
        if kept:
            self._on_change()

    async def _give(self, job: Waits, cell: Heard, words: str, *, moved: bool) -> None:
        """Give a job to a cell and send it at once, so that the next estimate there sees it."""
        row, gpus = job.row, job.spec.gpus.largest

        def body(attempt: int) -> str:
            labels = {HOME_LABEL: cell.row.home, COPY_LABEL: f"{row.id}.{attempt}"}
            return orjson.dumps(copy_of(row.spec, labels, cell.row.project)).decode()

        async with self._engine.begin() as connection:
            repository = CellRepository(connection)
            given = await repository.give(row.id, cell.row.name, body, words, gpus=gpus, moved=moved)
        if given is None:
            return
        self._count(job, cell.row.name)
        if (room := self._rooms.get(row.tenant_id)) is not None:
            self._rooms[row.tenant_id] = room._replace(left=room.left - gpus)
        try:
            await self._send(cell, given)
        except ProblemError as error:
            cell.answers = False
            log.warning("cell.unanswered", cell=cell.row.name, job=row.id, error=str(error))

    async def _offers(self, job: Waits, cells: Mapping[str, Heard]) -> tuple[list[Offer], list[str]]:
        """Return what this installation and those cells that may run a job offer, and why others offer nothing."""
        names, room = may_have(job.spec, cells), self._rooms.get(job.row.tenant_id)
        asked = [
            cell
            for name, cell in cells.items()
            if cell.answers and not cell.row.draining and name in names
            if (job.row.id, name) not in self._refused and (room is None or job.spec.gpus.largest <= room.most)
        ]
        answers = await asyncio.gather(self._told_by(None, job), *(self._told_by(cell, job) for cell in asked))
        offers = [each for each in answers if isinstance(each, Offer)]
        return offers, [each for each in answers if isinstance(each, str)]

    async def _told_by(self, cell: Heard | None, job: Waits) -> Offer | str:
        """Return what a cell, or this installation, offers to a job; it is asked where what it told holds no more."""
        at = HOME if cell is None else cell.row.name, job.kind
        if at not in self._told or not self._told[at].holds:
            self._told[at] = await self._ask(cell, job.row)
        return self._told[at].offer

    async def _ask(self, cell: Heard | None, row: WaitingRow) -> Told:
        name, where = (HOME, "Here") if cell is None else (cell.row.name, f"Cell {cell.row.name}")
        try:
            if cell is None:
                found = await self._here(row.tenant_id, orjson.dumps(copy_of(row.spec, {}, None)))
            else:
                found = await cell.remote.estimate(orjson.dumps(copy_of(row.spec, {}, cell.row.project)))
        except ProblemError as error:
            if cell is not None and error.status >= 500:
                cell.answers = False
            return Told(f"{where}: {error}")
        offer = offer_of(name, found)
        if offer is None:
            return Told(f"{where}: no node suits it.")
        return Told(offer, found.gpus, math.inf if math.isinf(offer.start_s) else found.free_gpus // 2)

    async def _look_again(self, cells: Mapping[str, Heard]) -> None:
        """Ask again about some jobs that wait, or may move, and have those move for which it pays."""
        if not cells or time.monotonic() < self._next_lap_s:
            return
        async with self._engine.connect() as connection:
            found = await CellRepository(connection).roaming(self._looked_at, LOOKED_AT_AT_ONCE)
        self._looked_at = found[-1].id if found else ""
        if not found:
            self._next_lap_s = time.monotonic() + self._again_s
        for row in found:
            with _alone(row.id):
                await self._reconsider(row, cells)

    async def _reconsider(self, row: WaitingRow, cells: Mapping[str, Heard]) -> None:
        job, here = Waits.of(row), row.cell or HOME
        if job.spec.stays_because is not None or (here != HOME and here not in cells) or row.waited_s < self._again_s:
            return  # before, it may start where it is, as what is offered there is to one more job
        rest = None if row.runs is None else rest_of(row.runs)
        if rest is not None:
            spec = {**row.spec, "time_limit_s": min(rest.seconds, LONGEST_S)}  # so that forecasts are for as long
            job = Waits.of(row._replace(spec=spec))
        elif row.runs is not None:
            return
        offers, _ = await self._offers(job, cells)
        if rest is not None:
            offers = for_the_rest(offers, here, rest, time.time(), Transfer())
        own, terms = next((offer for offer in offers if offer.cell == here), None), terms_of(job)
        if own is not None and row.expected_start_at is not None:
            own = replace(own, start_s=min(own.start_s, row.expected_start_at.timestamp()))
        best = next(iter(ranked([offer for offer in offers if offer.cell != here], terms)), None)
        if own is None or best is None or not is_worth_a_move(own, best, terms, row.moves):
            return
        if here == HOME and rest is not None:
            async with self._engine.begin() as connection:
                await CellRepository(connection).leave(row.id)
            self._on_change()
            return
        if here == HOME:
            words = f"It moves from here to cell {best.cell}. {why([best, *offers])}"
            await self._give(job, cells[best.cell], words, moved=True)
            return
        async with self._engine.begin() as connection:
            repository = CellRepository(connection)
            for given in await repository.given(here):
                if given.job_id == row.id:
                    await repository.turn(row.id, given.attempt, "there", "leaving", moved=True)


def wanted(
    state: JobState, seen: JobState | None, copy: JobState, cancel_requested: bool, hold_requested: bool
) -> Command | None:
    """Return what a job's copy is to be told, by what its user asked for at home; None: the job follows the copy.

    Args:
        state: The job's state at home.
        seen: The state in which the copy was last seen, which the job had then; None: it was never seen.
        copy: The copy's state now.
    """
    if copy.is_final:
        return None
    if cancel_requested or state.is_final:  # one that had ended is back, as in a cell restored from a backup
        return Command.CANCEL
    if hold_requested:
        return None if copy is JobState.HELD else Command.HOLD
    if state is JobState.HELD and seen is not JobState.HELD and copy is JobState.QUEUED:
        return Command.HOLD  # held at home without a request, as by a budget
    if state is JobState.QUEUED and seen is copy is JobState.HELD:
        return Command.RELEASE
    return None


def may_have(spec: JobSpec, cells: Iterable[str]) -> set[str]:
    """Return those of some cells that may run a job."""
    names = spec.cells or ()
    return {*cells} if ANY in names else {*cells} & {*names}


def rest_of(runs: Mapping[str, Any]) -> Rest | None:
    """Return what is left of a job that runs (``WaitingRow.runs``), as far as it says."""
    if not runs["total"] or not runs["gpu_s"]:
        return None
    return Rest.of(runs["done"] / runs["total"], runs["gpus"], runs["gpu_s"], runs["energy_j"])


def terms_of(job: Waits) -> Terms:
    """Return by when a job is to run."""
    deadline_s = float("inf") if job.spec.deadline is None else job.spec.deadline.timestamp()
    return Terms(time.time(), deadline_s, job.spec.flexibility_s, job.row.waited_s)


def offer_of(cell: str, found: StartEstimate) -> Offer | None:
    """Return a cell's estimate as an offer; None if no node there suits the job."""
    if found.now is None or found.suitable_gpus < found.gpus or found.now.carbon_gco2_per_hour is None:
        return None
    run, start_s = found.now, float("inf")
    if found.starts_now:
        start_s = found.now.starts_at.timestamp()
    elif found.reason == Reason.GREENER_HOURS and found.greenest is not None:
        run = found.greenest
        start_s = found.greenest.starts_at.timestamp()
    elif found.room_at is not None:
        start_s = found.room_at.timestamp()
    elif found.expected_start_at is not None and found.reason != Reason.WAITING_FOR_ROUND:
        start_s = found.expected_start_at.timestamp()
    return Offer(cell, start_s, run.carbon_gco2_per_hour or 0.0, found.duration_s, run.intensity_gco2_per_kwh)


def why(offers: list[Offer]) -> str:
    """Return in a sentence why the first of the offers was chosen."""
    emitted = emissions(offers)
    unit = "gCO2" if all(offer.duration_s is not None for offer in offers) else "gCO2/h"
    best, *others = offers
    told = ", ".join(f"{emitted[each.cell]:.3g} {_where(each)}" for each in others)
    return f"By forecast {emitted[best.cell]:.3g} {unit} {_where(best)}" + (f"; {told}." if told else ".")


def _where(offer: Offer) -> str:
    where = "here" if offer.cell == HOME else f"in cell {offer.cell}"
    return where if offer.start_s < float("inf") else f"{where}, where it is not known when it would start"
