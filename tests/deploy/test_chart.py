"""The Helm chart: what Kubernetes is given, and whether gateway and agent can begin with it.

Rendered by Helm's own library and judged by Kubernetes' schemas, both from the extra ``chart``; `make chart`
installs it. Without it these tests say so and are skipped.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import trustme
from typer.testing import CliRunner

from tests.deploy.rendering import MANIFESTS, NAMES, NAMESPACE, manifest, objects, render, values_of
from tests.docs.pages import column
from trio_gateway.cli import app
from trio_gateway.config import parse_settings

yaml = pytest.importorskip("yaml", reason="needs the extra chart: make chart")
helm_python = pytest.importorskip("helm_python", reason="needs the extra chart: make chart")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs the extra chart: make chart")

VERSIONS: Final = ("1.30", "1.33")
CUSTOM: Final = {"ServiceMonitor", "ScaledObject"}  # of others, without a schema here
TENANT: Final = '[[tenants]]\nid = "a"\nkeys = []\n'
BARE: Final[dict[str, Any]] = {"config": TENANT}


def found(values: Mapping[str, Any], kind: str, name: str = "llm") -> dict[str, Any]:
    (each,) = [
        each for each in objects(render(values)) if (each["kind"], each["metadata"]["name"]) == (kind, name)
    ]
    return each


def pod(values: Mapping[str, Any], name: str = "llm") -> dict[str, Any]:
    spec: dict[str, Any] = found(values, "Deployment", name)["spec"]["template"]["spec"]
    return spec


def with_(values: Mapping[str, Any], **changed: Any) -> dict[str, Any]:
    return {**copy.deepcopy(dict(values)), **changed}


@pytest.mark.parametrize("name", NAMES)
def test_everything_is_what_kubernetes_takes(name: str) -> None:
    rendered = objects(render(values_of(name)))
    assert rendered
    for each in rendered:
        assert each["metadata"]["namespace"] == NAMESPACE
        if each["kind"] not in CUSTOM:
            for version in VERSIONS:
                kubernetes_validate.validate(each, version, strict=True)
    named = [(each["kind"], each["metadata"]["name"]) for each in rendered]
    assert len(named) == len(set(named))


def test_helm_has_nothing_against_the_chart(tmp_path: Path) -> None:
    copied = tmp_path / "trio-gateway"
    shutil.copytree(Path(__file__).parents[2] / "deploy" / "helm" / "trio-gateway", copied)
    (copied / "values.yaml").write_text(
        (copied / "values.yaml").read_text().replace("allowAnonymous: false", "allowAnonymous: true")
    )
    assert [each for each in helm_python.lint(str(copied))["messages"] if each["severity"] > 1] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_manifests_of_the_documentation_are_those_of_the_chart(name: str) -> None:
    assert (MANIFESTS / f"{name}.yaml").read_text("utf-8") == manifest(name), "run: make manifests"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tls", [False, True])
def test_the_gateways_file_passes_check_config(name: str, tls: bool, tmp_path: Path) -> None:
    """With the files of the Secrets where the pod has them, and what its environment says."""
    values = values_of(name)
    if tls:
        values = with_(values, tls={"secretName": "public"})
    (tmp_path / "gateway.toml").write_text(found(values, "ConfigMap")["data"]["gateway.toml"])
    authority = trustme.CA()
    for mount in pod(values)["containers"][0]["volumeMounts"]:
        path = Path(mount["mountPath"])
        if "tls" in mount["name"]:
            folder = tmp_path / path.relative_to("/etc/trio-gateway")
            folder.mkdir()
            leaf = authority.issue_cert("llm-engines")
            leaf.private_key_pem.write_to_path(str(folder / "tls.key"))
            leaf.cert_chain_pems[0].write_to_path(str(folder / "tls.crt"))
            authority.cert_pem.write_to_path(str(folder / "ca.crt"))
        elif mount["name"] == "agent":
            (tmp_path / "agent").mkdir()
            (tmp_path / "agent" / "secret").write_text("s" * 32)
    urls = {
        "TRIO_GATEWAY__DATABASE__URL": "postgresql+psycopg://u:p@h/d",
        "TRIO_GATEWAY__CLUSTER__URL": "redis://:p@h:6379/0",
    }
    environ = {
        each["name"]: each.get("value") or urls[each["name"]]
        for each in pod(values)["containers"][0].get("env", ())
    }
    result = CliRunner().invoke(app, ["check-config", str(tmp_path / "gateway.toml")], env=environ)
    assert result.exit_code == 0, result.output
    assert "no problems" in result.output
    assert "will refuse" not in result.output


@pytest.mark.parametrize("capacity", ["shared", "split"])
def test_a_pod_has_as_many_processes_as_wanted(capacity: str, tmp_path: Path) -> None:
    text = found(with_(BARE, processes=4, capacity=capacity), "ConfigMap")["data"]["gateway.toml"]
    settings = parse_settings(text, folder=tmp_path)
    assert (settings.server.processes, settings.server.capacity) == (4, capacity)
    assert "processes" not in found(BARE, "ConfigMap")["data"]["gateway.toml"]


def test_what_opens_doors_stands_in_secrets_alone() -> None:
    values = values_of("vllm")
    for each in objects(render(values)):
        if each["kind"] == "ConfigMap":
            text = each["data"]["gateway.toml"]
            assert "redis://" not in text
            assert "postgresql" not in text
    environ = pod(values)["containers"][0]["env"]
    for name in ("TRIO_GATEWAY__DATABASE__URL", "TRIO_GATEWAY__CLUSTER__URL"):
        (entry,) = [each for each in environ if each["name"] == name]
        assert "secretKeyRef" in entry["valueFrom"]


@pytest.mark.parametrize(
    ("pre_stop", "delay", "grace", "hard"), [(3, 5, 60, 90), (0, 0, 1, 2), (10, 20, 300, 400)]
)
def test_the_pod_lives_as_long_as_its_shutdown_takes(
    pre_stop: int, delay: int, grace: int, hard: int
) -> None:
    shutdown = {"preStop": pre_stop, "readinessDelay": delay, "grace": grace, "hardLimit": hard}
    values = with_(BARE, shutdown=shutdown)
    spec = pod(values)
    assert spec["terminationGracePeriodSeconds"] >= pre_stop + hard + 5
    assert f"time.sleep({pre_stop})" in spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][2]
    text = found(values, "ConfigMap")["data"]["gateway.toml"]
    assert f"readiness_delay = {delay}\ngrace = {grace}\nhard_limit = {hard}\n" in text


def test_probes_ask_whether_it_lives_and_whether_it_is_ready() -> None:
    for scheme, values in (("HTTP", BARE), ("HTTPS", with_(BARE, tls={"secretName": "public"}))):
        (gateway,) = pod(values)["containers"]
        asked = {name: gateway[f"{name}Probe"]["httpGet"] for name in ("liveness", "readiness", "startup")}
        assert {name: each["path"] for name, each in asked.items()} == {
            "liveness": "/livez",
            "readiness": "/readyz",
            "startup": "/livez",
        }
        assert {each["scheme"] for each in asked.values()} == {scheme}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_ours_is_root_or_writes_to_its_own_root(name: str) -> None:
    values = values_of(name)
    for each in objects(render(values)):
        if each["kind"] != "Deployment":
            continue
        spec = each["spec"]["template"]["spec"]
        for container in spec["containers"]:
            security = {**spec["securityContext"], **container["securityContext"]}
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["seccompProfile"] == {"type": "RuntimeDefault"}
            if container["name"] in ("gateway", "agent"):
                assert security["runAsNonRoot"] is True
                assert security["readOnlyRootFilesystem"] is True


def test_the_gateway_may_list_and_watch_pods_and_nothing_else() -> None:
    values = with_(BARE, discovery={"enabled": True, "namespace": "models"})
    role = found(values, "Role", "llm-discovery")
    assert role["metadata"]["namespace"] == "models"
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    without = objects(render(with_(BARE, discovery={"enabled": False})))
    assert not [each for each in without if each["kind"] in ("Role", "RoleBinding")]
    assert pod(with_(BARE, discovery={"enabled": False}))["automountServiceAccountToken"] is False


def test_the_agent_is_started_with_options_that_it_has() -> None:
    engine, agent = pod(values_of("vllm"), "llm-llama")["containers"]
    result = CliRunner().invoke(app, ["worker", "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    for argument in agent["args"][1:]:
        assert argument.partition("=")[0] in result.output, argument
    assert "9200" in engine["lifecycle"]["preStop"]["exec"]["command"][2]
    compile(engine["lifecycle"]["preStop"]["exec"]["command"][2], "preStop", "exec")


def test_an_engine_may_take_all_its_time_to_load_before_its_rollout_counts_as_failed() -> None:
    values = values_of("vllm")
    values["engines"][0] |= {"startupProbes": 1000, "runtimeClassName": "nvidia"}
    deployment = found(values, "Deployment", "llm-llama")["spec"]
    spec = deployment["template"]["spec"]
    probe = spec["containers"][0]["startupProbe"]
    loading = probe["periodSeconds"] * probe["failureThreshold"]
    assert deployment["progressDeadlineSeconds"] > loading + spec["terminationGracePeriodSeconds"]
    assert spec["runtimeClassName"] == "nvidia"


def test_the_selector_in_the_file_finds_the_engines_pods() -> None:
    values = values_of("vllm")
    text = found(values, "ConfigMap")["data"]["gateway.toml"]
    labels = found(values, "Deployment", "llm-llama")["spec"]["template"]["metadata"]["labels"]
    (selector,) = [line for line in text.splitlines() if line.startswith("pods = ")]
    wanted = dict(pair.split("=") for pair in selector.removeprefix('pods = "').rstrip('"').split(","))
    assert wanted.items() <= labels.items()
    gateway = found(values, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert not wanted.items() <= gateway.items()


def test_engines_are_scaled_by_metrics_that_the_gateway_has() -> None:
    scaled = found(values_of("vllm"), "ScaledObject", "llm-llama")
    metrics = {name.strip("`") for name in column("reference/metrics.md", "Metrics", "Metric")}
    queries = [each["metadata"]["query"] for each in scaled["spec"]["triggers"]]
    assert "trio_gateway_admission_wait_seconds_bucket{" in queries[0]
    assert "trio_gateway_queue_depth{" in queries[1]
    assert {"trio_gateway_admission_wait_seconds", "trio_gateway_queue_depth"} <= metrics
    assert "replicas" not in found(values_of("vllm"), "Deployment", "llm-llama")["spec"]


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({}, "nobody could be served"),
        (with_(BARE, serviceMonitor={"enabled": True}), "serviceMonitor needs admin.tokens"),
        (with_(values_of("vllm"), agent={}), "engines need agent.secretName"),
        (with_(values_of("vllm"), prometheus={"url": ""}), "autoscaling of engines needs prometheus.url"),
        (with_(BARE, replica=3), "replica"),
        (with_(BARE, processes="auto"), "processes"),
        (with_(BARE, capacity="lent"), "capacity"),
        (with_(BARE, replicas="3"), "replicas"),
        (with_(BARE, admin={"tokens": [{"id": "a", "hash": "plain", "role": "viewer"}]}), "hash"),
        (with_(BARE, engines=[{"name": "a"}]), "engines"),
    ],
)
def test_values_that_would_not_work_are_refused_with_the_reason(values: dict[str, Any], why: str) -> None:
    with pytest.raises(helm_python.HelmError, match=why):
        render(values)


def test_every_default_is_one_that_the_schema_knows() -> None:
    chart = Path(__file__).parents[2] / "deploy" / "helm" / "trio-gateway"
    defaults = yaml.safe_load((chart / "values.yaml").read_text())
    render(with_(defaults, allowAnonymous=True))
