"""The gangs that this node runs. One gang here is one rank: the node's part of it, one command under one shim.

A gang runs at most once. A command only says that a gang is wanted; the gang starts when a heartbeat's answer names it,
and runs while answers continue to name it and the lease lasts. What a restarted agent must know is in the gang's
folder, written before the command is acknowledged: a repeated or late command finds it and does nothing.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from gpu_agent import files, shim
from gpu_agent.checkpoints import Checkpoints
from gpu_agent.controls import Order
from gpu_agent.launch import Inputs, Launcher
from gpu_agent.progress import ProgressReader, Report, parse_report
from gpu_agent.ranks import COMMAND, Exit, Leaving, RankFolder
from gpu_agent.secrets import CannotStartError, InputError
from services.contracts.commands import SetDevices, StartGang, StopGang, command_document
from services.contracts.nodes import PORT_TAKEN, DeviceControls, EndedBy, Listener, RankState, RankStatus
from services.core.domain.mig import gpu_of
from services.core.profiles.sharing import pace_beside
from services.kit import traces
from services.kit.logging import Log
from services.kit.tasks import end_tasks

log = Log(__name__)

DEFAULT_LOAD = 0.9  #: Load of a simulated device whose job does not report one

OnOwners = Callable[[dict[int, str], dict[int, str]], Awaitable[None]]
"""Is told which allocation holds which device, and which shares it."""

_PORT_KNOWN_S = 5.0  #: So long after a server's end whoever listens on its port had it before
_SAFE_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_SIGTERM_CODE, _REFUSED_CODE = -15, 126
_LOOK_S = 0.2  #: How often it is checked whether a gang still may start while what it needs is fetched
_LATEST_START = 0.2  #: A gang is not started in the last part of a lease, because it would be ended again at once


@dataclass
class Gang:
    """This node's part of a gang."""

    allocation_id: str
    folder: RankFolder
    start: StartGang | None  #: Its start command; None if only its end was ever requested
    token: str = ""
    state: RankState = RankState.STARTING
    named: bool | None = None
    """Whether it was named by the last answer to a heartbeat that reported it; None before the first."""
    end_known: bool = False  #: Whether the control plane has answered a heartbeat that reported its end
    holding: bool = False  #: Whether it holds its devices: from just before it starts until nothing of it is left
    copying: bool = False  #: Whether it has ended, and its checkpoint is still being copied
    launching: asyncio.Task[None] | None = None
    shim: subprocess.Popen[bytes] | None = None  #: The shim, if this agent started it
    exit_code: int | None = None
    ended_by: EndedBy | None = None
    detail: str = ""
    shim_pid: int = 0
    started_at: datetime | None = None
    ended_at: datetime | None = None
    progress: ProgressReader | None = None
    devices: tuple[int, ...] = field(default=())
    settings: DeviceControls | None = None
    leaving: Leaving | None = None  #: If it goes on only until its job saves its work
    traceparent: str | None = None
    holds_checkpoint: bool | None = None  #: Whether only this node has a checkpoint of its job, once it has ended
    trouble: str = ""  #: Why its end could not be recorded at the last look
    listener: Listener = Listener.NONE
    """Who listens on its port, if it is a server; nobody until that has been checked."""

    @property
    def serves(self) -> bool:
        """Whether a port of this node is that of its server."""
        return self.start is not None and self.start.spec.service is not None and not self.start.node_rank

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is left running."""
        return self.state is RankState.EXITED

    @property
    def may_wait(self) -> bool:
        """Whether it runs, and saves its work at times of its own, and not when it is asked to stop."""
        return self.state is RankState.RUNNING and self.progress is not None and not self.progress.saves_when_asked

    @property
    def leaves_now(self) -> bool:
        """Whether it was to go on until its job saves, and has done so, or has had its time."""
        if self.leaving is None or not self.may_wait:
            return False
        saved = self.progress.saved if self.progress else None
        is_saved = saved is not None and (saved.saved_at or 0.0) > self.leaving.asked_at
        return is_saved or shim.clock() >= self.leaving.until

    @property
    def is_due(self) -> bool:
        """Whether it has been given its devices, and nothing has been done yet to start or end it."""
        return self.holding and self.launching is None and self.started_at is None

    def status(self) -> RankStatus:
        """Return the status that is reported to the control plane."""
        report, saved = (self.progress.last, self.progress.saved) if self.progress else (None, None)
        notes = [self.detail, self.progress.problem if self.progress else ""]
        return RankStatus(
            allocation_id=self.allocation_id,
            state=self.state,
            exit_code=self.exit_code,
            detail="; ".join(note for note in notes if note).replace("\0", "")[:2_000] or None,
            ended_by=self.ended_by,
            started_at=self.started_at,
            ended_at=self.ended_at,
            progress_done=report.done if report else None,
            progress_total=report.total if report else None,
            noise_scale=report.noise_scale if report else None,
            saved_at=datetime.fromtimestamp(saved.saved_at, UTC) if saved and saved.saved_at else None,
            save_s=saved.save_s if saved else None,
            holds_checkpoint=self.holds_checkpoint,
            listener=self.listener if self.serves else None,
        )


class Gangs:
    """Every gang that this node runs, or has run and still reports."""

    def __init__(
        self,
        folder: Path,
        launcher: Launcher,
        *,
        fetch: Callable[[StartGang, Path], Awaitable[Inputs]],
        on_change: Callable[[], None] = lambda: None,
        is_billed: Callable[[str], bool] = lambda _: True,
        is_clean: Callable[[tuple[int, ...]], bool] = lambda _: True,
        checkpoints: Checkpoints | None = None,
        is_taken: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """Create an empty register; ``load`` fills it from disk.

        Args:
            on_change: Called when something should be reported to the control plane at once.
            is_billed: Whether the control plane has all energy of an ended allocation.
            is_clean: Whether devices are free of an earlier gang's controls; until then no gang starts there.
            fetch: Fetches what a gang needs before it starts. It may take a while: a gang that is stopped meanwhile
                never starts.
            checkpoints: Say what became of a gang's checkpoint before its end is reported.
            is_taken: Whether somebody listens on a port.
        """
        self.folder = folder / "allocations"
        self._generations = folder / "generations"
        self._launcher = launcher
        self._on_change = on_change
        self._is_billed = is_billed
        self._is_clean = is_clean
        self._fetch = fetch
        self._checkpoints = checkpoints
        self._is_taken = is_taken
        self._gangs: dict[str, Gang] = {}
        self._told: tuple[dict[int, str], dict[int, str]] | None = None
        self._lease_s = 0.0
        self.deadline = float("-inf")  #: When the lease of the last answer is over, on the clock of leases

    def __iter__(self) -> Iterator[Gang]:
        return iter(list(self._gangs.values()))

    def get(self, allocation_id: str) -> Gang | None:
        """Return a gang that this node runs or still reports."""
        return self._gangs.get(allocation_id)

    def load(self) -> None:
        """Load what an earlier agent of this node left: gangs that are running, to be started or to be reported."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._generations.mkdir(mode=0o700, exist_ok=True)
        for path in sorted(self.folder.iterdir()):
            if path.name.startswith("."):
                shutil.rmtree(path, ignore_errors=True)
                continue
            try:
                if not _SAFE_ID.fullmatch(path.name) or not path.is_dir() or RankFolder(path).is_released():
                    continue
                gang = self._gangs[path.name] = _read_gang(RankFolder(path))
                self._observe(gang)
            except (OSError, ValueError) as error:  # the next look at this gang tries again, and the others go on
                log.error("gang.not_read", allocation_id=path.name, error=str(error))
                continue
            log.info("gang.found", allocation_id=gang.allocation_id, state=gang.state)

    # --- commands: what they say is on disk when these return; after an OSError they must not be acknowledged

    def accept(self, start: StartGang) -> None:
        """Store a gang that should start once an answer names it; repeated, do what an agent that was killed left."""
        known = {"allocation_id": start.allocation_id, "job_id": start.job_id, "generation": start.generation}
        if not _SAFE_ID.fullmatch(start.allocation_id) or not _SAFE_ID.fullmatch(start.job_id):
            log.error("command.unsafe_id", **known)
            return
        folder = RankFolder(self.folder / start.allocation_id)
        gang = self._gangs.get(start.allocation_id)
        if gang is not None or folder.path.exists():
            log.info("command.repeated", **known)
            if gang is None or gang.start is None:
                return
        elif start.generation < self._newest_generation(start.job_id):
            log.info("command.stale", **known)
            return
        else:
            files.replace(self._generations / start.job_id, str(start.generation).encode())
            token = secrets.token_urlsafe(18)
            written = {"command": command_document(start), "token": token, "traceparent": traces.current()}
            folder.create(orjson.dumps({name: value for name, value in written.items() if value is not None}))
            gang = self._gangs[start.allocation_id] = _read_gang(folder)
            log.info("gang.accepted", **known, devices=start.devices)
        if gang.state is RankState.STARTING and not gang.holding:
            try:
                self._launcher.check(start)
            except InputError as error:
                self._end_unstarted(gang, _REFUSED_CODE, _ended_by(error), str(error))
        for other in self:
            if other.start and other.start.job_id == start.job_id and other.start.generation < start.generation:
                self._stop(other, EndedBy.STOP, start.spec.grace_s, "a newer gang of the job was started")
        self._on_change()

    def stop(self, command: StopGang) -> None:
        """End a gang; one that is not known yet will never start."""
        if not _SAFE_ID.fullmatch(command.allocation_id):
            log.error("command.unsafe_id", allocation_id=command.allocation_id)
            return
        gang = self._gangs.get(command.allocation_id)
        if gang is not None and command.wait_s and gang.may_wait:
            if gang.leaving is None:
                gang.folder.leave(command.grace_s, command.wait_s)
                gang.leaving = gang.folder.leaves()
        elif gang is not None:
            self._stop(gang, EndedBy.STOP, command.grace_s, "")
        elif not (self.folder / command.allocation_id).exists():
            self.refuse(command.allocation_id, EndedBy.STOP, _SIGTERM_CODE, "stopped before it started")
        log.info("gang.stop", allocation_id=command.allocation_id, reason=command.reason, grace_s=command.grace_s)
        self._on_change()

    def set(self, command: SetDevices) -> None:
        """Store the controls for a gang's devices; ``orders`` has them from now on.

        A gang that is over or unknown needs none: its start always precedes its controls in the stream.
        """
        gang = self._gangs.get(command.allocation_id)
        known = gang.settings if gang is not None else None
        if gang is None or gang.is_over or (known is not None and known.revision >= command.settings.revision):
            log.info("command.stale", allocation_id=command.allocation_id, revision=command.settings.revision)
            return
        files.replace(gang.folder.settings_file, command.settings.model_dump_json().encode())
        gang.settings = command.settings
        log.info("gang.set", allocation_id=command.allocation_id, **command.settings.model_dump())

    def orders(self) -> list[Order]:
        return [
            Order(gang.allocation_id, gang.devices, gang.settings) for gang in self if gang.holding and gang.settings
        ]

    def refuse(self, allocation_id: str, ended_by: EndedBy, code: int, detail: str) -> None:
        """Record that an allocation unknown to this node must not start here, and report it as ended."""
        if not _SAFE_ID.fullmatch(allocation_id):
            return
        folder, gang = RankFolder(self.folder / allocation_id), self._gangs.get(allocation_id)
        if gang is None and not folder.path.exists():
            folder.create(orjson.dumps({"command": None, "token": ""}))
            gang = self._gangs[allocation_id] = _read_gang(folder)
        if gang is not None and gang.start is None and not gang.is_over:  # made now, or by an agent that was killed
            self._end_unstarted(gang, code, ended_by, detail)
            self._on_change()

    # --- the lease

    def answer(self, reported: Mapping[str, RankState], named: set[str], sent_at: float, lease_s: float) -> None:
        """Act on a heartbeat's answer.

        Args:
            reported: The allocations in the heartbeat, with their states; the answer says nothing about others.
            named: The allocations that may run.
            sent_at: When the heartbeat was sent; the lease counts from then.
        """
        self._lease_s, self.deadline = lease_s, sent_at + lease_s
        for gang in self:
            gang.end_known |= reported.get(gang.allocation_id) is RankState.EXITED
            if gang.allocation_id in named:
                gang.named = True
                if gang.holding:
                    self._renew(gang)
            elif gang.allocation_id in reported:
                gang.named = False
                if gang.state is not RankState.STOPPING:
                    grace_s = gang.start.spec.grace_s if gang.start else 0.0
                    self._try_to_stop(gang, EndedBy.STOP, grace_s, "the control plane does not know it any more")

    def _renew(self, gang: Gang) -> None:
        try:
            gang.folder.renew(self.deadline, self._lease_s)
        except OSError as error:
            log.error("lease.not_written", allocation_id=gang.allocation_id, error=str(error))

    # --- what goes on

    async def tick(self, on_owners: OnOwners) -> None:
        """Check every rank, start what may start, forget what is settled.

        Args:
            on_owners: Called with the owners and guests of devices when they differ from those of the last call, and
                before anything new is started. Gangs also end between two ticks: a start may fail, or be abandoned.
        """
        has_changed = False
        for gang in self:
            try:
                has_changed |= self._observe(gang)
                has_changed |= await self._settle(gang)
                gang.trouble = ""
            except Exception as error:  # such as a full disk, a damaged file: the other gangs' turn comes now
                if gang.trouble != repr(error):
                    log.error("gang.not_settled", allocation_id=gang.allocation_id, error=repr(error))
                gang.trouble = repr(error)
        for gang in self:
            self._take_devices(gang)
        await self._tell(on_owners)
        for gang in self:
            if gang.is_due:  # since this tick, or since one that broke off before this line
                gang.launching = asyncio.create_task(self._launch(gang))
        if has_changed:
            self._on_change()
        self._forget()

    async def _settle(self, gang: Gang) -> bool:
        """Stop a gang that is to leave now, end one that never starts or whose shim is dead; return if so."""
        leaves = gang.leaving if gang.leaves_now else None
        if leaves is not None:
            self._try_to_stop(gang, EndedBy.STOP, leaves.grace_s, "")
        if gang.state is RankState.STOPPING and not gang.holding and not gang.copying:
            cause = gang.folder.stop_cause() or EndedBy.STOP
            self._end_unstarted(gang, _SIGTERM_CODE, cause, gang.detail or "stopped before it started")
        if _is_dead(gang):
            await asyncio.to_thread(gang.folder.end_after_dead_shim)
            return self._observe(gang) or leaves is not None
        return leaves is not None

    async def _tell(self, on_owners: OnOwners) -> None:
        """Call ``on_owners`` if the holders of devices differ from those of the last call, for whatever reason."""
        holders = self.owners(), self.guests()
        if holders != self._told:
            await on_owners(*holders)
            self._told = holders

    def shim_pids(self) -> dict[str, int]:
        return {gang.allocation_id: gang.shim_pid for gang in self if gang.holding and gang.shim_pid}

    def owners(self) -> dict[int, str]:
        """Return which allocation holds which device; of two that share one, the one with the lower id."""
        return {device: holders[0] for device, holders in self._holders().items()}

    def guests(self) -> dict[int, str]:
        return {device: holders[1] for device, holders in self._holders().items() if len(holders) > 1}

    def _holders(self) -> dict[int, list[str]]:
        holders: dict[int, list[str]] = {}
        for gang in sorted((gang for gang in self if gang.holding), key=lambda gang: gang.allocation_id):
            for device in gang.devices:
                holders.setdefault(device, []).append(gang.allocation_id)
        return holders

    def holders_of(self, device: int) -> list[str]:
        """Return the allocations that hold a device, a slice of it, or the GPU that it is a slice of."""
        related = {device, gpu_of(device)}
        return [
            gang.allocation_id
            for gang in self
            if gang.holding and any(each in related or gpu_of(each) == device for each in gang.devices)
        ]

    def contained_devices(self) -> set[int]:
        """Return the GPUs that gangs in containers hold, wholly or in slices."""
        contained = (gang for gang in self if gang.holding and gang.start and gang.start.spec.image)
        return {gpu_of(device) for gang in contained for device in gang.devices}

    def load_of(self, device: int) -> float:
        """Return the load of a simulated device; if two gangs share it, their loads add up, to 1 at most."""
        return min(sum(self._loads_on(device)) * self.pace_on(device), 1.0)

    def pace_on(self, device: int) -> float:
        """Return the speed of gangs on a simulated device, relative to running alone on it."""
        loads = self._loads_on(device)
        return pace_beside(*loads) if len(loads) == 2 else 1.0

    def _loads_on(self, device: int) -> list[float]:
        return [load_of(gang) for gang in self if gang.holding and device in gang.devices]

    def activity_of(self, allocation_id: str) -> float | None:
        gang = self.get(allocation_id)
        return None if gang is None else load_of(gang)

    def post_progress(self, token: str, report: Report) -> bool:
        """Store a report of the job with this token; return False if no job reports in this way."""
        for gang in self:
            if gang.holding and gang.progress and secrets.compare_digest(gang.token.encode(), token.encode()):
                first = gang.progress.last is None
                if gang.progress.post(report):
                    gang.folder.keep_posted(report.to_line())
                    if first:
                        self._on_change()
                    return True
        return False

    async def end_launches(self) -> None:
        """Start nothing any more: the next agent has what was not started yet."""
        await end_tasks(gang.launching for gang in self if gang.launching is not None)

    async def stop_all(self, grace_s: float, on_owners: OnOwners) -> None:
        """End every rank because the agent ends; return when they are gone, or shortly after the grace period."""
        for gang in self:
            self._try_to_stop(gang, EndedBy.AGENT, grace_s, "")
        deadline = shim.clock() + grace_s + 2
        while any(gang.holding for gang in self) and shim.clock() < deadline:
            for gang in self:
                self._observe(gang)
            await self._tell(on_owners)
            await asyncio.sleep(0.05)

    def _observe(self, gang: Gang) -> bool:
        """Update a gang from its folder; return True if the control plane should be informed now."""
        if gang.is_over:
            return False
        if gang.shim is not None and gang.shim.poll() is not None:
            gang.shim = None
        before, ended, started = gang.state, gang.folder.exit(), gang.folder.started()
        made_first_progress = False
        if gang.progress is not None and gang.holding:
            first = gang.progress.last is None
            made_first_progress = gang.progress.poll() and first
        if started is not None and gang.started_at is None:
            gang.started_at = datetime.fromtimestamp(float(started.get("started_at", 0)), UTC)
            gang.shim_pid = int(started.get("shim", 0))
            gang.holding = True
        if ended is not None:
            if gang.progress is not None:
                gang.progress.poll()  # it may have written until it ended
            gang.holding = False
            copied = self._checkpoints.outcome(gang.start, gang.folder, ended) if self._checkpoints else ""
            gang.copying = copied is None
            if copied is None:
                gang.state = RankState.STOPPING
                return made_first_progress or gang.state is not before
            gang.state, gang.exit_code, gang.ended_by = RankState.EXITED, ended.code, ended.ended_by
            taken = self._lacked_its_port(gang, ended)
            gang.detail = "; ".join(note for note in (ended.detail or gang.detail, taken, copied) if note)
            gang.ended_at = ended.ended_at
            gang.holds_checkpoint = self._checkpoints.is_held_here(gang.start) if self._checkpoints else None
            log.info("gang.exited", allocation_id=gang.allocation_id, code=ended.code, ended_by=ended.ended_by)
        elif gang.folder.stop_requested():
            gang.state = RankState.STOPPING
        elif started is not None:
            gang.state = RankState.RUNNING
        return made_first_progress or gang.state is not before

    def _lacked_its_port(self, gang: Gang, ended: Exit) -> str:
        """Return what is to be said of a server that failed while another process held its port; else nothing.

        A server that cannot listen may have ended before anybody looked. Long afterwards, the port may be another's.
        """
        if gang.start is None or not gang.serves or gang.listener is Listener.OWN:
            return ""
        is_late = (datetime.now(UTC) - ended.ended_at).total_seconds() > _PORT_KNOWN_S
        if is_late or ended.ended_by is not EndedBy.ITSELF or not ended.code:
            return ""
        return f"{PORT_TAKEN}, {gang.start.master_port}." if self._is_taken(gang.start.master_port) else ""

    def _take_devices(self, gang: Gang) -> None:
        """Give a gang that may start its devices, if they are free."""
        if gang.state is not RankState.STARTING or not gang.named or gang.holding or gang.start is None:
            return
        if self._is_late():
            return
        beside = 0
        for other in self:
            if (other.holding or other.copying) and other.start and other.start.job_id == gang.start.job_id:
                return
            if other.holding:
                beside += bool(set(other.devices) & set(gang.devices))
        if beside > gang.start.shares or not (beside or self._is_clean(gang.devices)):  # controls are the owner's
            return
        gang.holding = True

    def _is_late(self) -> bool:
        """Return whether the lease is over or nearly so: what is started now would be ended again at once."""
        return shim.clock() > self.deadline - self._lease_s * _LATEST_START

    async def _launch(self, gang: Gang) -> None:
        if gang.start is None:
            return
        fetching = asyncio.ensure_future(self._fetch(gang.start, gang.folder.path))
        try:
            if not await self._may_go_on(gang, fetching):
                return
            prepare, inputs = self._launcher.prepare, fetching.result()
            with traces.span("gang.start", gang.traceparent, allocation_id=gang.allocation_id):
                launch = await asyncio.to_thread(prepare, gang.start, gang.folder, gang.token, inputs)
                if not await self._may_go_on(gang, fetching):  # that took long, or this process stood still
                    return
                gang.shim = gang.folder.launch(launch, self.deadline, self._lease_s)
                log.info("gang.started", allocation_id=gang.allocation_id, shim=gang.shim.pid)
        except InputError as error:
            log.warning("gang.lacks_input", allocation_id=gang.allocation_id, error=str(error))
            cause, detail = _ended_by(error), str(error)
        except OSError as error:
            log.error("gang.not_started", allocation_id=gang.allocation_id, error=str(error))
            cause, detail = EndedBy.REFUSED, f"it cannot be started: {error}"
        except Exception as error:  # else the gang would hold its devices, and neither run nor end
            log.exception("gang.not_started", allocation_id=gang.allocation_id)
            cause, detail = EndedBy.REFUSED, f"it cannot be started: {error!r}"[:500]
        else:
            return
        finally:
            fetching.cancel()
        try:
            self._end_unstarted(gang, _REFUSED_CODE, cause, detail)
        except OSError as error:  # a full disk: the next look ends it, as one whose shim is dead
            log.error("gang.end_not_written", allocation_id=gang.allocation_id, error=str(error))
        self._on_change()

    async def _may_go_on(self, gang: Gang, fetching: asyncio.Future[Inputs]) -> bool:
        """Wait for what a gang needs and a lease that lasts; return False if it was stopped meanwhile, and is over."""
        while not fetching.done() or (self._is_late() and not fetching.exception()):
            if (cause := self._reason_to_give_up(gang)) is not None:
                self._end_unstarted(gang, _SIGTERM_CODE, cause, gang.detail or "stopped before it started")
                self._on_change()
                return False
            await (asyncio.sleep(_LOOK_S) if fetching.done() else asyncio.wait([fetching], timeout=_LOOK_S))
        return True

    def _reason_to_give_up(self, gang: Gang) -> EndedBy | None:
        """Return why a gang in preparation must not start any more; None if it may."""
        if (stop := gang.folder.stop_cause()) is not None:
            return stop
        return EndedBy.LEASE if shim.clock() > self.deadline else None

    def _stop(self, gang: Gang, cause: EndedBy, grace_s: float, detail: str) -> None:
        """Request a rank's end, or make sure that it never begins."""
        if gang.is_over:
            return
        gang.detail = gang.detail or detail
        gang.folder.request_stop(cause, grace_s)
        gang.state = RankState.STOPPING
        if not gang.holding:
            self._end_unstarted(gang, _SIGTERM_CODE, cause, gang.detail or "stopped before it started")

    def _try_to_stop(self, gang: Gang, cause: EndedBy, grace_s: float, detail: str) -> None:
        try:
            self._stop(gang, cause, grace_s, detail)
        except OSError as error:
            log.error("gang.stop_not_written", allocation_id=gang.allocation_id, error=str(error))

    def _end_unstarted(self, gang: Gang, code: int, ended_by: EndedBy, detail: str) -> None:
        if gang.folder.end_unstarted(code, ended_by, detail):
            self._observe(gang)

    def _forget(self) -> None:
        for gang in self:
            is_settled = self._checkpoints is None or self._checkpoints.is_settled(gang.start, gang.folder)
            if gang.end_known and gang.named is False and is_settled and self._is_billed(gang.allocation_id):
                try:
                    gang.folder.release()
                except OSError as error:
                    log.warning("gang.not_released", allocation_id=gang.allocation_id, error=str(error))
                    continue
                del self._gangs[gang.allocation_id]
                if self._checkpoints is not None:
                    self._checkpoints.forget(gang.allocation_id)
                log.info("gang.released", allocation_id=gang.allocation_id)

    def _newest_generation(self, job_id: str) -> int:
        try:
            return int((self._generations / job_id).read_text())
        except (FileNotFoundError, ValueError):
            return -1


def read_start(folder: RankFolder) -> StartGang | None:
    """Return the command by which a rank was started; None if this version cannot read it."""
    return _read_gang(folder).start


def _read_gang(folder: RankFolder) -> Gang:
    """Read a gang from its folder; a command that this version cannot read is treated as missing."""

    def take(written: dict[str, Any]) -> tuple[StartGang | None, str, str | None]:
        start = StartGang.as_stored(written["command"]) if written["command"] else None
        return start, str(written["token"]), written.get("traceparent")

    start, token, traceparent = files.read(folder.path / COMMAND, take, "gang.unreadable") or (None, "", None)
    gang = Gang(folder.path.name, folder, start, token, traceparent=traceparent)
    try:
        gang.leaving = folder.leaves()
    except (OSError, ValueError, LookupError) as error:
        log.error("gang.leaving_unreadable", allocation_id=gang.allocation_id, error=repr(error))
        gang.leaving = Leaving(start.spec.grace_s if start else 0.0, asked_at=0.0, until=0.0)  # it was to end
    if start is not None:
        gang.devices = tuple(start.devices)
        read_settings = DeviceControls.model_validate
        gang.settings = files.read(folder.settings_file, read_settings, "gang.settings_unreadable")
        gang.progress = ProgressReader(start.spec.progress, folder.progress_file, folder.path / shim.STDOUT)
        if (posted := parse_report(folder.posted())) is not None:
            gang.progress.post(posted)
    return gang


def _ended_by(error: InputError) -> EndedBy:
    return EndedBy.CANNOT_START if isinstance(error, CannotStartError) else EndedBy.REFUSED


def load_of(gang: Gang) -> float:
    """Return how busy a gang keeps a simulated device that it has to itself, 0 to 1."""
    load = gang.progress.gpu_load if gang.progress else None
    return DEFAULT_LOAD if load is None else load


def _is_dead(gang: Gang) -> bool:
    """Return whether a rank's shim is gone without having recorded an end."""
    if gang.is_over or not gang.holding or (gang.launching is not None and not gang.launching.done()):
        return False
    if gang.folder.started() is not None:
        return not gang.folder.is_held()
    return gang.launching is not None and gang.shim is None
