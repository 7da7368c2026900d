"""The chart: Helm's own engine lints and renders it, and Kubernetes' published schemas check what comes out."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import make_env
from gateway.settings import GatewaySettings
from gpu_agent.settings import AgentSettings
from services.admission.settings import AdmissionSettings
from services.engines.kueue.servers import ServersSettings
from services.engines.kueue.settings import KueueSettings
from tests.support.environments import programs_of
from tests.support.servers import ROOT

Json = dict[str, Any]
CHART = ROOT / "deploy" / "helm" / "wattshift"
ONE_NODE, HA = (yaml.safe_load((CHART / f"values-{name}.yaml").read_text()) for name in ("one-node", "ha"))
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


WHOLE = HA | {
    "control": HA["control"]
    | {
        "tlsSecret": "wattshift-tls",
        "image": {"digest": f"sha256:{'0' * 64}"},
        "database": HA["control"]["database"] | {"password": {"secretName": "pg-app", "key": "password"}},
        "services": {"router": {"type": "LoadBalancer", "annotations": {"a": "b"}}},
        "ingress": {"gateway": {"host": "green.example.org", "className": "nginx", "tlsSecret": "green-tls"}},
        "settings": {"WATTSHIFT_ZONE": "DE"},
        "settingsOf": {"gateway": {"FORWARDED_ALLOW_IPS": "10.0.0.0/8"}},
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
    },
    "imagePullSecrets": [{"name": "registry"}],
    "agent": {"enabled": True},
    "kueue": {"enabled": True},
    "picker": {
        **{"enabled": True, "requestsKey": "requests-key", "namespace": "models", "location": "eu", "zone": "DE"},
        "scale": [{"kind": "Deployment", "name": "llama"}, {"kind": "LeaderWorkerSet", "name": "llama-large"}],
    },
}
"""Two of everything over TLS, with the bridge and the agents beside them."""


@pytest.mark.parametrize("values", [ONE_NODE, HA, WHOLE], ids=["one node", "two of everything", "whole"])
def test_the_control_plane_is_sound_and_that_of_compose(helm: Callable[..., Json], values: Json) -> None:
    said = helm(values)
    assert not said["lint"]["errors"]
    assert "refusal" not in said
    assert not said["faults"]
    found = objects(said)
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    stores = {"postgres", "valkey"}
    assert {name for kind, name in found if kind == "StatefulSet"} == (
        {f"green-{name}" for name in stores} if values is ONE_NODE else set()
    )
    for name in compose.keys() - stores - {"migrations", "agent-1", "agent-2"}:
        (container,) = containers(found["Deployment", f"green-{name}"])
        theirs, ours = compose[name]["environment"], environment(container)
        assert container["command"] == compose[name]["command"], name
        asked = {each for each, value in theirs.items() if value and "OTEL" not in each and "TRACES" not in each}
        assert asked <= ours.keys() | {"WATTSHIFT_DATA_DIR"}, name  # which the image sets
        shown = {each["name"]: each for each in container["env"]}
        for each in ("WATTSHIFT_SERVICE_CREDENTIAL", "WATTSHIFT_SERVICE_TOKEN"):
            if each in asked:
                assert shown[each]["valueFrom"]["secretKeyRef"]["key"] in theirs[each], name
        for url in (each for each in theirs if each.endswith("_URL") and each.startswith("WATTSHIFT_")):
            address = theirs[url].removeprefix("http://")
            assert ours[url] == f"http{'s' if values is WHOLE else ''}://green-{address}", name
            assert found["Service", f"green-{address.partition(':')[0]}"]["spec"]["ports"][0]["port"] == int(
                address.partition(":")[2]
            )
    for (kind, name), each in found.items():
        if kind == "Service":
            labels = each["spec"]["selector"].items()
            served = [
                other
                for (of, _), other in found.items()
                if of in ("Deployment", "StatefulSet")
                and labels <= other["spec"]["template"]["metadata"]["labels"].items()
            ]
            assert len(served) == 1, name
            ports = {port["name"] for port in containers(served[0])[0]["ports"]}
            assert {port["targetPort"] for port in each["spec"]["ports"]} <= ports


def test_two_of_everything_are_on_two_nodes_and_are_not_taken_away_at_once(helm: Callable[..., Json]) -> None:
    found = objects(helm(WHOLE))
    twice = {name for (kind, name), each in found.items() if kind == "Deployment" and each["spec"]["replicas"] == 2}
    assert twice == {f"green-{name}" for name in HA["control"]["replicas"]}
    assert twice == {name for kind, name in found if kind == "PodDisruptionBudget"}
    for name in twice:
        assert found["Deployment", name]["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"]
        assert found["Deployment", name]["spec"]["strategy"]["type"] == "RollingUpdate"
    ingress = found["Ingress", "green-gateway"]["spec"]
    assert (ingress["ingressClassName"], ingress["rules"][0]["host"]) == ("nginx", "green.example.org")
    assert ingress["tls"] == [{"secretName": "green-tls", "hosts": ["green.example.org"]}]
    boards = found["ConfigMap", "green-dashboards"]
    assert boards["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert {name: json.loads(text) for name, text in boards["data"].items()} == {
        path.name: json.loads(path.read_text()) for path in (ROOT / "deploy" / "grafana").glob("*.json")
    }
    alerts = yaml.safe_load(found["ConfigMap", "green-alerts"]["data"]["alerts.yml"])
    assert alerts == yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())


def test_only_doors_for_others_are_open_to_other_pods(helm: Callable[..., Json]) -> None:
    found = objects(helm(ONE_NODE))
    of_all = {name for kind, name in found if kind in ("Deployment", "StatefulSet")}
    policies = {name: each["spec"] for (kind, name), each in found.items() if kind == "NetworkPolicy"}
    assert policies.keys() == of_all
    assert {name for name, each in policies.items() if any("from" not in rule for rule in each["ingress"])} == {
        f"green-{name}" for name in ("gateway", "router", "telemetry")
    }


def test_every_secret_that_is_asked_for_is_one_that_the_script_makes(helm: Callable[..., Json]) -> None:
    made = make_env.settings({})
    asked: set[str] = set()
    for (kind, _), each in objects(helm(ONE_NODE)).items():
        if kind in ("Deployment", "StatefulSet"):
            pod = each["spec"]["template"]["spec"]
            for container in (*pod["containers"], *pod.get("initContainers", ())):
                references = [each["valueFrom"]["secretKeyRef"] for each in container["env"] if "valueFrom" in each]
                assert {each["name"] for each in references} <= {"wattshift-control"}
                asked |= {each["key"] for each in references}
    assert asked <= made.keys()
    assert {"POSTGRES_PASSWORD", "VALKEY_PASSWORD", "GATEWAY_CREDENTIAL", "WATTSHIFT_SECRETS_KEY"} <= asked


def test_an_operators_database_and_other_settings_reach_the_processes(
    helm: Callable[..., Json], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = objects(helm(WHOLE))
    (gateway,), (admission,) = (containers(found["Deployment", f"green-{name}"]) for name in ("gateway", "admission"))
    assert gateway["image"] == f"wattshift@sha256:{'0' * 64}"
    password = {each["name"]: each for each in admission["env"]}["POSTGRES_PASSWORD"]
    assert password["valueFrom"]["secretKeyRef"] == {"name": "pg-app", "key": "password"}
    for container in (gateway, admission):
        for name, value in environment(container).items():
            if not name.startswith("WATTSHIFT_TLS"):  # files of the pod
                monkeypatch.setenv(name, value.replace("$(POSTGRES_PASSWORD)", "p").replace("$(VALKEY_PASSWORD)", "v"))
    for service, settings in (("gateway", GatewaySettings), ("admission", AdmissionSettings)):
        made = make_env.settings({})
        monkeypatch.setenv("WATTSHIFT_SERVICE_CREDENTIAL", made[f"{service.upper()}_CREDENTIAL"])
        monkeypatch.setenv("WATTSHIFT_SERVICE_TOKEN", made["WATTSHIFT_SERVICE_TOKEN"])
        monkeypatch.setenv("WATTSHIFT_SECRETS_KEY", made["WATTSHIFT_SECRETS_KEY"])
        read = settings()
        assert (read.zone, read.host, read.telemetry_url) == ("DE", "0.0.0.0", "https://green-telemetry:8060")
    assert environment(gateway)["FORWARDED_ALLOW_IPS"] == "10.0.0.0/8"
    assert "DATABASE_URL" not in environment(gateway)
    url = "postgresql://wattshift:$(POSTGRES_PASSWORD)@pg-rw.databases:5432/wattshift?target_session_attrs=read-write"
    assert environment(admission)["DATABASE_URL"] == url
    for _, each in objects(helm(WHOLE)).items():
        if each["kind"] == "DaemonSet":
            assert environment(containers(each)[0])["WATTSHIFT_TELEMETRY_URL"] == "https://green-telemetry:8060"


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({}, "telemetryUrl"),
        ({"control": {"enabled": True}}, "stores.enabled"),
        (HA | {"control": HA["control"] | {"replicas": {"serving": 2}}}, "serving"),
        (CONTROL | {"kueue": {"mode": "on"}}, "mode"),
        (CONTROL | {"kueue": {"settings": {"ENGINE_KUEUE_INTERVAL_S": 2}}}, "string"),
        (CONTROL | {"agents": {}}, "agents"),
        (CONTROL | {"picker": {"enabled": True}}, "control.enabled"),
        (CONTROL | {"agent": {"state": {"hostPath": "state"}}}, "hostPath"),
    ],
)
def test_values_that_cannot_be_are_refused(helm: Callable[..., Json], values: Json, complaint: str) -> None:
    said = helm(values)
    assert complaint in said.get("refusal", "") + json.dumps(said["lint"])
    assert "refusal" in said


@pytest.mark.parametrize("values", [EVERYTHING, ONE_NODE, WHOLE], ids=["guests", "one node", "whole"])
def test_pods_run_without_rights(helm: Callable[..., Json], values: Json) -> None:
    found = objects(helm(values))
    workloads = [each for (kind, _), each in found.items() if kind in ("Deployment", "DaemonSet", "StatefulSet")]
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
        for container in pod.get("initContainers", ()):
            is_root = container["name"] == "prepare"
            rights = {"drop": ["ALL"], "add": ["CHOWN"]} if is_root else {"drop": ["ALL"]}
            assert container["securityContext"]["capabilities"] == rights
        if pod.get("serviceAccountName") not in ("green-kueue", "green-picker"):
            assert not pod["automountServiceAccountToken"]


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


def test_the_picker_is_the_router_and_its_servers_are_registered_by_a_key(
    helm: Callable[..., Json], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = objects(helm(WHOLE))
    (router,), (servers,) = (containers(found["Deployment", f"green-{name}"]) for name in ("router", "picker"))
    assert router["image"].startswith("wattshift-kueue:")
    assert environment(router)["ROUTER_PICKER_PORT"] == "9002"
    ports = {each["name"]: each["port"] for each in found["Service", "green-router"]["spec"]["ports"]}
    assert ports == {"http": 8050, "picker": 9002}
    for name, value in environment(servers).items():
        if not name.startswith("WATTSHIFT_TLS"):  # files of the pod
            monkeypatch.setenv(name, value)
    read = ServersSettings()  # type: ignore[call-arg]
    assert (read.namespace, read.node_id, read.own_zone) == ("models", "eu", "DE")
    assert read.control_plane_url == "https://green-gateway:8000"
    mounted = {each["mountPath"]: each["name"] for each in servers["volumeMounts"]}
    assert mounted[str(read.key_file.parent)] == "key"
    role = found["Role", "green-picker"]
    assert role["metadata"]["namespace"] == "models"
    may = {(each, action) for rule in role["rules"] for each in rule["resources"] for action in rule["verbs"]}
    assert may == {
        *{("inferencepools", "list"), ("pods", "list"), ("pods", "patch"), ("horizontalpodautoscalers", "list")},
        *{(kind, action) for kind in ("deployments", "leaderworkersets") for action in ("get", "patch")},
        *{("deployments/scale", "get"), ("leaderworkersets/scale", "get")},
    }
    named = [rule for rule in role["rules"] if rule["apiGroups"] in (["apps"], ["leaderworkerset.x-k8s.io"])]
    assert [rule["resourceNames"] for rule in named] == [["llama"]] * 2 + [["llama-large"]] * 2
    assert [str(each) for each in read.scales] == ["Deployment/llama", "LeaderWorkerSet/llama-large"]
    only = objects(helm(WHOLE | {"picker": WHOLE["picker"] | {"scale": []}}))["Role", "green-picker"]["rules"]
    assert {action for rule in only for action in rule["verbs"]} == {"list"}, (
        "where nothing is scaled, nothing is changed"
    )
    assert ("Deployment", "green-picker") not in objects(helm(HA))
    (plain,) = containers(objects(helm(HA))["Deployment", "green-router"])
    assert plain["image"].startswith("wattshift:")


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
