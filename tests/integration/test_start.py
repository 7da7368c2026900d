"""docs/start.md and docs/recipes.md are what happens: both sessions are replayed, line by line, on a terminal.

So are the README's commands.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.standalone import bootstrap, stack
from tests.support.servers import ROOT, scratch_folder
from tests.support.sessions import ANY_LINES, environment_of, matches, on_a_terminal, replay, steps_of


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home folder with no installation; the one that is made in it is stopped in the end."""
    for name in ("DATABASE_URL", "REDIS_URL", "WATTSHIFT_URL", "WATTSHIFT_API_KEY", "WATTSHIFT_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    with scratch_folder() as folder:
        yield folder
        stack.down(folder / "data")


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
