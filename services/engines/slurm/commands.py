"""Slurm's own commands, each with a time limit: ``squeue``, ``scontrol``, ``scancel`` and ``sacct``."""

import asyncio
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from services.engines.slurm import reading
from services.engines.slurm.ordering import Priority
from services.engines.slurm.steering import Changes
from services.kit.bridges.silent import EngineSilentError

_FOR_JOB = re.compile(r"^(?P<words>.*) for job (?P<number>[\d_]+)", re.MULTILINE)
_OF_TASKS = re.compile(r"^(?P<array>\d+)_\[?(?P<tasks>\d[\d,-]*)\]?: (?P<words>(?!No error).+)", re.MULTILINE)
_UNWRITABLE = re.compile("[\"'\x00-\x1f]")
_LISTED = 200  #: Jobs named in one line of scontrol
_LATER_NODES = ("scontrol", "show", "nodes", "--json")
"""Shows nodes since 23.02, where ``sinfo --json`` has groups of nodes."""


class Commands:
    """Slurm through its commands, run as this process's user, who must be an operator or administrator of Slurm.

    Every call may raise ``EngineSilentError``: a command failed, hung or gave an unreadable answer.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._environment = {**os.environ, "TZ": "UTC", "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}
        self._nodes = ("sinfo", "--json")

    async def jobs(self) -> tuple[reading.Rows[reading.SlurmJob], str]:
        """Return all jobs that Slurm remembers and that ask for GPUs, and its version."""
        document = await self._json("squeue", "--json", "--states=all")
        return reading.read_jobs(document), version_of(document)

    async def nodes(self) -> reading.Rows[reading.SlurmNode]:
        document = await self._json(*self._nodes)
        if isinstance(document, dict) and "sinfo" in document:
            self._nodes = _LATER_NODES
            document = await self._json(*self._nodes)
        return reading.read_nodes(document)

    async def priorities(self) -> dict[str, Priority]:
        """Return the priorities of the jobs that may start, by number; of priority/multifactor alone."""
        _, out, _ = await self._run("sprio", "--noheader", "--format=%i %Y %N %A %B %F %J %P %Q %S")
        found: dict[str, Priority] = {}
        for line in out.splitlines():
            try:
                number, *words = line.split()
                value, nice, *factors = map(int, words)
            except ValueError as error:
                raise EngineSilentError(f"sprio's answer cannot be read: {line[:100]}") from error
            found[number] = Priority(value, nice, not any(factors) and value > max(-nice, 1) + 1)
        return found

    async def change(self, changes: Changes) -> dict[str, str]:
        """Carry out the changes; return what was refused, by number. What was done before an error shows later."""
        said = ""
        lines: list[str] = []
        for numbers, wanted in changes.updates:
            for at in range(0, len(numbers), _LISTED):
                words = [f"jobid={','.join(numbers[at : at + _LISTED])}", *_fields(wanted)]
                if any(re.search(r"\s", word) for word in words):  # scontrol keeps the quotes of what it reads
                    said += (await self._run("scontrol", "update", *words, may_fail=True))[2]
                else:
                    lines.append(f"update {' '.join(words)}")
        # Without that word, Slurm runs a job again that has ended since we looked.
        lines += [f"requeue incomplete {number}" for number in changes.requeues]
        if lines:
            said += (await self._run("scontrol", given="\n".join(lines) + "\n", may_fail=True))[2]
        for number, signal in changes.signals:
            _, _, words = await self._run("scancel", f"--signal={signal}", "--batch", number, may_fail=True)
            said += f"\n{words.strip()} for job {number}" if words.strip() else ""
        for number, nodes in changes.shrinks:
            said += await self._shrink(number, nodes)
        if changes.cancels:
            await self._run("scancel", *changes.cancels, may_fail=True)
        refused = {found["number"]: found["words"][-300:] for found in _FOR_JOB.finditer(said)}
        for found in _OF_TASKS.finditer(said):
            refused |= {f"{found['array']}_{task}": found["words"][-300:] for task in reading.range_of(found["tasks"])}
        return refused

    async def _shrink(self, number: str, nodes: int) -> str:
        """Shrink a running job to its first nodes; return Slurm's objection, naming the job."""
        with tempfile.TemporaryDirectory() as folder:  # scontrol writes scripts for the job's shell where it runs
            words = ["scontrol", "update", f"jobid={number}", f"numnodes={nodes}"]
            return (await self._run(*words, may_fail=True, folder=folder))[2]

    async def ended(self, numbers: Sequence[str]) -> dict[tuple[str, int], tuple[str, int | None]]:
        """Return how jobs ended according to accounting, by number and submission; empty if there is no accounting."""
        options = ("--duplicates", "--noheader", "--parsable2", "--format=JobID,Submit,State,ExitCode")
        code, out, _ = await self._run("sacct", "-X", "-j", ",".join(numbers), *options, may_fail=True)
        found: dict[tuple[str, int], tuple[str, int | None]] = {}
        for line in out.splitlines() if code == 0 else ():
            parts = line.split("|")
            if len(parts) != 4 or not re.fullmatch(r"\d+(_\d+)?", parts[0]) or not parts[1].isdigit():
                continue
            state = reading.ENDED.get(parts[2].split(" ")[0].upper())
            if state:
                status = parts[3].partition(":")[0]
                found[parts[0], int(parts[1])] = state, int(status) if status.isdigit() else None
        return found

    async def _json(self, *command: str) -> Any:
        _, out, _ = await self._run(*command)
        try:
            return await asyncio.to_thread(orjson.loads, out)
        except orjson.JSONDecodeError as error:
            raise EngineSilentError(f"{command[0]} answers no JSON: {error}") from error

    async def _run(
        self, *command: str, given: str = "", may_fail: bool = False, folder: str | None = None
    ) -> tuple[int, str, str]:
        """Return a command's exit status and output; ``EngineSilentError`` if it fails, or does not end in time."""
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._environment,
                cwd=folder,
            )
        except OSError as error:
            raise EngineSilentError(f"{command[0]} cannot be run: {error}") from error
        try:
            async with asyncio.timeout(self._timeout_s):
                out, err = await process.communicate(given.encode())
        except TimeoutError:
            raise EngineSilentError(f"{command[0]} did not end within {self._timeout_s:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        text, words = out.decode(errors="replace"), err.decode(errors="replace")
        if process.returncode and not may_fail:
            raise EngineSilentError(f"{command[0]} failed with status {process.returncode}: {words.strip()[-300:]}")
        return process.returncode or 0, text, words


def version_of(document: Mapping[str, Any]) -> str:
    """Return the version of Slurm that an answer states."""
    meta: Any = document.get("meta") or {}
    slurm: Any = meta.get("Slurm") or meta.get("slurm") or {}
    plugin: Any = meta.get("plugin") or {}
    return f"{slurm.get('release', '')} {plugin.get('type') or plugin.get('data_parser') or ''}".strip()[:100]


def _fields(wanted: Sequence[tuple[str, str]]) -> list[str]:
    """Return fields in scontrol's format; quotes and line breaks, which cannot be written, become spaces."""
    return [f"{name}={_UNWRITABLE.sub(' ', value)}" for name, value in wanted]
