"""Every command in docs works as it stands, on a plain installation; what is left out is named, with the reason."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.standalone import stack
from tests.support.servers import ROOT, scratch_folder
from tests.support.snippets import Snippet, snippets_of
from tools import bootstrap

REPLAYED = ("start.md", "recipes.md")
"""With what they print: test_start.py."""
LEFT_OUT = {
    r"ray job submit ": "no Ray is at hand; tests/integration/test_ray_live.py has one",
    r"(\.venv/bin/|[A-Z_]+=\S+ )?wattshift (up|down|downgrade)\b": "the installation is up already",
    r"\./run --setup": "this checkout is set up",
    r"export (CARBON|GATEWAY|WATTSHIFT|OTEL)_": "what processes are started with",
    r"(.* )?docker(-compose)? ": "needs Docker",
    r"how=|(.* )?uv pip compile|pip install": "asks package indexes",
    r"kubectl |helm ": "needs a cluster of Kubernetes: tests/deploy has the chart",
    r"grep -h my-request-7": "needs that request: tests/integration/test_traces.py",
    r"wattshift grid order --profile": "the hours are those of a utility: tests/cli/test_grid.py",
    r"wattshift grid report": "needs an order that was in force: tests/cli/test_grid.py",
    r"wattshift reserve --gpus 8": "no zone has eight GPUs of one model here: tests/cli/test_reservations.py",
    r"python3 deploy/make_env.py": "writes beside that folder: tests/standalone/test_deploy.py",
    r"wattshift report .*--as ": "needs a site's facts: tests/cli/test_forms.py",
    r"wattshift verify ": "the key is that of another installation: tests/telemetry/test_verify.py",
    r"wattshift profile pool": "needs a model server: tests/integration/test_profile_inference.py",
    r"WEBHOOK_SECRET=": "waits for webhooks: tests/cli/test_webhooks.py",
    r"python3 deploy/supply_chain.py audit": "asks a server of advisories",
    r".*--git ": "needs a repository elsewhere",
    r"wattshift (submit --slice|nodes partition)": "needs GPUs that may be cut: tests/agent/test_simulated_mig.py",
    r"wattshift submit .*torchrun": "needs PyTorch",
    r"curl -N ": "needs a GPU: tests/integration/test_exec.py has the route",
    r"cp deploy/prometheus": "needs Prometheus: tests/integration/test_metrics.py has the files",
    r"curl -i http://127.0.0.1:8050/(v2|apps)/": "needs variants that answer: tests/integration/test_apps_live.py",
    r"wattshift pools report chat|wattshift pools plan": "needs traffic: tests/cli/test_pools.py",
    r"wattshift endpoints (set|delete) lab": "needs a model server of the reader's: tests/cli/test_endpoints.py",
    r"wattshift webhooks (?!list)": "needs a receiver with an address: tests/cli/test_webhooks.py",
    r"wattshift tenants set vision": "its tenant is made further below: tests/cli/test_access.py",
    r"wattshift pools delete": "later pages ask that pool: tests/cli/test_pools.py",
    r"wattshift secrets set": "asks for the value on a terminal: tests/cli/test_secrets.py",
    r"wattshift fleets set edge|wattshift fleets show edge": "has no GPUs of that model in that zone",
    r"wattshift forget-checkpoint": "needs a bound job: tests/integration/test_local_checkpoints.py",
    r"wattshift rotate-secret": "starts everything again, thrice: tests/integration/test_root_secret.py",
    r"wattshift users ": "needs accounts of the host: tests/cli/test_users.py",
    r"wattshift keys create --tenant vision --user": "needs a user: tests/cli/test_users.py",
    r"python examples/apps/visitors.py": "takes four minutes: tests/integration/test_apps_live.py",
}
"""Beginnings of commands, and why they are not run here."""
FILES = {
    "train.py": "print('step 1')\n",
    "evaluate.py": "",
    "train.sh": "#!/bin/bash\n#WATTSHIFT --gpus 1\npython3 train.py\n",
    "clean-up.sh": "#!/bin/sh\n",
    "fetch.sh": "#!/bin/sh\n",
    "jobs.yaml": "- {name: one, command: ['true']}\n- {name: two, command: ['true']}\n",
    "id_ed25519": "key",
    "facts.json": "{}\n",
}
PREPARED = (
    "echo token | wattshift secrets set HF_TOKEN",
    "echo token | wattshift secrets set wandb.key",
    "echo key | wattshift secrets set deploy_key",
    "wattshift tenants create research",
    'id() { wattshift "$1" --json | python3 -c \'import json, sys; print(json.load(sys.stdin)[-1]["id"])\'; }',
)
NAMED = {
    "KEY_ID": '"$(wattshift keys create --tenant vision --role user --json | python3 -c '
    '\'import json, sys; print(json.load(sys.stdin)["id"])\')"',
    "BUDGET_ID": '"$(id budgets)"',
    "ORDER": '"$(id grid)"',
    "RESERVATION": '"$(id reservations)"',
    "n1 n2": "node-1 node-2",
}
"""What stands for something of the reader's own."""


def all_snippets() -> list[Snippet]:
    """Return every command of the pages that are not replayed."""
    pages = sorted(path for path in (ROOT / "docs").glob("*.md") if path.name not in REPLAYED)
    return [snippet for page in pages for snippet in snippets_of(page)]


def is_left_out(snippet: Snippet) -> bool:
    return any(re.match(pattern, snippet.command) for pattern in LEFT_OUT)


def test_each_reason_is_one_for_something() -> None:
    commands = [snippet.command for snippet in all_snippets()]

    assert [p for p in LEFT_OUT if not any(re.match(p, command) for command in commands)] == []
    assert sum(is_left_out(snippet) for snippet in all_snippets()) < len(commands) * 0.55


@pytest.fixture(scope="module")
def place() -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder with the reader's files, and the environment of an installation that is up."""
    nodes = "1x4:H200-SXM-141GB@US-CAL-CISO,1x4@US-CAL-CISO,1x4@DE"
    with scratch_folder() as folder:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("WATTSHIFT_")}
        environment |= {"WATTSHIFT_DATA_DIR": str(folder / "data"), "HOME": str(folder), "NO_COLOR": "1"}
        environment |= {"XDG_CONFIG_HOME": str(folder / "config"), "TERM": "dumb"}
        environment["PATH"] = f"{bootstrap.VENV / 'bin'}:{environment['PATH']}"
        quick = {"SCHEDULER_ROUND_INTERVAL_S": "4", "TELEMETRY_HEARTBEAT_INTERVAL_S": "0.5"}
        up = stack.up(folder / "data", nodes=nodes, env=environment | quick)
        environment |= {"GATEWAY": up.gateway_url, "ROUTER": up.urls["router"], "JOB": ""}
        environment["KEY"] = (folder / "data" / "admin.key").read_text().strip()
        work = folder / "work"
        work.mkdir()
        for name, text in FILES.items():
            (work / name).write_text(text)
            (work / name).chmod(0o755)
        (work / "model").mkdir()
        shutil.copy(work / "train.py", work / "model")
        for name in ("examples", "deploy"):
            (work / name).symlink_to(ROOT / name)
        (work / ".venv").symlink_to(bootstrap.VENV)
        (work / ".wattshift").symlink_to(folder / "data")
        yield work, environment
        stack.down(folder / "data")


def as_run(command: str, work: Path) -> str:
    """Return a command with the addresses and folders of this installation."""
    for name, value in NAMED.items():
        command = re.sub(rf"\b{name}\b", value.replace("\\", r"\\"), command)
    command = command.replace("http://127.0.0.1:8000", '"$GATEWAY"').replace('\'"$GATEWAY"', '"$GATEWAY"\'')
    command = command.replace("http://127.0.0.1:8050", '"$ROUTER"').replace("curl ", "curl --fail-with-body ")
    command = command.replace("--upload .", "--upload model")  # this folder has links that lead out of it
    return command.replace("/backup/", f"{work}/backup-").replace("/new/place", f"{work}/new-place")


def test_the_commands_of_the_pages_work(place: tuple[Path, dict[str, str]]) -> None:
    work, environment = place
    assert shutil.which("bash")
    run = [snippet for snippet in all_snippets() if not is_left_out(snippet)]
    lines = [f"{command} || exit 1" for command in PREPARED]
    for at, snippet in enumerate(run):
        if "/v1/completions" in snippet.command:  # the pool's servers take some seconds to start
            lines.append(f"for _ in $(seq 90); do {as_run(snippet.command, work)} > /dev/null && break; sleep 1; done")
        lines += [f"{{ {as_run(snippet.command, work)}\n}} > output-{at} 2>&1", f"echo $? > {work}/status-{at}"]
    (work / "session.sh").write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        ["bash", "session.sh"], cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )

    statuses = [(work / f"status-{at}") for at in range(len(run))]
    assert statuses[-1].exists(), done.stderr[-3000:]
    failed = {
        f"{snippet.page}: {snippet.command}": (work / f"output-{at}").read_text()[-600:]
        for at, (snippet, status) in enumerate(zip(run, statuses, strict=True))
        if status.read_text() != "0\n"
    }
    assert failed == {}, "\n".join(map(" ".join, failed.items()))
    assert len(run) > 40
