"""HTTPS: it serves and streams, and files that cannot be used are told before the start."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from engine.errors import ConfigError
from service.server.sockets import check_tls
from tests.service.process import serving


def make(folder: Path, name: str, *options: str) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that signs itself, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl")
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = f"{openssl} req -x509 -newkey rsa:2048 -subj /CN=x -days 2 -out {certificate}"
    subprocess.run(
        [*command.split(), "-keyout", key, "-addext", "subjectAltName=IP:127.0.0.1", *options],
        check=True,
        capture_output=True,
    )
    return certificate, key


def test_it_serves_https(tmp_path: Path) -> None:
    certificate, key = make(tmp_path, "one", "-nodes")
    options = {"tls_certificate": str(certificate), "tls_key": str(key)}
    with serving(**options) as process:
        process.said("ready: fake")
        assert process.url.startswith("https://")
        context = ssl.create_default_context(cafile=certificate)
        with httpx.Client(base_url=process.url, timeout=60, verify=context) as client:
            body = {"prompts": [[97]], "max_tokens": 500, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/generate", json=body) as response:
                lines = [line for line in response.iter_lines() if line]
            assert (len(lines), lines[-1]) == (501, "data: [DONE]")
        host, port = process.url.removeprefix("https://").split(":")
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://{host}:{port}/health")


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    certificate, key = make(tmp_path, "one", "-nodes")
    check_tls(None, None)
    check_tls(certificate, key)
    both = tmp_path / "both.pem"
    both.write_bytes(certificate.read_bytes() + key.read_bytes())
    check_tls(both, None)
    with pytest.raises(ConfigError, match="without --tls-certificate"):
        check_tls(None, key)
    with pytest.raises(ConfigError, match="No such file"):
        check_tls(certificate, tmp_path / "missing")
    _, other = make(tmp_path, "other", "-nodes")
    _, locked = make(tmp_path, "locked", "-passout", "pass:secret")
    for wrong in (other, locked, certificate, None):
        with pytest.raises(ConfigError, match="no certificate with its key"):
            check_tls(certificate, wrong)
