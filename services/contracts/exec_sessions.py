"""Exec sessions: commands that run beside a job's own processes, for whoever asked for them."""

import base64
import binascii
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from services.contracts.jobs import Argument
from services.contracts.schema import Flag, Int, Message, Name, Text, maybe, said

MOST_COMMAND_BYTES = 64 * 1024
MOST_INPUT_BYTES = 256 * 1024  #: Bytes of standard input in one request

SILENCE_S = 30.0  #: A session whose client has sent nothing for this long is ended
BEAT_S = 8.0  #: How often a client that has nothing else to send says that it is there

SignalName = Literal["INT", "TERM", "QUIT", "HUP", "KILL", "USR1", "USR2"]


class TerminalSize(Message):
    """Size of a terminal, in characters."""

    rows: Int = Field(ge=1, le=10_000)
    columns: Int = Field(ge=1, le=10_000)


class ExecRequest(Message):
    """A command to run in the environment of a job's process, on its node."""

    command: list[Argument] = said("Program and arguments.", min_length=1, max_length=1_000)
    rank: Int | None = maybe("The process whose environment it gets, by its GPU in the gang; by default 0.", ge=0)
    node: Name | None = maybe("Instead of a rank: the first process on this node.")
    stdin: Flag = said("Whether standard input will be sent; else it is empty.", default=False)
    terminal: TerminalSize | None = maybe(
        "Run it in a terminal of this size: standard input and output are then one stream."
    )
    terminal_type: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,63}$")] = said(
        "`TERM` in a terminal.", default="xterm-256color"
    )

    @field_validator("command")
    @classmethod
    def _fits(cls, value: list[str]) -> list[str]:
        if not value[0]:
            raise ValueError("the first argument names the program and cannot be empty")
        if sum(len(word.encode()) + 1 for word in value) > MOST_COMMAND_BYTES:
            raise ValueError(f"must have at most {MOST_COMMAND_BYTES} bytes in total")
        return value

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.rank is not None and self.node is not None:
            raise ValueError("give rank or node, not both")
        return self


class FilesRequest(Message):
    """What to fetch of a job that has ended."""

    path: Annotated[Text, StringConstraints(min_length=1, max_length=4_096, pattern=r"[^/]")] = said(
        "A file or folder; a relative path starts in the job's working folder."
    )


class ExecInput(Message):
    """What a client sends to a running command. Sending it again changes nothing: bytes are counted by `offset`."""

    offset: Int = said("How many bytes of standard input come before `data`.", default=0, ge=0)
    data: str = said("Bytes, in Base64.", default="", max_length=4 * (MOST_INPUT_BYTES // 3 + 1))
    end: Flag = said("Whether standard input ends after `data`.", default=False)
    size: TerminalSize | None = maybe("The terminal's new size.")
    signal: SignalName | None = maybe("A signal for the command and its children.")

    @field_validator("data")
    @classmethod
    def _is_base64(cls, value: str) -> str:
        try:
            base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raise ValueError("is not Base64") from None
        return value

    @property
    def content(self) -> bytes:
        """The bytes of standard input."""
        return base64.b64decode(self.data)


class ExecInputAnswer(Message):
    """How much of standard input was taken; the rest is to be sent again."""

    offset: int = said("Bytes of standard input that the command's pipe has taken so far.")


class ExecEvent(Message):
    """One event of a session: first `started`, then `output` and `notice`, and finally `exit`."""

    type: Literal["started", "output", "notice", "exit"]
    session_id: str | None = maybe("`started`: where input is sent.")
    node_id: str | None = maybe("`started`: the node it runs on.")
    stream: Literal["stdout", "stderr"] | None = maybe("`output`: which stream.")
    data: str | None = maybe("`output`: bytes, in Base64.")
    code: int | None = maybe("`exit`: the command's exit status; 128 plus the number of the signal that ended it.")
    detail: str | None = maybe("A notice for the user, or why the command ended.")

    def message(self) -> bytes:
        """Return this event as a server-sent event."""
        return f"event: {self.type}\ndata: {self.model_dump_json(exclude_none=True)}\n\n".encode()


def output_message(stream: str, data: bytes) -> bytes:
    """Return an ``output`` event as a server-sent event, as ``message`` does, but faster."""
    head = f'event: output\ndata: {{"type":"output","stream":"{stream}","data":"'.encode()
    return b"".join((head, base64.b64encode(data), b'"}\n\n'))
