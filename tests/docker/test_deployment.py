"""What containers are made and run by: Dockerfile, compose.yaml, the manifests for Kubernetes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from service.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
MANIFESTS = sorted(set((DOCKER / "k8s").glob("*.yaml")) - {DOCKER / "k8s/kustomization.yaml"})
SETTING = re.compile(r"MINSERVE_[A-Z_]+")
# Variables of `docker compose`, the build and the kernels, which are no settings of the server.
OTHERS = {"MINSERVE_PUBLISH", "MINSERVE_CPUS", "MINSERVE_MEMORY", "MINSERVE_CUDA",
          "MINSERVE_CUDA_ARCHS", "MINSERVE_CPU_ISA"}  # fmt: skip


def manifest(kind: str) -> Any:
    """The only one of a kind."""
    read = (yaml.safe_load(path.read_text(encoding="utf-8")) for path in MANIFESTS)
    (found,) = (one for one in read if one["kind"] == kind)
    return found


def default(name: str) -> Any:
    return Settings.model_fields[name].default


def dockerfile() -> str:
    return (DOCKER / "Dockerfile").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def compose() -> Any:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def pod() -> Any:
    return manifest("Deployment")["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def container(pod: Any) -> Any:
    (found,) = pod["containers"]
    return found


def test_every_variable_is_a_setting() -> None:
    known = {f"MINSERVE_{name.upper()}" for name in Settings.model_fields} | OTHERS
    for path in (DOCKER / "Dockerfile", DOCKER / "compose.yaml", DOCKER / "healthcheck.py",
                 DOCKER / "README.md", *MANIFESTS):  # fmt: skip
        named = set(SETTING.findall(path.read_text(encoding="utf-8")))
        assert named <= known, path


def test_the_build_context_holds_what_is_copied() -> None:
    kept = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    }
    copied = set()
    for line in dockerfile().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            copied.update(line.split()[1:-1])
    assert copied == kept
    for path in kept:
        assert (ROOT / path).exists(), path


def test_the_image_is_closed() -> None:
    runtime = dockerfile().split("AS runtime")[1].split("\n# ---")[0]
    assert re.search(r"^USER 10001:10001$", runtime, re.MULTILINE)
    assert "STOPSIGNAL SIGTERM" in runtime and "HEALTHCHECK" in runtime
    assert "apt-get" not in runtime and "pip" not in runtime
    for target in ("cpu", "cuda"):
        assert f"\nFROM runtime AS {target}\nCOPY --from=installed-{target} " in dockerfile()


def test_hadolint_agrees() -> None:
    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run(
        [hadolint, "--config", ".hadolint.yaml", "docker/Dockerfile"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_compose_keeps_to_its_schema() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec",
         "docker/compose.yaml"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_services_are_closed_and_limited(compose: Any) -> None:
    assert set(compose["services"]) == {"minserve-cpu", "minserve-gpu", "prometheus", "grafana"}
    for name, service in compose["services"].items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory"}, name
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        assert set(service.get("secrets", ())) <= set(compose["secrets"])
        if "build" not in service:
            assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), "a version, not a moving tag"
            assert "healthcheck" in service, name
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DOCKER / source).is_dir(), volume
                assert volume.endswith(":ro")
            else:
                assert source in compose["volumes"]


def test_compose_gives_the_service_what_it_needs(compose: Any) -> None:
    stages = set(re.findall(r"^FROM .* AS (\S+)$", dockerfile(), re.MULTILINE))
    for profile, target in (("cpu", "cpu"), ("gpu", "cuda")):
        service = compose["services"][f"minserve-{profile}"]
        assert service["profiles"] == [profile]
        assert service["build"]["target"] == target in stages
        assert "minserve" in service["networks"]["watched"]["aliases"], "prometheus.yml names it"
        assert int(service["stop_grace_period"].removesuffix("s")) > default("drain_timeout")
        for name in ("api_keys", "admin_key"):
            path = service["environment"][f"MINSERVE_{name.upper()}_FILE"]
            assert path == f"/run/secrets/{name}" and name in service["secrets"]
    devices = compose["services"]["minserve-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]
    secrets = {secret["file"] for secret in compose["secrets"].values()}
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {Path(secret).parent for secret in secrets} == {Path("secrets")}
    assert "/docker/secrets/" in ignored


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_are_valid(path: Path) -> None:
    kubernetes_validate.validate(
        yaml.safe_load(path.read_text(encoding="utf-8")),
        ".".join(kubernetes_validate.latest_version().split(".")[:2]),
        strict=True,
    )


def test_the_base_lists_every_manifest() -> None:
    base = yaml.safe_load((DOCKER / "k8s/kustomization.yaml").read_text(encoding="utf-8"))
    assert sorted(base["resources"]) == [path.name for path in MANIFESTS]
    (image,) = base["images"]
    assert image["name"] == "minserve"


def test_manifests_mean_each_other(pod: Any) -> None:
    labels = manifest("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert manifest("Deployment")["spec"]["selector"]["matchLabels"] == labels
    assert manifest("Service")["spec"]["selector"] == labels
    assert manifest("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert manifest("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels
    scaler = manifest("HorizontalPodAutoscaler")["spec"]
    assert scaler["scaleTargetRef"]["name"] == manifest("Deployment")["metadata"]["name"]
    assert scaler["minReplicas"] > manifest("PodDisruptionBudget")["spec"]["minAvailable"]
    assert "replicas" not in manifest("Deployment")["spec"], "it would fight the autoscaler"
    (metric,) = scaler["metrics"]
    page = (DOCKER / "README.md").read_text(encoding="utf-8")
    assert f"seriesQuery: '{metric['pods']['metric']['name']}{{" in page


def test_a_pod_is_restricted(pod: Any, container: Any) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/, "Restricted"."""
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    context = container["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["readOnlyRootFilesystem"] is True
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False, "MINSERVE_PORT would be tcp://..."
    enforced = manifest("Namespace")["metadata"]["labels"]
    assert enforced["pod-security.kubernetes.io/enforce"] == "restricted"


def test_probes_and_times_fit_the_server(pod: Any, container: Any) -> None:
    settings = {one["name"]: one["value"] for one in container["env"]}
    drain = float(settings["MINSERVE_DRAIN_TIMEOUT"])
    sleep, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    assert pod["terminationGracePeriodSeconds"] > int(seconds) + drain
    start, ready, live = (
        container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")
    )
    assert start["httpGet"]["path"] == ready["httpGet"]["path"] == "/ready"
    assert live["httpGet"]["path"] == "/health"
    assert start["failureThreshold"] * start["periodSeconds"] > default("load_timeout")
    # The server's own supervisor comes first, and has time to load again.
    assert live["failureThreshold"] * live["periodSeconds"] > default("hang_timeout")
    assert live["timeoutSeconds"] > default("ping_timeout")


def test_volumes_are_mounted(pod: Any, container: Any) -> None:
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) == set(volumes)
    assert {"/tmp", "/models", "/states"} <= set(mounts)
    settings = {one["name"]: one["value"] for one in container["env"]}
    size = volumes[mounts["/states"]]["emptyDir"]["sizeLimit"]
    assert int(settings["MINSERVE_DISK_STATE_BYTES"]) < int(size.removesuffix("Gi")) * 2**30
    for name in ("API_KEYS", "ADMIN_KEY"):
        assert Path(settings[f"MINSERVE_{name}_FILE"]).parent.as_posix() in mounts


# What runs these recipes is test_routers.py.


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def test_the_router_recipes_fit_the_server() -> None:
    config = yaml.safe_load((DOCKER / "routers/envoy.yaml").read_text(encoding="utf-8"))
    (cluster,) = config["static_resources"]["clusters"]
    (options,) = cluster["typed_extension_protocol_options"].values()
    idle = seconds(options["common_http_protocol_options"]["idle_timeout"])
    assert 0 < idle < default("keep_alive_timeout")
    (check,) = cluster["health_checks"]
    assert check["http_health_check"]["path"] == "/ready"
    (listener,) = config["static_resources"]["listeners"]
    (connection,) = listener["filter_chains"][0]["filters"]
    (host,) = connection["typed_config"]["route_config"]["virtual_hosts"]
    *closed, text, rest = host["routes"]
    paths = {path for route in closed for path in route["match"].values()}
    assert paths == {"/metrics", "/load", "/admin"}
    assert all(route["direct_response"] == {"status": 404} for route in closed)
    assert "retry_policy" not in text["route"], "a text is not kept"
    assert seconds(rest["route"]["timeout"]) >= default("max_request_timeout")
    assert seconds(connection["typed_config"]["stream_idle_timeout"]) >= default(
        "max_request_timeout"
    )
    endpoints = yaml.safe_load((DOCKER / "routers/endpoints.yaml").read_text(encoding="utf-8"))
    assert endpoints["resources"][0]["cluster_name"] == cluster["name"]
    for name in ("vllm-router", "smg"):
        script = (DOCKER / f"routers/{name}.sh").read_text(encoding="utf-8")
        assert "--health-check-endpoint /ready" in script
        (given,) = re.findall(r"--request-timeout-secs (\d+)", script)
        assert float(given) >= default("max_request_timeout")
        assert "--host 127.0.0.1" in script, "open to others only where one says so"


def test_the_inference_extension_fits_the_base() -> None:
    folder = DOCKER / "k8s/inference"
    read = {
        path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
        for path in folder.glob("*.yaml")
    }
    kubernetes_validate.validate(
        read["networkpolicy"],
        ".".join(kubernetes_validate.latest_version().split(".")[:2]),
        strict=True,
    )
    overlay = read["kustomization"]
    resources = {f"{name}.yaml" for name in set(read) - {"kustomization", "values"}}
    assert set(overlay["resources"]) == {"../", *resources}
    labels = manifest("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert read["networkpolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    router = read["values"]["router"]
    assert router["modelServers"]["matchLabels"] == labels
    (port,) = router["modelServers"]["targetPorts"]
    (container,) = manifest("Deployment")["spec"]["template"]["spec"]["containers"]
    assert port["number"] == container["ports"][0]["containerPort"]
    picker = yaml.safe_load(
        router["epp"]["pluginsCustomConfig"][router["epp"]["pluginsConfigFile"]]
    )
    plugins = {one["type"]: one.get("parameters", {}) for one in picker["plugins"]}
    (profile,) = picker["schedulingProfiles"]
    used = [*profile["plugins"], *picker["requestHandler"]["parsers"]]
    assert {one["pluginRef"] for one in used} <= set(plugins)
    weights = {one["pluginRef"]: one["weight"] for one in profile["plugins"]}
    affinity = weights.pop("session-affinity-scorer")
    assert affinity > sum(weights.values()), "a session stays also where its pod is busier"
    (engine,) = plugins["core-metrics-extractor"]["engineConfigs"]
    (patch,) = overlay["patches"]
    template = yaml.safe_load(patch["patch"])["spec"]["template"]
    assert template["metadata"]["labels"] == {"llm-d.ai/engine-type": engine["name"]}
    page = (DOCKER / "README.md").read_text(encoding="utf-8")
    for name in ("queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec"):
        assert f"| `{engine[name]}` |" in page, "the page says what it is"
    (rule,) = read["httproute"]["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert (backend["group"], backend["kind"]) == (
        "inference.networking.k8s.io",
        "InferencePool",
    )
    assert seconds(rule["timeouts"]["request"]) >= default("max_request_timeout")
    paths = {match["path"]["value"] for match in rule["matches"]}
    assert not paths & {"/", "/metrics", "/admin"}
