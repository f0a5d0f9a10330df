"""A Prometheus with the project's configuration that watches one server."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from loadtest.served import free_port
from loadtest.with_httpx import httpx

FOLDER = Path(__file__).resolve().parents[2] / "docker" / "prometheus"
TARGET = "minserve:8000"  # whom prometheus.yml watches
START_SECONDS = 30.0


class Prometheus:
    """A Prometheus from `__enter__` to `__exit__`, whose data are deleted at the end."""

    def __init__(self, target: str, program: str = "prometheus") -> None:
        """Take a target HOST:PORT. Raises RuntimeError for a wrong target or no program."""
        found = shutil.which(program)
        if found is None:
            raise RuntimeError(f"{program} is not installed (Debian: apt-get install prometheus)")
        self._folder = tempfile.TemporaryDirectory(prefix="minserve-prometheus-")
        folder = Path(self._folder.name)
        for rules in FOLDER.glob("*.yml"):
            shutil.copy(rules, folder)
        config = folder / "prometheus.yml"
        text = config.read_text(encoding="utf-8")
        if text.count(TARGET) != 1:
            raise RuntimeError(f"{FOLDER / 'prometheus.yml'} does not name {TARGET} once")
        config.write_text(text.replace(TARGET, target), encoding="utf-8")
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._command = [
            found,
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        ]

    def __enter__(self) -> Prometheus:
        self._process = subprocess.Popen(self._command)
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._folder.cleanup()

    def _wait(self) -> None:
        begun = time.monotonic()
        while time.monotonic() - begun < START_SECONDS and self._process.poll() is None:
            try:
                if httpx.get(f"{self._url}/-/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise RuntimeError("Prometheus did not become ready")

    def _ask(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self._url}/api/v1/{path}", params=parameters, timeout=30).json()
        if answer["status"] != "success":
            raise RuntimeError(answer.get("error", "Prometheus gave no reason"))
        return answer["data"]

    def values(self, query: str) -> list[float]:
        """Return the values of an instant query. Raises RuntimeError for a wrong query."""
        data = self._ask("query", query=query)
        samples = [data] if data["resultType"] == "scalar" else data["result"]
        return [float(sample["value"][1]) for sample in samples]

    def rules(self) -> list[dict[str, Any]]:
        """Return every rule: name, type, query, health, lastError, state."""
        groups: list[dict[str, Any]] = self._ask("rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]
