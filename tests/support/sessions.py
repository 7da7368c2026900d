"""Sessions at a terminal, as pages of the documentation show them: replayed, and compared line by line."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ENDED = "@@ended@@"
ANY_LINES = "..."
DIFFERS = {
    r"job_[0-9a-z]{26}": r"job_[0-9a-z]{26}",
    r"127\.0\.0\.1:8000": r"127\.0\.0\.1:\d+",
    r"\d[\d.,]* (?:J|Wh|kWh)\b": r"[\d.,]+ (?:J|Wh|kWh)",
    r"\d[\d.,]* (?:mg|g|kg)\b": r"[\d.,]+ (?:mg|g|kg)",
    r"\d+ s\b": r"\d+ (?:s|min(?: \d+ s)?)",
    r"  +": r"\s+",
}
"""What differs from one session to the next, and what it may look like."""


@dataclass
class Step:
    """A command of the page and what it says that the command prints."""

    command: str
    expected: list[str] = field(default_factory=list[str])


def steps_of(page: str) -> list[Step]:
    """Return the steps of the page's ``console`` blocks, in order."""
    steps: list[Step] = []
    for block in re.findall(r"^```console\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                steps.append(Step(line[2:]))
            elif line.startswith("> "):
                steps[-1].command += "\n" + line[2:]
            else:
                steps[-1].expected.append(line.rstrip())
    return steps


def pattern_of(line: str) -> str:
    """Return what a line of the page matches; ids, times and measured figures differ."""
    if line.endswith(" " + ANY_LINES):
        return re.escape(line.removesuffix(" " + ANY_LINES)) + r"(?: .*)?"
    parts = re.split("(" + "|".join(DIFFERS) + ")", line)  # literals, and between them what differs
    instead = [next(like for differs, like in DIFFERS.items() if re.fullmatch(differs, part)) for part in parts[1::2]]
    return "".join(re.escape(part) + like for part, like in zip(parts[::2], [*instead, ""], strict=True))


def matches(expected: list[str], printed: list[str]) -> bool:
    """Return whether lines are as the page says; ``...`` is any number of lines."""
    if not expected:
        return not printed
    if expected[0] == ANY_LINES:
        return any(matches(expected[1:], printed[at:]) for at in range(len(printed) + 1))
    return (
        bool(printed) and bool(re.fullmatch(pattern_of(expected[0]), printed[0])) and matches(expected[1:], printed[1:])
    )


def on_a_terminal(
    commands: list[str], folder: Path, environment: dict[str, str], within_s: float = 420
) -> list[list[str]]:
    """Run commands in one shell on a terminal; return the lines that each printed.

    The shell and what it runs end ``within_s``; commands that are not over by then are not among those returned.
    """
    script = folder / "session.sh"
    script.write_text("".join(f"{command}\necho {ENDED}\n" for command in commands))
    master, slave = pty.openpty()
    shell = subprocess.Popen(
        ["bash", str(script)],
        cwd=folder,
        env=environment,
        stdout=slave,
        stderr=slave,
        stdin=slave,
        start_new_session=True,
    )
    os.close(slave)
    late = threading.Timer(within_s, os.killpg, (shell.pid, signal.SIGTERM))
    late.start()
    printed = bytearray()
    with contextlib.suppress(OSError):  # the terminal is gone when the last process that had it ends
        while piece := os.read(master, 65_536):
            printed += piece
    late.cancel()
    shell.wait()
    os.close(master)
    parts = printed.decode().replace("\r", "").split(f"{ENDED}\n")
    return [[line.rstrip() for line in part.splitlines() if line.strip()] for part in parts[:-1]]


def environment_of(home: Path) -> dict[str, str]:
    """Return the variables of a person at a terminal, whose installation is under this home folder."""
    quick = {"SCHEDULER_ROUND_INTERVAL_S": "4", "TELEMETRY_HEARTBEAT_INTERVAL_S": "0.5"}
    terminal = {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "100", "LINES": "50"}
    place = {"HOME": str(home), "WATTSHIFT_DATA_DIR": str(home / "data"), "XDG_CONFIG_HOME": str(home / "config")}
    return os.environ | quick | terminal | place


def replay(steps: list[Step], commands: list[str], home: Path, environment: Mapping[str, str] | None = None) -> None:
    """Run a page's session, and compare what each command prints with what the page says."""
    printed = on_a_terminal(commands, home, environment_of(home) | dict(environment or {}))

    for step, lines in zip(steps, printed, strict=False):
        assert matches(step.expected, lines), f"$ {step.command}\n" + "\n".join(lines)
    assert len(printed) == len(steps), f"not over in time: $ {steps[len(printed)].command}"
