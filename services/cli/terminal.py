"""This end of a command that runs elsewhere: its streams, and the terminal in which it is used."""

import os
import shutil
import signal
import termios
import threading
import tty
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any

from services.cli.client import Gateway
from services.cli.commands import EXIT_UNAVAILABLE, CliError
from wattshift.sessions import Sender, SessionEvent, read_event

EXIT_LOST = 255  #: As ssh: the connection was lost, so that nobody knows how the command ended

_PIECE_BYTES = 64 * 1024
_ABANDON_AFTER = 3
"""How many Ctrl-C end the wait for a command that ignores them."""


class LostError(CliError):
    """A session broke off before its command ended."""

    def __init__(self) -> None:
        super().__init__("the connection to the command was lost; the command is being ended", EXIT_LOST)


@contextmanager
def session(gateway: Gateway, job_id: str, body: dict[str, Any]) -> Iterator[tuple[Iterator[SessionEvent], Sender]]:
    """Run a command in a job; yield its events once it runs, and what sends it input.

    Raises:
        CliError: The command cannot be run.
        LostError: The connection broke off.
    """
    path, started = f"/v1/jobs/{job_id}/exec", None
    try:
        with gateway.stream(path, method="POST", json=body) as answer:
            events = filter(None, map(read_event, answer.iter_lines()))
            if (started := next(events, None)) is None:
                raise LostError
            with Sender(partial(gateway.put, f"{path}/{started.session_id}")) as sender:
                yield events, sender
    except CliError as error:
        if started is not None and error.exit_code == EXIT_UNAVAILABLE:
            raise LostError from error
        raise


def passed_on(
    events: Iterable[SessionEvent],
    out: Callable[[bytes], object],
    err: Callable[[bytes], object],
    notice: Callable[[str], object] = lambda text: None,
) -> tuple[int, str]:
    """Pass on what a command writes; return its exit status, and why it ended; ``LostError``: it broke off."""
    for event in events:
        if event.type == "output":
            (out if event.stream == "stdout" else err)(event.data)
        elif event.type == "notice":
            notice(event.detail)
        elif event.type == "exit":
            return event.code, event.detail
    raise LostError


def run_session(
    gateway: Gateway, job_id: str, body: dict[str, Any], *, on_started: Callable[[], None] = lambda: None
) -> tuple[int, str]:
    """Run a command in a job with this process's streams; return its exit status, and why it ended if not by itself.

    Args:
        body: The request; with a ``terminal``, this process's terminal is passed through.
        on_started: Called once the command runs.

    Raises:
        CliError: The command cannot be run, or the connection broke off.
    """
    newline = "\r\n" if body.get("terminal") else "\n"
    out, err = partial(_write_all, 1), partial(_write_all, 2)
    with session(gateway, job_id, body) as (events, sender):
        on_started()
        with (_in_terminal if body.get("terminal") else _with_signals)(sender):
            if body.get("stdin"):
                threading.Thread(target=_pass_stdin, args=(sender,), daemon=True).start()
            return passed_on(events, out, err, lambda said: err(f"{newline}wattshift: {said}{newline}".encode()))


def terminal_size() -> dict[str, int]:
    """Return the actual size of this process's terminal, whatever LINES and COLUMNS say."""
    size = shutil.get_terminal_size()
    for stream in (0, 1, 2):
        with suppress(OSError):
            size = os.get_terminal_size(stream)
            break
    return {"rows": max(size.lines, 1), "columns": max(size.columns, 1)}


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _pass_stdin(sender: Sender) -> None:
    while data := os.read(0, _PIECE_BYTES):
        sender.feed(data)
    sender.end()


@contextmanager
def handled(*numbers: int, by: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have signals handled by a function during the block, and as before after it."""
    before = {number: signal.signal(number, by) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_by(number: int, _: FrameType | None) -> None:
    """End this process with the exit status that a shell shows for a signal, after it has cleared up."""
    raise SystemExit(128 + number)


@contextmanager
def _with_signals(sender: Sender) -> Iterator[None]:
    """Pass Ctrl-C on to a command without a terminal; pressed repeatedly, it ends the waiting."""
    pressed = 0

    def interrupt(_: int, __: FrameType | None) -> None:
        nonlocal pressed
        pressed += 1
        if pressed >= _ABANDON_AFTER:
            raise KeyboardInterrupt
        sender.signal("INT")

    with handled(signal.SIGINT, by=interrupt):
        yield


@contextmanager
def _in_terminal(sender: Sender) -> Iterator[None]:
    """Pass every key to the command, and the terminal's size as it changes; restore the terminal afterwards."""

    def resized(_: int, __: FrameType | None) -> None:
        sender.resize(**terminal_size())

    kept = termios.tcgetattr(0)
    with handled(signal.SIGWINCH, by=resized), handled(signal.SIGTERM, signal.SIGHUP, by=end_by):
        try:
            tty.setraw(0, termios.TCSADRAIN)  # what was typed ahead is not lost
            yield
        finally:
            termios.tcsetattr(0, termios.TCSADRAIN, kept)
