"""The KubeRay manifest says what the package takes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from service import ray_app
from service.cluster.deployment import proxy_variables
from service.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
MANIFEST: dict[str, Any] = yaml.safe_load((ROOT / "docker/k8s/ray/rayservice.yaml").read_text())


def test_the_application_is_imported_with_arguments_that_it_takes() -> None:
    serve = yaml.safe_load(MANIFEST["spec"]["serveConfigV2"])
    (application,) = serve["applications"]
    module, name = application["import_path"].split(":")
    assert module == ray_app.__name__ and hasattr(ray_app, name)
    given = set(application["args"])
    assert given <= {*ray_app.OF_SCALE, *Settings.model_fields}


def test_ray_is_the_version_that_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = project["optional-dependencies"]["ray"]
    least = re.search(r">=([\d.]+)", wanted)
    assert least is not None
    assert MANIFEST["spec"]["rayClusterConfig"]["rayVersion"].startswith(least[1])


def test_all_pods_have_the_proxys_variables() -> None:
    cluster = MANIFEST["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        values = {one["name"]: one.get("value") for one in container["env"]}
        for name in ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"):
            assert values[name] == proxy_variables()[name]
        assert values.keys() >= {"MINSERVE_STATE_STORE", "MINSERVE_API_KEYS"}
