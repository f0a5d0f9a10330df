"""What `minserve cluster` and `serve run service.ray_app:app` refuse, without a Ray."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from engine.errors import ConfigError
from service import ray_app
from service.cluster import deployment
from service.cluster.deployment import Scale
from service.settings import Settings
from service.terminal import cluster
from tests.cli.conftest import ROOT, environment


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"replicas": 0}, "replicas is 0; allowed: 1 to"),
        ({"replicas": 5000}, "allowed: 1 to 4096"),
        ({"replicas": 3, "most": 2}, r"max_replicas is 2; allowed: 3 \(replicas\) to"),
        ({"cpus": -1.0}, "cpus is -1; allowed: 0 to"),
        ({"gpus": float("nan")}, "gpus is nan; allowed: 0 to"),
    ],
)
def test_wrong_scales(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Scale(**fields)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"replicas": "two"}, "replicas is 'two'; allowed: a number"),
        ({"max_replicas": None}, "max_replicas is None; allowed: a number"),
        ({"nonsense": "1"}, "unknown argument 'nonsense'; allowed: replicas, max_replicas"),
        ({"max_waiting": "many"}, "MINSERVE_MAX_WAITING is 'many'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ray_app.app(arguments)


@pytest.mark.parametrize("name", ["uds", "tls_certificate", "api_workers", "engine_restarts"])
def test_what_is_rays_may_not_be_set(name: str) -> None:
    value = 2 if name in ("api_workers", "engine_restarts") else "/tmp/x"
    settings = Settings(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} .* because Ray Serve has"):
        deployment._check(settings)


def test_without_ray_there_is_one_line() -> None:
    code = "import sys; sys.modules['ray'] = None; from service import cli; sys.exit(cli.main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "cluster"],
        capture_output=True, text=True, cwd=ROOT, env=environment(),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (
        2,
        "minserve: error: Ray is not installed; pip install 'minserve[ray]'\n",
    )


def test_the_server_imports_no_ray() -> None:
    code = (
        "import sys; sys.modules['ray'] = None; import service.cli, service.server.api_server, "
        "service.terminal.serve, service.terminal.cluster, service.ray_app"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment()
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_proxies_go_by_the_header_that_names_sessions() -> None:
    variables = deployment.proxy_variables("x-conversation")
    assert variables["RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"].startswith("hdr(x-conversation)\n")
    assert variables["RAY_SERVE_SESSION_ID_HEADER_KEY"] == "x-conversation"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"address": "auto"}, "0.0.0.0"),
        ({"address": "auto", "host": "10.0.0.1"}, "10.0.0.1"),
        ({}, "127.0.0.1"),
    ],
)
def test_proxies_of_several_machines_reach_every_replica(
    options: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Settings] = []
    monkeypatch.setattr(deployment, "make_application", lambda settings, scale: None)
    monkeypatch.setattr(cluster, "_run", lambda _, settings, address: seen.append(settings))
    monkeypatch.setattr("service.settings.export", lambda variables: None)
    monkeypatch.delenv("MINSERVE_HOST", raising=False)
    cluster.cluster(**options)
    assert [one.host for one in seen] == [told]
