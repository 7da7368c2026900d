"""What is deployed runs the same processes as one machine does, and its files are well formed."""

import importlib.util
import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.utils import canonicalize_name

from services.kit.credentials import Credential
from services.kit.problems import ProblemError
from services.kit.settings import PUBLIC
from services.kit.tokens import Incoming, outgoing
from services.standalone import one, processes
from services.standalone.healthcheck import is_well
from tests.support.control_plane import OPERATOR
from tests.support.extras import needs
from tests.support.servers import ROOT

COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def test_compose_runs_what_the_supervisor_runs() -> None:
    commands = {name: tuple(service.get("command") or ()) for name, service in COMPOSE["services"].items()}
    for service in processes.SERVICES:
        assert commands[service.name] == ("python", "-m", service.module)
        environment = COMPOSE["services"][service.name]["environment"]
        assert environment[f"{service.prefix}PORT"] == str(service.port)
        assert environment[f"WATTSHIFT_{service.prefix}URL"] == f"http://{service.name}:{service.port}"
    assert commands["migrations"] == ("python", *processes.MIGRATIONS)
    for name, words in processes.WORKERS.items():
        assert commands[name] == ("python", *words)
    assert commands["agent-1"] == commands["agent-2"] == ("python", "-m", processes.AGENT.module)
    others = {"postgres", "valkey", "migrations", *processes.WORKERS, "agent-1", "agent-2"}
    assert commands.keys() == others | {service.name for service in processes.SERVICES}


class Strict(yaml.SafeLoader):
    """Refuses a key that stands twice, as Compose v2 does; PyYAML takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.value != "<<"]
        assert len(keys) == len(set(keys)), f"a key stands twice{node.start_mark}"
        return super().construct_mapping(node, deep)


@pytest.mark.parametrize(
    "file", [ROOT / "docker-compose.yml", *sorted((ROOT / "deploy").glob("**/*.yml"))], ids=lambda file: file.name
)
def test_no_key_stands_twice(file: Path) -> None:
    for document in file.read_text().split("\n---\n"):
        yaml.load(document, Strict)


def overlay(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "deploy" / name).read_text())["services"]


def test_compose_checks_health_limits_and_keeps_data() -> None:
    for name, service in COMPOSE["services"].items():
        assert "healthcheck" in service or name == "migrations", name
        assert service["mem_limit"].startswith("${"), name
        assert {"max-size", "max-file"} == set(service["logging"]["options"]), name
    for name in processes.WORKERS:
        assert COMPOSE["services"][name]["healthcheck"]["test"][-1] == "pulse"
    assert "WATTSHIFT_PULSE_FILE=/tmp/" in (ROOT / "deploy" / "Dockerfile").read_text(), "which is a tmpfs"
    assert {"postgres", "valkey", "admission", "router", "agent-1", "agent-2"} == set(COMPOSE["volumes"])
    assert [name for name, service in COMPOSE["services"].items() if "ports" in service] == ["gateway", "router"]


def test_simulated_agents_run_only_where_they_are_asked_for_and_others_reach_what_they_need() -> None:
    behind = {name for name, service in COMPOSE["services"].items() if service.get("profiles") == ["simulated"]}
    assert behind == {"agent-1", "agent-2"} == {name for name in COMPOSE["services"] if name.startswith("agent")}
    published = {name: service["ports"][0] for name, service in overlay("compose.nodes.yml").items()}
    assert {name: ports.rpartition(":")[2] for name, ports in published.items()} == {
        "telemetry": "8060",
        "valkey": "6379",
    }
    assert all(ports.startswith("${WATTSHIFT_NODES_BIND:?") for ports in published.values()), "on no address by default"
    (agent,) = overlay("compose.agent.yml").values()
    assert tuple(agent["command"]) == ("python", "-m", processes.AGENT.module)
    assert agent["environment"]["GPU_AGENT_DRIVER"] == "nvml"


def test_what_runs_twice_finds_its_servers_outside() -> None:
    """The overlay keeps every name that others wait for, and every address of the two servers follows its variable."""
    ha = overlay("compose.ha.yml")
    assert {name for name, service in ha.items() if service.get("scale") == 2} == {"gateway", "admission", "scheduler"}
    text = (ROOT / "docker-compose.yml").read_text()
    for name, variable in (("postgres", "WATTSHIFT_POSTGRES"), ("valkey", "WATTSHIFT_VALKEY")):
        assert ha[name]["command"] == ["sleep", "infinity"], "in place of the server"
        assert f"tcp:${{{variable}:?" in ha[name]["healthcheck"]["test"][-1]
        assert f"@{name}:" not in text
        assert f"@${{{variable}:-{name}:" in text
    ports = COMPOSE["services"]["gateway"]["ports"]
    assert [each.rpartition(":")[0].endswith("${WATTSHIFT_PORT:-8000}") for each in ports] == [True], "a range of ports"


def test_a_server_elsewhere_is_reached_by_one_of_its_addresses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert is_well(f"tcp:127.0.0.1:1,127.0.0.1:{port}/wattshift?target_session_attrs=read-write")
    assert not is_well(f"tcp:127.0.0.1:{port}")
    assert not is_well("tcp:nonsense")


def test_a_workers_container_is_well_while_its_loop_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pulse = tmp_path / "pulse"
    monkeypatch.setenv("WATTSHIFT_PULSE_FILE", str(pulse))
    assert not is_well("pulse")
    pulse.touch()
    assert is_well("pulse")
    os.utime(pulse, (0, 0))
    assert not is_well("pulse")


def test_compose_accepts_the_file(tmp_path: Path) -> None:
    commands = [["docker", "compose"], ["docker-compose"]]
    found = [
        c
        for c in commands
        if shutil.which(c[0]) and not subprocess.run([*c, "version"], capture_output=True).returncode
    ]
    if not found:
        pytest.skip("neither docker compose nor docker-compose is installed")
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    shutil.copytree(ROOT / "services" / "kit", tmp_path / "services" / "kit")
    shutil.copy(ROOT / "docker-compose.yml", tmp_path)
    refused = subprocess.run([*found[0], "config"], cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "deploy/make_env.py" in refused.stderr
    make_env = [sys.executable, tmp_path / "deploy" / "make_env.py"]
    assert subprocess.run(make_env).returncode == 0
    assert (tmp_path / ".env").stat().st_mode & 0o077 == 0
    assert subprocess.run(make_env, capture_output=True).returncode == 1, "existing secrets are kept"
    for command in found:
        accepted = subprocess.run([*command, "config"], cwd=tmp_path, capture_output=True, text=True)
        assert accepted.returncode == 0, accepted.stderr


def test_every_process_gets_its_own_secrets_alone(tmp_path: Path) -> None:
    """What `make_env` writes is all that the file asks for, also where an earlier release wrote the rest."""
    for folder in ("deploy", "services/kit"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    make_env = [sys.executable, "-S", tmp_path / "deploy" / "make_env.py"]  # -S: nothing but Python itself
    old = {"POSTGRES_PASSWORD": "p", "VALKEY_PASSWORD": "v", "WATTSHIFT_NODE_JOIN_TOKEN": "j" * 48}
    (tmp_path / ".env").write_text("".join(f"{name}={value}\n" for name, value in old.items()))
    assert subprocess.run(make_env, capture_output=True).returncode == 1, "existing secrets are kept"
    subprocess.run([*make_env, "--add"], check=True)
    made = dict(line.split("=", 1) for line in (tmp_path / ".env").read_text().splitlines())

    text = (ROOT / "docker-compose.yml").read_text()
    assert old.items() <= made.items()
    assert set(re.findall(r"\$\{([A-Z0-9_]+):\?", text)) <= made.keys()
    assert "user telemetry on #" in (tmp_path / "valkey-users.conf").read_text()
    for service in processes.SERVICES:
        credential = Credential.parsed(made[f"{service.name.upper()}_CREDENTIAL"])
        asked = COMPOSE["services"][service.name]["environment"]["WATTSHIFT_SERVICE_CREDENTIAL"]
        assert credential.name == service.name
        assert asked.startswith(f"${{{service.name.upper()}_CREDENTIAL:")
    for name, service in COMPOSE["services"].items():
        given = set(service.get("environment") or ())
        assert ("WATTSHIFT_NODE_JOIN_TOKEN" in given) == (name == "telemetry")
        assert ("WATTSHIFT_SERVICE_TOKEN" in given) == (name == "admission")
        assert "REDIS_URL" not in given or name not in ("agent-1", "agent-2")


def test_processes_of_two_steps_towards_a_new_secret_know_each_other(tmp_path: Path) -> None:
    for folder in ("deploy", "services/kit"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    make_env = [sys.executable, "-S", tmp_path / "deploy" / "make_env.py"]

    def run(*words: str) -> dict[str, str]:
        assert subprocess.run([*make_env, *words], capture_output=True).returncode == 0, words
        return dict(line.split("=", 1) for line in (tmp_path / ".env").read_text().splitlines())

    def knows(asked: dict[str, str], asking: dict[str, str]) -> bool:
        """Whether telemetry of one file knows the gateway of another, and nodes the admission."""
        of = (asked, "TELEMETRY"), (asking, "GATEWAY"), (asking, "ADMISSION")
        telemetry, gateway, admission = (Credential.parsed(file[f"{name}_CREDENTIAL"]) for file, name in of)
        incoming, sent = Incoming.of(telemetry), outgoing(gateway, "telemetry").authorization(OPERATOR)
        try:
            incoming.caller(sent, "GET", "/v1/nodes")
        except ProblemError:
            return False
        return admission.nodes[0] in telemetry.nodes

    steps = [run(), run("--rotate"), run("--rotate")]
    assert subprocess.run([*make_env, "--rotate"], capture_output=True).returncode == 1, "it is to be finished"
    steps.append(run("--finish"))

    assert [knows(one, another) for one, another in itertools.pairwise(steps)] == [True] * 3
    assert [knows(another, one) for one, another in itertools.pairwise(steps)] == [True] * 3
    assert not knows(steps[3], steps[0]), "the old secret was dropped"
    assert not knows(steps[3], steps[1])
    assert steps[0].keys() | {"WATTSHIFT_ROTATION"} == steps[3].keys()
    assert {name for name in steps[0] if steps[0][name] != steps[3][name]} == {
        f"{service.name.upper()}_CREDENTIAL" for service in processes.SERVICES
    }
    before = (tmp_path / ".env").read_text()
    assert subprocess.run([*make_env, "--finish"], capture_output=True).returncode == 1, "nothing is being replaced"
    assert (tmp_path / ".env").read_text() == before


def test_an_image_compiles_what_its_processes_import_and_what_they_use_later() -> None:
    """Nothing can be written in a container that runs: what has no bytecode there is compiled at each use."""
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    later = re.findall(r'"([\w.]+)"', text.partition("compile(")[2].partition(")'")[0])
    assert later
    (program,) = re.findall(r"'from ([\w.]+) import compile_imported", text)
    assert f"!{program.replace('.', '/')}.py" in (ROOT / ".dockerignore").read_text().split()
    for name in later:
        assert importlib.util.find_spec(name), f"{name} is not there to be compiled"


@pytest.mark.parametrize(("machine", "solver"), [("x86_64", "i64"), ("aarch64", "arm64")])
def test_an_image_keeps_of_packages_what_runs_on_its_machine(tmp_path: Path, machine: str, solver: str) -> None:
    kept = ["a/__init__.py", "a/c.so", "a/py.typed", "a/data.json", f"pulp/solverdir/cbc/linux/{solver}/cbc"]
    left_out = ["a/tests/test_a.py", "a/a.pyi", "a/a.pyx", "a/a.pxd", "a/a.c", "a/a.cpp", "a/a.h", "a/a.hpp", "a/a.a"]
    left_out += [f"pulp/solverdir/cbc/{each}/cbc" for each in ("linux/i32", "linux/i64", "linux/arm64", "osx/i64")]
    packages = tmp_path / ".venv" / "lib" / "python3.11" / "site-packages"
    for name in {*kept, *left_out}:
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).touch()
    stand_in = tmp_path / "uname"
    stand_in.write_text(f"#!/bin/sh\necho {machine}\n")
    stand_in.chmod(0o755)
    text = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", "")
    (command,) = re.findall(r"find \.venv.*?rm -r {} \+", text)
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["sh", "-c", command], cwd=tmp_path, env=os.environ | {"PATH": path}, check=True)
    assert {str(path.relative_to(packages)) for path in packages.rglob("*") if path.is_file()} == set(kept)


def test_the_image_holds_all_that_is_installed() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    kept = (ROOT / ".dockerignore").read_text().split()
    assert {f"!{package.rstrip('*')}" for package in packages} | {"!clients/python"} <= set(kept)
    assert not {"!tests", "!docs", "!lab"} & set(kept)


def blocks(lock: Path) -> dict[str, str]:
    """Return the pinned packages of a lock with their hashes, by name."""
    found = re.split(r"\n(?=\S)", lock.read_text().strip())
    return {block.partition(" ;")[0].partition(" \\")[0]: block for block in found}


@pytest.mark.parametrize(
    ("name", "extras"),
    [
        ("agent", ["agent", "traces"]),
        ("control", ["control", "solvers", "ipmi", "traces"]),
        ("kueue", ["control", "kueue", "picker", "traces"]),
        ("standalone", ["standalone"]),
    ],
)
def test_an_image_and_set_up_install_its_extras_as_they_were_tested(name: str, extras: list[str]) -> None:
    tested, deployed = blocks(ROOT / "requirements.lock"), blocks(ROOT / "deploy" / f"{name}.lock")
    assert deployed.keys() <= tested.keys()
    assert {package: deployed[package] for package in deployed} == {package: tested[package] for package in deployed}
    pinned = {canonicalize_name(package.partition("==")[0].partition("[")[0]) for package in deployed}
    assert needs(*extras) <= pinned
    assert not {"pytest", "ruff", "pyright", "hypothesis", "playwright"} & pinned
    assert ("numpy" in pinned) == (name != "agent")
    assert ("kubernetes" in pinned) == (name == "kueue"), "123 MB that one process needs"
    assert "pyarrow" not in pinned, "176 MB for Parquet, which no service takes"


UNITS = ROOT / "deploy" / "systemd"


def lines_of(unit: str) -> list[str]:
    return (UNITS / unit).read_text().splitlines()


def test_every_unit_is_watched_and_started_again() -> None:
    for unit in ("wattshift.service", "wattshift@.service", "wattshift-agent.service"):
        lines = lines_of(unit)
        assert {"Type=notify", "Restart=always", "WatchdogSignal=SIGKILL", "StartLimitIntervalSec=0"} <= set(lines), (
            unit
        )
        assert any(line.startswith("WatchdogSec=") for line in lines), unit
    for unit in ("wattshift.service", "wattshift-agent.service"):
        assert "KillMode=process" in lines_of(unit), "a restart must leave jobs alone"
    assert any(line.endswith(f"-m {processes.AGENT.module}") for line in lines_of("wattshift-agent.service"))


def test_the_target_wants_every_process() -> None:
    wanted = re.findall(r"wattshift@([\w-]+)\.service", (UNITS / "wattshift.target").read_text())
    assert sorted(wanted) == sorted([*(service.name for service in processes.SERVICES), *processes.WORKERS])
    for name in wanted:
        assert one.command(name)[:2] == processes.PYTHON
    assert one.command("worker")[2:] == processes.WORKERS["worker"]
    assert one.command("carbon")[2:] == ("-m", "carbon_service.app")
    with pytest.raises(SystemExit, match="there is no process 'postgres'; known: gateway, "):
        one.command("postgres")


def test_systemd_holds_the_ports_that_users_and_nodes_reach() -> None:
    held = [service for service in (*processes.SERVICES, processes.AGENT) if service.name in (*PUBLIC, "agent")]
    units = {"agent": ("wattshift-agent", "wattshift-agent.service")}
    for service in held:
        name, starter = units.get(service.name, (f"wattshift@{service.name}", "wattshift.target"))
        assert f"ListenStream={service.port}" in lines_of(f"{name}.socket")
        assert any(line.startswith("Wants=") and f"{name}.socket" in line for line in lines_of(starter))
        assert ("PartOf=wattshift.target" in lines_of(f"{name}.socket")) == (starter == "wattshift.target")
    assert len(held) == len(list(UNITS.glob("*.socket"))) == 3


def test_systemd_accepts_the_units() -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed")
    units = sorted(path for path in UNITS.iterdir() if path.suffix in (".service", ".socket", ".target"))
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True)
    faults = [line for line in done.stderr.splitlines() if not re.search(r"python3? is not executable", line)]
    assert [line for line in faults if "wattshift" in line] == []


def test_the_agents_example_settings_name_real_ones() -> None:
    settings = pytest.importorskip("gpu_agent.settings").AgentSettings
    known = {f"GPU_AGENT_{name}".upper() for name in settings.model_fields}
    known |= {str(field.validation_alias) for field in settings.model_fields.values()}
    text = (UNITS / "agent.env.example").read_text()
    used = set(re.findall(r"^#?([A-Z_]+)=", text, re.MULTILINE))
    used |= {name for name in COMPOSE["x-agent-environment"] if name.startswith("GPU_AGENT_")}
    assert used <= known
