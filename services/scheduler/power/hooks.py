"""How a node is powered: not at all, by an operator's own command, or through its management controller (IPMI).

Both run as a process of their own, so that a time limit can end them and a library's threads stay out of the scheduler.
A hook may be run again at any time, even for a node already in the right state: after a crash, its state is not known.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import string
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from services.contracts.invalid import first_error
from services.core.domain.errors import DomainError
from services.kit.settings import SECRET_VARIABLES
from services.kit.text import decoded
from services.scheduler.settings import SchedulerSettings

PLACEHOLDERS = frozenset({"node", "address"})
SAID = 300  #: Characters kept of a hook's last output


class HookError(Exception):
    """A node's power was not changed as requested; the message is for the operator and contains no secret."""


@dataclass(frozen=True, slots=True)
class Target:
    """A node as hooks see it."""

    node_id: str
    address: str


class PowerHook(Protocol):
    """Powers nodes."""

    def covers(self, node_id: str) -> bool:
        """Whether this node can be powered down and up."""
        ...

    async def set_power(self, target: Target, *, on: bool) -> None:
        """Power a node up or down, unless it is; ``HookError`` if it was not done, or the outcome is unknown."""
        ...


class NoHook:
    """Nodes stay as they are."""

    def covers(self, node_id: str) -> bool:
        """Return False."""
        return False

    async def set_power(self, target: Target, *, on: bool) -> None:
        """Refuse."""
        raise HookError("SCHEDULER_NODE_POWER is none: the node cannot be powered up or down")


class CommandHook:
    """Runs an operator's command; exit status 0 means done."""

    def __init__(self, on_command: Sequence[str], off_command: Sequence[str], time_limit_s: float) -> None:
        """Take the two command templates; ``DomainError`` if one is empty, or names an unknown placeholder."""
        self._commands = {True: tuple(on_command), False: tuple(off_command)}
        self._time_limit_s = time_limit_s
        for on, template in self._commands.items():
            _check_template(template, f"SCHEDULER_NODE_POWER_{'ON' if on else 'OFF'}_COMMAND")

    def covers(self, node_id: str) -> bool:
        """Return True."""
        return True

    async def set_power(self, target: Target, *, on: bool) -> None:
        """Run the command."""
        if target.address.startswith("-"):
            raise HookError(f"the node's address {target.address!r} would be read as an option")
        words = [word.format(node=target.node_id, address=target.address) for word in self._commands[on]]
        await run_process(words, self._time_limit_s)


def _check_template(template: tuple[str, ...], variable: str) -> None:
    if not template:
        raise DomainError(f'SCHEDULER_NODE_POWER=command needs {variable}, such as \'["/usr/sbin/power", "{{node}}"]\'')
    for word in template:
        try:
            fields = {field for _, field, _, _ in string.Formatter().parse(word) if field is not None}
        except ValueError as error:
            raise DomainError(f"{variable}: {word!r}: {error}") from None
        if unknown := fields - PLACEHOLDERS:
            raise DomainError(f"{variable}: there is no placeholder {{{min(unknown)}}}, only {{node}} and {{address}}")


class Controller(BaseModel):
    """A management controller; its password is in the file or environment variable named here."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str = Field(min_length=1)
    port: int = Field(623, ge=1, le=65_535)
    user: str = Field(min_length=1)
    password_env: str | None = None
    password_file: Path | None = None
    soft_s: float = Field(120, ge=0)
    """How long the operating system may take to shut down before the power is cut; 0 cuts it at once."""

    @model_validator(mode="after")
    def _names_one_secret(self) -> Controller:
        if (self.password_env is None) == (self.password_file is None):
            raise ValueError("name either password_env or password_file")
        return self

    def password(self) -> str:
        if self.password_file is not None:
            try:
                return self.password_file.read_text().strip()
            except OSError as error:
                raise DomainError(f"{self.password_file}: {error.strerror}") from None
        assert self.password_env is not None
        if not (value := os.environ.get(self.password_env)):
            raise DomainError(f"the environment has no {self.password_env}")
        return value


class _Controllers(BaseModel):
    model_config = ConfigDict(extra="forbid")

    defaults: dict[str, Any] = Field(default_factory=dict[str, Any])
    nodes: dict[str, dict[str, Any]] = Field(default_factory=dict[str, dict[str, Any]])


class IpmiHook:
    """Speaks to management controllers through pyghmi; the power state is read back before it counts as done."""

    def __init__(self, controllers: dict[str, Controller], time_limit_s: float) -> None:
        """Take the controllers by node; ``DomainError`` if pyghmi or a password is not there."""
        if importlib.util.find_spec("pyghmi") is None:
            raise DomainError("SCHEDULER_NODE_POWER=ipmi needs pyghmi: pip install 'wattshift-control-plane[ipmi]'")
        for node_id, controller in controllers.items():
            try:
                controller.password()
            except DomainError as error:
                raise DomainError(f"the controller of {node_id}: {error}") from None
        self._controllers = controllers
        self._time_limit_s = time_limit_s

    def covers(self, node_id: str) -> bool:
        """Return whether the file names a controller of the node."""
        return node_id in self._controllers

    async def set_power(self, target: Target, *, on: bool) -> None:
        """Switch the chassis; ``HookError`` if its controller does not answer, or reads back another state."""
        controller = self._controllers.get(target.node_id)
        if controller is None:
            raise HookError("SCHEDULER_NODE_POWER_FILE names no controller of the node")
        try:
            password = controller.password()
        except DomainError as error:
            raise HookError(str(error)) from None
        request = {
            **controller.model_dump(include={"address", "port", "user", "soft_s"}),
            "password": password,
            "on": on,
            "time_limit_s": self._time_limit_s,
        }
        words = [sys.executable, "-P", "-m", "services.scheduler.power.ipmi"]
        await run_process(words, self._time_limit_s + 5, orjson.dumps(request))


def read_controllers(path: Path) -> dict[str, Controller]:
    """Return the controllers of a TOML file's tables ``nodes.NAME``, on top of ``defaults``; or ``DomainError``."""
    try:
        listed = _Controllers.model_validate(tomllib.loads(decoded(path.read_bytes())))
        return {name: Controller.model_validate(listed.defaults | entry) for name, entry in listed.nodes.items()}
    except OSError as error:
        raise DomainError(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        raise DomainError(f"{path}: {first_error(error)}") from None
    except ValueError as error:  # not TOML, or not UTF-8
        raise DomainError(f"{path}: {error}") from None


def build_hook(settings: SchedulerSettings) -> PowerHook:
    """Return the hook that the settings choose; ``DomainError`` if the settings do not suffice for it."""
    if settings.node_power == "command":
        return CommandHook(
            settings.node_power_on_command, settings.node_power_off_command, settings.node_power_time_limit_s
        )
    if settings.node_power == "ipmi":
        if settings.node_power_file is None:
            raise DomainError("SCHEDULER_NODE_POWER=ipmi needs SCHEDULER_NODE_POWER_FILE, a list of controllers")
        return IpmiHook(read_controllers(settings.node_power_file), settings.node_power_time_limit_s)
    return NoHook()


async def run_process(words: Sequence[str], time_limit_s: float, said: bytes = b"") -> None:
    """Run a process to its end, with ``said`` as its input and without our secrets; on cancellation it is killed.

    Raises:
        HookError: it cannot be started, fails, or takes longer than it may.
    """
    environment = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise HookError(f"{words[0]}: {error}") from None
    try:
        async with asyncio.timeout(time_limit_s):
            output, _ = await process.communicate(said)
    except TimeoutError:
        raise HookError(f"{Path(words[0]).name} took longer than {time_limit_s:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode:
        last = output.decode(errors="replace").strip().rsplit("\n", 1)[-1][:SAID]
        raise HookError(last or f"{Path(words[0]).name} ended with status {process.returncode}")
