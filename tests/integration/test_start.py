"""docs/start.md and docs/recipes.md are what happens: both sessions are replayed, line by line, on a terminal.

So are the README's commands.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from services.standalone import bootstrap, stack
from tests.support.servers import ROOT, scratch_folder

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


def on_a_terminal(commands: list[str], folder: Path, environment: dict[str, str]) -> list[list[str]]:
    """Run commands in one shell on a terminal; return the lines that each printed."""
    script = folder / "session.sh"
    script.write_text("".join(f"{command}\necho {ENDED}\n" for command in commands))
    master, slave = pty.openpty()
    shell = subprocess.Popen(
        ["bash", str(script)], cwd=folder, env=environment, stdout=slave, stderr=slave, stdin=slave
    )
    os.close(slave)
    printed = bytearray()
    with contextlib.suppress(OSError):  # the terminal is gone when the last process that had it ends
        while piece := os.read(master, 65_536):
            printed += piece
    shell.wait()
    os.close(master)
    parts = printed.decode().replace("\r", "").split(f"{ENDED}\n")
    return [[line.rstrip() for line in part.splitlines() if line.strip()] for part in parts[:-1]]


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home folder with no installation; the one that is made in it is stopped in the end."""
    for name in ("DATABASE_URL", "REDIS_URL", "WATTSHIFT_URL", "WATTSHIFT_API_KEY", "WATTSHIFT_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    with scratch_folder() as folder:
        yield folder
        stack.down(folder / "data")


def environment_of(home: Path) -> dict[str, str]:
    quick = {"SCHEDULER_ROUND_INTERVAL_S": "4", "TELEMETRY_HEARTBEAT_INTERVAL_S": "0.5"}
    terminal = {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "100", "LINES": "50"}
    place = {"HOME": str(home), "WATTSHIFT_DATA_DIR": str(home / "data"), "XDG_CONFIG_HOME": str(home / "config")}
    return os.environ | quick | terminal | place


def test_the_session_of_the_page_is_what_happens(home: Path) -> None:
    steps = steps_of((ROOT / "docs" / "start.md").read_text(encoding="utf-8"))
    assert [step.command.split()[0] for step in steps[:3]] == ["git", "cd", "./run"]
    assert bootstrap.VENV == ROOT / ".venv"
    # This checkout stands for the clone: tests/standalone/test_bootstrap.py makes one, and sets it up.
    replay(steps, [f"cd {ROOT}", "true", "true", *(step.command for step in steps[3:])], home)


def test_the_recipes_are_what_happens(home: Path) -> None:
    steps = steps_of((ROOT / "docs" / "recipes.md").read_text(encoding="utf-8"))
    there = f"export PATH={bootstrap.VENV}/bin:$PATH; {steps[0].command}"

    replay(steps, [there, *(step.command for step in steps[1:])], home)


def replay(steps: list[Step], commands: list[str], home: Path) -> None:
    """Run a page's session, and compare what each command prints with what the page says."""
    printed = on_a_terminal(commands, home, environment_of(home))

    assert len(printed) == len(steps)
    for step, lines in zip(steps, printed, strict=True):
        assert matches(step.expected, lines), f"$ {step.command}\n" + "\n".join(lines)


def test_the_first_commands_of_the_readme_work_as_pasted(home: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    (submit,) = (line for block in blocks for line in block.splitlines() if "wattshift submit" in line)
    (curl,) = (block for block in blocks if block.startswith("curl") and "/v1/jobs" in block)
    up = stack.up(home / "data", nodes="2x4", env=environment_of(home))
    (home / "train.py").write_text("print('step 30000')\n")
    curl = curl.replace("http://127.0.0.1:8000", up.gateway_url).replace(".wattshift/admin.key", "data/admin.key")

    by_hand, by_curl, followed = (
        "\n".join(lines)
        for lines in on_a_terminal(
            [
                submit.replace(".venv/bin/wattshift", str(ROOT / ".venv" / "bin" / "wattshift")),
                curl,
                f"{ROOT}/.venv/bin/wattshift logs --follow bert",
            ],
            home,
            environment_of(home),
        )
    )

    assert "hello succeeded" in by_hand
    assert json.loads(by_curl)["name"] == "bert"
    assert "step 30000" in followed
    assert "bert succeeded" in followed


def test_the_readmes_commands_lead_to_a_streamed_answer_with_its_grams(home: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    (pools,) = (block.splitlines() for block in blocks if "wattshift pools set" in block)
    (curl,) = (block for block in blocks if block.startswith("curl") and "/v1/chat/completions" in block)
    nodes = pools[0].rpartition(" ")[2]
    up = stack.up(home / "data", nodes=nodes, env=environment_of(home))
    curl = curl.replace("http://127.0.0.1:8050", up.urls["router"]).replace(".wattshift/admin.key", "data/admin.key")
    commands = [
        f"cd {ROOT}",
        pools[1],
        f'until curl -sf -H "authorization: Bearer $(cat {home}/data/admin.key)" {up.urls["router"]}/metrics'
        " | grep -q 'server_up.*germany.* 1'; do sleep 0.5; done",
        f"cd {home}",
        curl,
    ]

    *_, answer = on_a_terminal(commands, home, environment_of(home))

    chunks = [json.loads(line[6:])["object"] for line in answer if line.startswith("data: {")]
    assert len(chunks) > 10, "a word at a time"
    assert set(chunks) == {"chat.completion.chunk"}
    (comment,) = (line for line in answer if line.startswith(":"))
    found = re.fullmatch(r": x-wattshift-gco2=(\S+) x-wattshift-wh=(\S+) x-wattshift-location=(\S+)", comment)
    assert found, comment
    assert float(found[1]) > 0
    assert float(found[2]) > 0
    assert found[3] in ("germany", "california")
    assert "data: [DONE]" in answer


def test_pages_and_terminals_are_compared_line_by_line() -> None:
    said = ["a is queued", ANY_LINES, "used 1.00 Wh in job_01m81bsvmh3chber01j1ag8fmt"]
    assert matches(said, ["a is queued", "used 3 J in job_01aaaaaaaaaaaaaaaaaaaaaaaa"])
    assert matches(said, ["a is queued", "x", "y", "used 3 J in job_01aaaaaaaaaaaaaaaaaaaaaaaa"])
    assert not matches(said, ["a is queued", "used 3 J in job_01aaaaaaaaaaaaaaaaaaaaaaaa", "more"])
    assert not matches(said, ["a is held", "used 3 J in job_01aaaaaaaaaaaaaaaaaaaaaaaa"])
    assert shutil.which("bash")
