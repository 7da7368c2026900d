"""Commands of this node: delivered at least once, and removed from its stream once they are on disk."""

from contextlib import suppress
from typing import Any

import orjson
from pydantic import ValidationError

from gpu_agent.gangs import Gangs
from services.contracts.commands import SetDevices, StopGang, UnknownFieldsError, read_command
from services.contracts.nodes import EndedBy
from services.kit.command_stream import CommandStream, StreamSource
from services.kit.logging import Log
from services.kit.release import RELEASE

log = Log(__name__)

_UNREADABLE_CODE = 126


class Inbox(CommandStream):
    def __init__(self, redis: StreamSource, node_id: str, gangs: Gangs, retry_s: float) -> None:
        super().__init__(redis, node_id, retry_s)
        self._gangs = gangs

    def obey(self, text: str) -> None:
        """Carry out one command, written to disk first; ``OSError`` if it cannot be: it is delivered again."""
        try:
            command = read_command(orjson.loads(text))
        except UnknownFieldsError as error:
            log.error("command.unknown_fields", allocation_id=error.allocation_id, fields=error.fields)
            what = f"the job needs {', '.join(error.fields)}, which the agent of this node does not know"
            self._refuse(error.allocation_id, f"{what} (release {RELEASE}): upgrade the agent")
            return
        except (orjson.JSONDecodeError, ValidationError) as error:
            log.error("command.unreadable", error=str(error), command=text[:500])
            with suppress(orjson.JSONDecodeError, KeyError, TypeError):  # commands of unknown types are ignored
                named: Any = orjson.loads(text)
                if named["type"] == "start_gang":
                    self._refuse(str(named["allocation_id"]), f"this agent cannot read the command: {error}")
            return
        if isinstance(command, StopGang):
            self._gangs.stop(command)
        elif isinstance(command, SetDevices):
            self._gangs.set(command)
        else:
            self._gangs.accept(command)

    def _refuse(self, allocation_id: str, detail: str) -> None:
        self._gangs.refuse(allocation_id, EndedBy.REFUSED, _UNREADABLE_CODE, detail)
