"""Files of a job whose processes have ended: ``tar`` reads them as the job's account, as the job saw this host.

What is gone with its processes (temporary folders, containers, what it was submitted with) is not there any more.
"""

import asyncio
import os
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

from gpu_agent import enclosure, shim
from gpu_agent.account import shim_user
from gpu_agent.exec_sessions import MOST_BYTES_PER_S, PIECE_BYTES
from gpu_agent.gangs import read_start
from gpu_agent.launch import Launcher
from gpu_agent.processes import last_bytes
from gpu_agent.ranks import SCRATCH, RankFolder
from gpu_agent.settings import AgentSettings
from gpu_agent.sources import FOLDER
from services.contracts.codes import ProblemCode
from services.contracts.commands import StartGang
from services.contracts.exec_sessions import ExecEvent, output_message
from services.core.domain.errors import DomainError
from services.kit.logging import Log
from services.kit.problems import ProblemError, conflict

log = Log(__name__)

_LONGEST_ERROR_BYTES = 4_096
_TIME_LIMIT_CODE = 124
_ASK_BEFORE = "`wattshift submit --follow --results PATH` brings files back as soon as a job ends"


class KeptFiles:
    """Reads the files of ended jobs on one node; the limits of exec sessions hold for that, too."""

    def __init__(self, launcher: Launcher, settings: AgentSettings) -> None:
        self._launcher, self._settings = launcher, settings
        self._reading = 0

    async def open(self, folder: RankFolder | None, path: str) -> AsyncIterator[bytes]:
        """Return the events of reading a file or folder as a tar archive: its bytes, and how it ended.

        Args:
            folder: The rank's folder; None if there is none any more.
            path: What to read; a relative path starts in the job's working folder.

        Raises:
            ProblemError: 409 if the files are not here or not yet to be read, 429 beyond the limit.
        """
        start = None if folder is None else await asyncio.to_thread(read_start, folder)
        if folder is None or start is None:
            raise conflict(f"Node {self._settings.node_id} no longer has the folder of this job. {_ASK_BEFORE}.")
        if folder.exit() is None:
            raise conflict("The job's processes have not ended on this node; run a command in the job instead.")
        if self._reading >= (limit := self._settings.exec_sessions):
            most = f"Node {self._settings.node_id} reads files of {limit} jobs, which is the maximum."
            raise ProblemError(429, ProblemCode.RATE_LIMITED, most, headers={"retry-after": "5"})
        self._reading += 1
        try:
            process = await self._tar(start, folder.path, path)
        except BaseException:
            self._reading -= 1
            raise
        events = self._events(process)
        await anext(events)  # from here on it cleans up after itself, even if nobody takes an event
        return events

    async def _tar(self, start: StartGang, rank: Path, path: str) -> Process:
        working = _working_folder(start, rank)
        if not await asyncio.to_thread(os.path.isdir, working):
            removed = "A job's uploaded or cloned folder is removed when it has ended"
            gone = removed if start.spec.source is not None else f"The job's working folder {working} is gone"
            raise conflict(f"{gone}. {_ASK_BEFORE}.")
        if start.spec.image is not None and not await asyncio.to_thread(_is_in_mounts, start, rank, working / path):
            gone = f"{path} was in the job's container, which is gone; its working folder is still there"
            raise conflict(f"{gone}. {_ASK_BEFORE}.")
        try:
            account, confinement = await asyncio.to_thread(self._launcher.view_of, start, rank)
        except (DomainError, OSError) as error:
            raise conflict(f"The job's files cannot be read on node {self._settings.node_id}: {error}.") from error
        above, name = os.path.split(path.rstrip("/"))
        process = await asyncio.create_subprocess_exec(
            *enclosure.command(str(working)),
            *("nice", "-n", "19", "tar", "-C", above or ".", "-cf", "-", "--", name),
            cwd="/",
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            limit=PIECE_BYTES,
            start_new_session=True,
        )
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.write(shim.spec_bytes([*confinement, *shim_user(account)]))
            process.stdin.close()
        return process

    async def _events(self, process: Process) -> AsyncIterator[bytes]:
        stdout, stderr = process.stdout, process.stderr
        assert stdout is not None
        assert stderr is not None
        said = asyncio.create_task(last_bytes(stderr, _LONGEST_ERROR_BYTES))
        ends_at = time.monotonic() + self._settings.exec_longest_s
        detail = None
        try:
            yield b""
            yield ExecEvent(type="started", node_id=self._settings.node_id).message()
            while data := await stdout.read(PIECE_BYTES):
                yield output_message("stdout", data)
                if time.monotonic() > ends_at:
                    detail = f"Reading files may last {self._settings.exec_longest_s:g} s."
                    break
                await asyncio.sleep(len(data) / MOST_BYTES_PER_S)
            else:
                yield output_message("stderr", await said)
            code = _TIME_LIMIT_CODE if detail else await process.wait()
            yield ExecEvent(type="exit", code=code, detail=detail).message()
        finally:
            self._reading -= 1
            with suppress(ProcessLookupError):
                process.kill()
            said.cancel()
            await asyncio.gather(said, process.wait(), return_exceptions=True)


def _working_folder(start: StartGang, rank: Path) -> Path:
    if start.spec.source is not None:
        return rank / FOLDER / (start.spec.working_dir or "")
    return Path(start.spec.working_dir) if start.spec.working_dir else rank / SCRATCH


def _is_in_mounts(start: StartGang, rank: Path, path: Path) -> bool:
    """Return whether a path leads to what a container had of this host; nothing here changes it any more."""
    mounts = [rank / SCRATCH, rank / FOLDER, *filter(None, (start.spec.working_dir, start.spec.checkpoint_dir))]
    real = Path(os.path.realpath(path))
    return any(real.is_relative_to(os.path.realpath(each)) for each in mounts)
