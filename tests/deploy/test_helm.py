"""The chart: Helm's own engine lints and renders it, and Kubernetes' published schemas check what comes out."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpu_agent.settings import AgentSettings
from services.engines.kueue.settings import KueueSettings
from tests.support.environments import programs_of
from tests.support.servers import ROOT

Json = dict[str, Any]
CHART = ROOT / "deploy" / "helm" / "wattshift"
CONTROL = {"controlPlane": {"telemetryUrl": "https://control.example.org:8060"}}
EVERYTHING = {
    "controlPlane": {
        "telemetryUrl": "https://control.example.org:8060",
        "redisUrl": "rediss://valkey.example.org:6379/0",
        "tlsSecret": "wattshift-tls",
        "showCertificate": True,
    },
    "imagePullSecrets": [{"name": "registry"}],
    "kueue": {
        "mode": "control",
        "zone": "DE",
        "dispatch": {"enabled": True},
        "state": {"storageClassName": "fast"},
        "settings": {"ENGINE_KUEUE_GPU_MEMORY_GIB": "141"},
    },
    "agent": {"zone": "DE", "engine": "slurm", "settings": {"GPU_AGENT_HEALTH": "off"}},
}

# Helm's SDK and the schemas, in a Python of their own: what they are asked is one document, and what they answer.
_PROGRAM = """
import json, sys
import helm_python, kubernetes_validate, yaml
path, values = sys.argv[1], json.load(sys.stdin)
said = {"lint": helm_python.lint(path, values, strict=True)}
try:
    with helm_python.Chart.load(path) as chart:
        said["files"] = chart.render(values, name="green", namespace="wattshift")
except helm_python.HelmError as error:
    said["refusal"] = str(error)
said["faults"] = []
for name, text in said.get("files", {}).items():
    for each in yaml.safe_load_all(text) if name.endswith(".yaml") else ():
        if each:
            for version in ("1.30", "1.34"):
                try:
                    kubernetes_validate.validate(each, version, strict=True)
                except kubernetes_validate.ValidationError as error:
                    said["faults"].append(f"{version} {name}: {error}")
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def helm() -> Callable[..., Json]:
    """Return what lints, renders and checks the chart with some values."""
    wanted = ("helm-python-sdk==0.2.2", "kubernetes-validate==1.37.0", "pyyaml")
    programs = programs_of("helm", *wanted, variable="WATTSHIFT_HELM_ENVIRONMENT")

    def ask(values: Json) -> Json:
        command = [str(programs / "python"), "-c", _PROGRAM, str(CHART)]
        done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    return ask


def objects(said: Json) -> dict[tuple[str, str], Json]:
    """Return what was rendered, by kind and name."""
    texts = [text for name, text in said["files"].items() if name.endswith(".yaml")]
    found = [each for text in texts for each in yaml.safe_load_all(text)]
    return {(each["kind"], each["metadata"]["name"]): each for each in found if each}


def containers(each: Json) -> list[Json]:
    return each["spec"]["template"]["spec"]["containers"]


def environment(container: Json) -> dict[str, str]:
    return {each["name"]: each.get("value", "(secret)") for each in container["env"]}


@pytest.mark.parametrize("values", [CONTROL, EVERYTHING], ids=["least", "everything"])
def test_the_chart_is_sound_and_kubernetes_knows_every_field(helm: Callable[..., Json], values: Json) -> None:
    said = helm(values)
    assert not said["lint"]["errors"]
    assert not [each for each in said["lint"]["messages"] if each["severity"] > 1], said["lint"]["messages"]
    assert "refusal" not in said
    assert not said["faults"]
    kinds = sorted(kind for kind, _ in objects(said))
    assert kinds.count("Deployment") == 2
    assert kinds.count("DaemonSet") == 1


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({}, "telemetryUrl"),
        (CONTROL | {"kueue": {"mode": "on"}}, "mode"),
        (CONTROL | {"kueue": {"settings": {"ENGINE_KUEUE_INTERVAL_S": 2}}}, "string"),
        (CONTROL | {"agents": {}}, "agents"),
        (CONTROL | {"agent": {"state": {"hostPath": "state"}}}, "hostPath"),
    ],
)
def test_values_that_cannot_be_are_refused(helm: Callable[..., Json], values: Json, complaint: str) -> None:
    said = helm(values)
    assert complaint in said.get("refusal", "") + json.dumps(said["lint"])
    assert said["lint"]["errors"]


def test_pods_run_without_rights(helm: Callable[..., Json]) -> None:
    found = objects(helm(EVERYTHING))
    workloads = [each for (kind, _), each in found.items() if kind in ("Deployment", "DaemonSet")]
    pods = [each["spec"]["template"]["spec"] for each in workloads]
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"]
            assert not security["allowPrivilegeEscalation"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]
            assert {"livenessProbe", "readinessProbe"} <= set(container)
    (prepare,) = [each for pod in pods for each in pod.get("initContainers", ())]
    assert prepare["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    assert not found["ServiceAccount", "green-agent"]["automountServiceAccountToken"]


def test_the_bridge_may_do_what_it_does_and_no_more(helm: Callable[..., Json]) -> None:
    rules = objects(helm(CONTROL))["ClusterRole", "wattshift-green-kueue"]["rules"]
    may = {(resource, action) for rule in rules for resource in rule["resources"] for action in rule["verbs"]}
    assert {action for _, action in may} == {"get", "list", "watch", "patch"}
    assert {resource for resource, action in may if action == "patch"} == {
        "workloads",
        "workloads/status",
        "admissionchecks/status",
    }
    assert not [resource for resource, _ in may if "multikueue" in resource], "only with dispatch"
    lease = objects(helm(CONTROL))["Role", "green-kueue"]["rules"][1]
    assert (lease["resourceNames"], lease["verbs"]) == (["kueue"], ["get", "patch"])


def test_the_processes_read_the_settings_that_they_are_given(
    helm: Callable[..., Json], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = objects(helm(EVERYTHING))
    (bridge,), (agent,) = containers(found["Deployment", "green-kueue"]), containers(found["DaemonSet", "green-agent"])
    for name, value in (environment(bridge) | environment(agent)).items():
        monkeypatch.setenv(name, value.replace("$(NODE_NAME)", "gpu-1"))
    monkeypatch.setenv("WATTSHIFT_DATA_DIR", str(tmp_path))
    for name in ("WATTSHIFT_TLS_CA", "WATTSHIFT_TLS_CERT", "WATTSHIFT_TLS_KEY"):
        monkeypatch.delenv(name)  # files of the pod
    kueue = KueueSettings()
    assert (kueue.mode, kueue.own_zone, kueue.lease_namespace) == ("control", "DE", "wattshift")
    assert (kueue.dispatch, kueue.dispatch_wait_s, kueue.gpu_memory_gib) == (True, 300, 141)
    monkeypatch.setenv("GPU_AGENT_ADDRESS", "10.0.0.7")
    measuring = AgentSettings()
    assert (measuring.measure_only, measuring.engine_node, measuring.health) == (True, "slurm.gpu-1", "off")
    known = {f"ENGINE_KUEUE_{name}".upper() for name in KueueSettings.model_fields} | {"ENGINE_KUEUE_ZONE"}
    assert {name for name in environment(bridge) if name.startswith("ENGINE_")} <= known
    known = {f"GPU_AGENT_{name}".upper() for name in AgentSettings.model_fields} | {"GPU_AGENT_ZONE"}
    assert {name for name in environment(agent) if name.startswith("GPU_AGENT_")} <= known


def test_the_agent_finds_nvml_and_its_nodes(helm: Callable[..., Json]) -> None:
    pod = objects(helm(CONTROL))["DaemonSet", "green-agent"]["spec"]["template"]["spec"]
    assert pod["runtimeClassName"] == "nvidia"
    assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert environment(pod["containers"][0])["NVIDIA_DRIVER_CAPABILITIES"] == "utility"


def test_notes_say_what_is_left_to_do(helm: Callable[..., Json]) -> None:
    notes = next(text for name, text in helm(EVERYTHING)["files"].items() if name.endswith("NOTES.txt"))
    assert "wattshift nodes enroll kueue --engine" in notes
    assert "dispatcherName" in notes
