"""The loops that make a host a node: heartbeats, commands, ranks, energy and clean-up."""

import asyncio
import math
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from redis.asyncio import Redis

from gpu_agent import files, logs, secrets, shim
from gpu_agent.checkpoint_store import Store, StoreError
from gpu_agent.checkpoints import Checkpoints
from gpu_agent.confinement import Confinement
from gpu_agent.containers import find_engine
from gpu_agent.controls import Controls
from gpu_agent.exec_sessions import ExecSessions
from gpu_agent.gangs import Gangs
from gpu_agent.git import remove_keys
from gpu_agent.health import GpuHealth
from gpu_agent.inbox import Inbox
from gpu_agent.inputs import Fetcher
from gpu_agent.intervals import Intervals
from gpu_agent.kept_files import KeptFiles
from gpu_agent.latency_clocks import LatencyClocks, LatencyInbox, Measured
from gpu_agent.launch import Inputs, Launcher
from gpu_agent.learned_clocks import LearnedClocks
from gpu_agent.listeners import Ports, is_taken
from gpu_agent.partitions import Partitions
from gpu_agent.ranks import RankFolder
from gpu_agent.reporting import BATCH, HOUSEKEEPING_S, Loops, ReportingAgent, wait_for
from gpu_agent.retention import Retention
from gpu_agent.scratch import Scratch
from gpu_agent.settings import AgentSettings
from gpu_agent.sources import Sources
from services.contracts.commands import StartGang
from services.contracts.nodes import DeviceInfo, DeviceReading, Listener
from services.contracts.routing import LatencyReport
from services.core.domain.controls import ControlKind
from services.kit.command_stream import RelayedRedis
from services.kit.enrolment import Enrolment, NodeRedis
from services.kit.http import ServiceClient
from services.kit.logging import Log
from services.kit.problems import ProblemError
from services.kit.settings import exit_with
from services.kit.tasks import end_tasks

log = Log(__name__)

LISTENERS_S = 1.0
_IDLE_TICK_S = 1.0  #: Without gangs; a heartbeat, which follows each command, is answered with a tick
_LOOK_FIRST_S = 2.0
_LEAST_STREAM = 1 << 20  #: Bytes of a stream that are kept while the disk lacks of its reserve


class Agent(ReportingAgent):
    def __init__(
        self, settings: AgentSettings, client: ServiceClient, enrolment: Enrolment, redis: Redis | NodeRedis
    ) -> None:
        super().__init__(settings, enrolment)
        self._tick_due = asyncio.Event()
        self._device_files: dict[str, bytes] = {}
        self._state_problem = ""
        self.confinement = Confinement(settings, self.driver.device_nodes())
        simulated = self.driver.name == "simulated"
        engine = find_engine(with_gpus=not simulated) if settings.containers == "auto" else None
        launcher = self._launcher = Launcher(
            settings,
            engine,
            self.devices,
            self.confinement,
            names_by_uuid=lambda: bool(self.driver.dead()) or self.health.has_lost(),
        )
        self.intervals = Intervals()
        self._ports = Ports(engine, self.confinement.cgroups.processes_of)
        self.controls = Controls(self.driver, settings.state_folder / "controls.json", self._device_lock)
        self.checkpoints = Checkpoints(
            settings, self._open_store(), account_of=launcher.account_of, on_change=self._tick_due.set
        )
        self.gangs = Gangs(
            settings.state_folder,
            launcher,
            on_change=self._heartbeat_due.set,
            is_billed=lambda allocation_id: not self.spool.mentions(allocation_id),
            is_clean=lambda devices: self.controls.is_clean(devices) and not self.partitions.is_open(devices),
            fetch=self._fetch,
            checkpoints=self.checkpoints,
            is_taken=is_taken,
        )
        self.partitions = Partitions(
            self.driver,
            settings.state_folder / "partitions.json",
            self._device_lock,
            held_by=self.gangs.holders_of,
            on_cut=self._take_devices,
            retry_s=settings.partition_retry_s,
        )
        self.exec_sessions = ExecSessions(self.gangs, engine, settings)
        self.kept_files = KeptFiles(launcher, settings)
        host = self._host()
        self.meter = self._meter_of(
            host,
            shim_pids=self.gangs.shim_pids,
            progress_of=self._progress_of,
            activity_of=self.gangs.activity_of if simulated else lambda _: None,
        )
        self.health = GpuHealth(
            self.driver, settings, lambda: self.gangs.shim_pids().values(), self.gangs.contained_devices
        )
        self._failed: set[str] = set()
        self._looks: set[asyncio.Task[None]] = set()  #: At the GPUs, which may last where one is lost
        self.plane = self._plane_of(
            client,
            host,
            containers=engine is not None,
            protections=self.confinement.protections(),
            checkpoints=settings.checkpoints,
        )
        self._fetcher = Fetcher(self.plane, Sources(settings), settings.retry_s, launcher)
        streams = RelayedRedis(self.plane) if settings.relayed else redis
        self.inbox = Inbox(streams, settings.node_id, self.gangs, settings.retry_s)
        self._learned = LearnedClocks(settings.state_folder / "learned-clocks")
        self.clocks = LatencyClocks(
            self.devices, self.driver.name, self._learned, settings.latency_clocks, settings.latency_stale_s
        )
        self._latency = LatencyInbox(streams, settings.node_id, self._take_latency, settings.retry_s)

    async def start(self) -> None:
        """Take over what an earlier agent left, then start the loops."""
        secrets.prepare_memory()
        remove_keys(self.gangs.folder)
        self.gangs.load()
        if os.geteuid() == 0:  # other accounts have to pass through to their jobs' files, and can list nothing there
            for folder in (self.settings.state_folder, self.gangs.folder):
                folder.chmod(0o711)
        self.confinement.begin(self._running_ranks())
        await self.meter.begin(self.gangs.owners(), self._ended_at, self.gangs.guests())
        half_gib = shutil.disk_usage(self.settings.state_folder).total / 2**31
        asked_gib = self.settings.job_scratch_gib, self.settings.tenant_scratch_gib
        scratch_bytes = (int((each or half_gib) * 2**30) for each in asked_gib)
        loops: Loops = {
            "ranks": self._watch_ranks,
            "listeners": self._watch_listeners,
            "heartbeats": self._send_heartbeats,
            "commands": partial(self._once_enrolled, self.inbox.run),
            "latency": partial(self._once_enrolled, self._latency.run),
            "energy": self._measure,
            "health": self._watch_health,
            "delivery": self._deliver,
            "housekeeping": self._keep_house,
            "checkpoints": partial(self.checkpoints.copy_running, self._gangs_that_run),
            "scratch": Scratch(self.gangs, self._launcher.home_of, *scratch_bytes).watch,
        }
        self._begin(loops)

    async def stop(self) -> None:
        """End the agent; its ranks continue, or end with it if the settings say so."""
        await self._cancel("ranks", "commands")
        try:
            await self.partitions.finish(self.settings.exit_grace_s)
            if self.settings.stop_ranks_on_exit:
                await self.gangs.stop_all(self.settings.exit_grace_s, self._on_owners)
        finally:
            await self._cancel(*self._tasks)
            await self.gangs.end_launches()
        await self.meter.close()
        await self.checkpoints.close()
        await self._learned.save(everything=True)
        if self.settings.stop_ranks_on_exit:
            with suppress(ProblemError, TimeoutError):
                async with asyncio.timeout(self.settings.retry_s):
                    await self._deliver_batch(BATCH)
                    await self._send_heartbeat()
        await end_tasks(self._looks)
        await self.controls.enforce(self.gangs.orders())  # gangs that run on keep what the scheduler ordered for them
        self.driver.close()
        self.confinement.cgroups.sweep(self._running_ranks())
        self.confinement.cgroups.close()
        os.close(self._state_lock)
        log.info("agent.stopped", ranks_left=self.gangs_running)

    def describe(self) -> dict[str, Any]:
        return {
            **super().describe(),
            "lease_left_s": self.lease_left_s,
            "controls_in_force": self.controls.in_force,
            "protections": [each.model_dump(mode="json") for each in self.confinement.protections()],
            "latency_clocks": self.clocks.describe(shim.clock()),
            "ranks": [gang.status().model_dump(mode="json") for gang in self.gangs],
            "owners": self.gangs.owners(),
            "guests": self.gangs.guests(),
            "partitions": [status.model_dump(mode="json") for status in self.partitions.statuses() or ()],
        }

    def _closed(self) -> str | None:
        problem = self.checkpoints.problem
        return super()._closed() or (f"It does not reach {problem}" if problem else None)

    @property
    def gangs_running(self) -> int:
        return sum(gang.holding for gang in self.gangs)

    @property
    def lease_left_s(self) -> float | None:
        return self.gangs.deadline - shim.clock() if self.gangs.deadline > 0 else None

    def _running_ranks(self) -> set[str]:
        return {gang.allocation_id for gang in self.gangs if not gang.is_over}

    def _problems(self) -> list[str]:
        known = (self._state_problem, self.spool.problem, self.inbox.problem, self.partitions.problem)
        return list(filter(None, known))

    def rank_folder(self, allocation_id: str) -> RankFolder | None:
        """Return the folder of an allocation that is running, or whose logs are still kept."""
        folder = RankFolder(self.gangs.folder / allocation_id)
        # Of the two ways to ask, this one takes a name that no file can have for one that is not there.
        return folder if not allocation_id.startswith(".") and os.path.isdir(folder.path) else None

    # --- loops

    async def _once_enrolled(self, loop: Callable[[], Awaitable[None]]) -> None:
        await self._enrolment.until_enrolled()
        await loop()

    async def _look_after_failures(self) -> None:
        """Check the GPUs before a rank's failure is reported: if a sick GPU is the cause, it is not counted as one.

        A lost GPU may block the driver, but not the heartbeat.
        """
        failed = {gang.allocation_id for gang in self.gangs if gang.is_over and gang.exit_code}
        if self.settings.health == "on" and failed - self._failed:
            look = asyncio.create_task(self._look_once())
            self._looks.add(look)
            look.add_done_callback(self._looks.discard)
            await asyncio.wait([look], timeout=_LOOK_FIRST_S)
        self._failed = failed

    async def _look_once(self) -> None:
        try:
            await self._look_at_health()
        except Exception as error:  # the loop that looks at them tries again
            log.warning("health.not_looked", error=str(error) or type(error).__name__)

    async def _send_heartbeat(self) -> None:
        await self._look_after_failures()
        settings = {
            order.allocation_id: self.controls.status(order).model_copy(update={"interval": self.intervals.of(order)})
            for order in self.gangs.orders()
        }
        ranks = [
            gang.status().model_copy(
                update={
                    "settings": settings.get(gang.allocation_id),
                    "clocks": self.clocks.minutes(gang.start.job_id, time.time()) if gang.start else [],
                }
            )
            for gang in self.gangs
        ]
        sent_at = shim.clock()
        timeout_s = max(1.0, min(5.0, 2 * self.plane.heartbeat_interval_s))
        reply = await self._beat(timeout_s, ranks=ranks, partitions=self.partitions.statuses())
        reported = {rank.allocation_id: rank.state for rank in ranks}
        self.gangs.answer(reported, set(reply.allocations), sent_at, reply.lease_ttl_s)
        self.partitions.want(reply.partitions)
        self._tick_due.set()

    async def _watch_listeners(self) -> None:
        """Watch who listens on the ports of servers; report changes at once."""
        while True:
            gangs = {gang.allocation_id: gang for gang in self.gangs}
            found = await asyncio.to_thread(self._ports.who_listens, list(gangs.values())) if gangs else {}
            for name, who in found.items():
                if gangs[name].listener is not who:
                    say = log.error if who is Listener.FOREIGN else log.info
                    say("server.listener", allocation_id=name, listener=who.value)
                    gangs[name].listener = who
                    self._heartbeat_due.set()
            await asyncio.sleep(LISTENERS_S)

    async def _watch_ranks(self) -> None:
        while True:
            self._tick_due.clear()
            await self.gangs.tick(self._on_owners)
            self.partitions.step()
            ordered = self.gangs.orders()
            self.clocks.decide(self.gangs, self._measured, shim.clock(), time.time())
            if await self._set_devices():
                await self.meter.sample()  # from now on the devices draw something else
                if ordered:  # clocks that follow latency move every second, and go with the next heartbeat
                    self._heartbeat_due.set()
            await self._look_at_intervals()
            self._write_device_files()
            tick_s = self.settings.tick_s
            await wait_for(self._tick_due, tick_s if any(self.gangs) else max(tick_s, _IDLE_TICK_S))

    def _delivered(self) -> None:
        self._tick_due.set()

    async def _keep_house(self) -> None:
        limits = self.settings.retention_s, self.settings.retention_bytes
        kept = Retention(self.gangs.folder, self.settings.state_folder / "generations")
        while True:
            self.confinement.cgroups.sweep(self._running_ranks())
            disk = self._disk.space()
            lacking = disk.reserve_bytes - disk.free_bytes if disk else 0
            await asyncio.to_thread(kept.clean, *limits, lacking)
            jobs = [gang.start.job_id for gang in self.gangs if gang.start]
            await asyncio.to_thread(self.checkpoints.clean, jobs, self.settings.retention_s)
            await self._learned.save()
            kept_bytes = self.settings.log_stream_bytes
            kept_bytes = min(kept_bytes, _LEAST_STREAM) if lacking > 0 else kept_bytes
            for gang in self.gangs:
                for stream in (shim.STDOUT, shim.STDERR):
                    logs.trim(gang.folder.path / stream, kept_bytes)
            await asyncio.sleep(HOUSEKEEPING_S)

    # --- what the loops share

    async def _set_devices(self) -> bool:
        """Set devices as their gangs require, and all others to the defaults.

        A gang keeps its limits until it is gone, also once the control plane is out of reach and its lease over: a
        node that is cut off must not draw more than an order of the grid lets it.
        """
        return await self.controls.enforce(self.clocks.orders(self.gangs))

    def _take_latency(self, report: LatencyReport) -> None:
        if self.clocks.take(report, shim.clock()):
            self._tick_due.set()

    def _measured(self, devices: Sequence[int]) -> Measured:
        readings = [each for each in self.meter.readings() if each.index in devices]
        if len(readings) < len(devices):
            return Measured(math.nan)
        clocks = [each.clock_mhz for each in readings if each.clock_mhz is not None]
        slowest = min(clocks) if len(clocks) == len(readings) > 0 else None
        return Measured(sum(each.power_w for each in readings), slowest)

    async def _look_at_intervals(self) -> None:
        orders = (order for order in self.gangs.orders() if order.settings.measure)
        measured = [order for order in orders if self.controls.has_reached(order)]
        self.intervals.forget_all_but(measured)
        if measured:
            await self.meter.sample()  # a report is then never far from a reading of the counters
        for order in measured:
            gang = self.gangs.get(order.allocation_id)
            if gang and (progress := gang.progress):
                energy_at = partial(self.meter.energy_j, order.devices)
                if self.intervals.look(order, progress.last, progress.last_at, shim.clock(), energy_at):
                    self._heartbeat_due.set()

    def _readings(self) -> list[DeviceReading]:
        return [
            each.model_copy(
                update={
                    "power_limit_w": self.controls.value(ControlKind.POWER_LIMIT, each.index),
                    "locked_clock_mhz": self.controls.value(ControlKind.CLOCK, each.index),
                    "latency_clock_mhz": self.clocks.wanted_mhz(each.index),
                    "temperature_c": self.health.temperatures_c.get(each.index),
                }
            )
            for each in self.meter.readings()
        ]

    def _use(self, devices: list[DeviceInfo]) -> None:
        self._launcher.devices = devices
        self.clocks.recut(devices)

    async def _on_owners(self, owners: dict[int, str], guests: dict[int, str]) -> None:
        await self._set_devices()
        self._write_device_files()
        await self.meter.switch(owners, guests)
        self._delivery_due.set()

    def _write_device_files(self) -> None:
        """Write the speed of simulated devices, for programs that pace themselves by it."""
        running = {gang.allocation_id: gang for gang in self.gangs if gang.holding}
        self._device_files = {name: text for name, text in self._device_files.items() if name in running}
        self._state_problem = ""
        known_devices = {device.index for device in self.devices}
        for name, gang in running.items():
            speeds = [self.driver.relative_speed(device) for device in gang.devices if device in known_devices]
            known = [speed * self.gangs.pace_on(gang.devices[0]) for speed in speeds if speed is not None]
            if not known:
                continue
            clocks = [r.clock_mhz for r in self.meter.readings() if r.index in gang.devices and r.clock_mhz]
            text = orjson.dumps({"relative_speed": min(known), "clock_mhz": min(clocks, default=None)})
            try:
                if self._device_files.get(name) != text:
                    files.replace(gang.folder.device_file, text, durable=False, mode=0o644)
                    self._device_files[name] = text
            except OSError as error:
                self._state_problem = f"the state folder cannot be written: {error}"

    def _progress_of(self, allocation_id: str) -> float | None:
        gang = self.gangs.get(allocation_id)
        return gang.progress.last.done if gang and gang.progress and gang.progress.last else None

    def _ended_at(self, allocation_id: str) -> datetime | None:
        if (folder := self.rank_folder(allocation_id)) is None:
            return datetime.fromtimestamp(0, UTC)
        return (ended := folder.exit()) and ended.ended_at

    async def _fetch(self, start: StartGang, rank: Path) -> Inputs:
        inputs = await self._fetcher.fetch(start, rank)
        await self.checkpoints.prepare(start)
        return inputs

    def _gangs_that_run(self) -> list[tuple[StartGang, RankFolder]]:
        return [(gang.start, gang.folder) for gang in self.gangs if gang.holding and gang.start and gang.started_at]

    def _open_store(self) -> Store | None:
        settings = self.settings
        if settings.checkpoints != "store":
            return None
        more = {name: getattr(settings, f"checkpoint_store_{name}") for name in ("endpoint", "region", "key", "secret")}
        try:
            return Store.at(settings.checkpoint_store, **more)
        except StoreError as error:
            exit_with(f"GPU_AGENT_CHECKPOINT_STORE: {error}")

    def _load_of(self, device: int) -> float:
        return self.gangs.load_of(device) if hasattr(self, "gangs") else 0.0

    def _is_held(self, device: int) -> bool:
        return bool(self.gangs.holders_of(device)) if hasattr(self, "gangs") else False
