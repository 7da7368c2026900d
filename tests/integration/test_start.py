"""docs/start.md and docs/recipes.md are what happens: both sessions are replayed, line by line, on a terminal.

So are the README's commands.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.client import Gateway
from services.standalone import stack
from tests.support.servers import ROOT, scratch_folder, wait_until
from tests.support.sessions import ANY_LINES, environment_of, matches, on_a_terminal, replay, steps_of
from tools import bootstrap


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home folder with no installation; the one that is made in it is stopped in the end."""
    for name in ("DATABASE_URL", "REDIS_URL", "WATTSHIFT_URL", "WATTSHIFT_API_KEY", "WATTSHIFT_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    with scratch_folder() as folder:
        yield folder
        stack.down(folder / "data")


@pytest.fixture
def closed_home(home: Path) -> Path:
    """The home of a root, or of anybody, who lets nobody else in; the folders above it are open."""
    home.chmod(0o700)
    return home


def test_the_session_of_the_page_is_what_happens(closed_home: Path) -> None:
    steps = steps_of((ROOT / "docs" / "start.md").read_text(encoding="utf-8"))
    assert [step.command.split()[0] for step in steps[:3]] == ["git", "cd", "./run"]
    assert bootstrap.VENV == ROOT / ".venv"
    # This checkout stands for the clone: tests/standalone/test_bootstrap.py makes one, and sets it up.
    replay(steps, [f"cd {ROOT}", "true", "true", *(step.command for step in steps[3:])], closed_home)


def test_the_recipes_are_what_happens(closed_home: Path) -> None:
    steps = steps_of((ROOT / "docs" / "recipes.md").read_text(encoding="utf-8"))
    there = f"export PATH={bootstrap.VENV}/bin:$PATH; {steps[0].command}"

    replay(steps, [there, *(step.command for step in steps[1:])], closed_home)


@pytest.mark.skipif(os.geteuid() != 0, reason="jobs of others than root run as themselves")
def test_roots_job_in_a_closed_home_runs_there_and_not_as_root(closed_home: Path) -> None:
    work, environment = closed_home / "work", environment_of(closed_home)
    there = f"export PATH=$PATH:{ROOT}/.venv/bin; mkdir -p {work} && cd {work} && echo it runs > notes"
    submit = "wattshift submit --follow --name first --command 'id -u > out; cat notes; ls -d ..'"
    install = closed_home / "data"

    _, started, ran, _, refused = on_a_terminal(
        [there, "wattshift up --nodes 1x4", submit, f"cd {install}", "wattshift submit true"], closed_home, environment
    )

    assert any(line.startswith("jobs run as the account tenant-default, not as root") for line in started)
    assert ran[0].startswith(f"wattshift: opened {work} by access lists to the account tenant-default")
    assert "it runs" in ran
    assert ran[-1].startswith("first succeeded")
    assert int((work / "out").read_text()) == (work / "out").stat().st_uid != 0
    assert refused[0].startswith("wattshift: jobs run as the account tenant-default, which cannot enter")
    assert not any("chmod" in line for line in refused), "the installation stays closed"


@pytest.mark.skipif(os.geteuid() != 0, reason="jobs of others than root run as themselves")
def test_a_start_that_cannot_succeed_is_tried_once(closed_home: Path) -> None:
    up = stack.up(closed_home / "data", nodes="1x4", env=environment_of(closed_home))
    gateway = Gateway(up.gateway_url, (closed_home / "data" / "admin.key").read_text().strip())
    bodies = {
        "cannot enter its working folder": {"command": ["true"], "working_dir": str(closed_home)},
        "cannot run /no/such/program: No such file or directory.": {"command": ["/no/such/program"], "max_restarts": 3},
    }
    for why, body in bodies.items():
        job = gateway.call("POST", "/v1/jobs", body={"name": "gone", **body})["id"]
        wait_until(lambda job=job: gateway.get(f"/v1/jobs/{job}")["state"] not in ("queued", "starting", "running"))
        found = gateway.get(f"/v1/jobs/{job}")
        assert (found["state"], found["reason"], found["generation"]) == ("failed", "start_failed", 1)
        assert why in found["detail"]


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
