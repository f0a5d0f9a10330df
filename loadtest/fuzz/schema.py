"""Cases that schemathesis generates from the server's OpenAPI schema, in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

CHECKS = ",".join(
    (
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
    )
)
# A request that asks for less time than it takes gets the 504 that the schema documents: no fault.
CONFIG = """[checks]
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 504]
"""


@dataclass(frozen=True)
class Tested:
    """The result of schemathesis."""

    cases: int
    passed: bool
    report: str


def check_schema(
    url: str, examples: int, seed: int, headers: dict[str, str] | None = None
) -> Tested:
    """Run at most `examples` cases for each operation and phase.

    Raises RuntimeError if schemathesis cannot run.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "schemathesis.toml"
        config.write_text(CONFIG)
        return _run(config, url, examples, seed, headers or {})


def _run(config: Path, url: str, examples: int, seed: int, headers: dict[str, str]) -> Tested:
    command = [
        sys.executable, "-m", "schemathesis.cli", "--config-file", str(config),
        "run", f"{url}/openapi.json",
        "--checks", CHECKS, "--phases", "examples,coverage,fuzzing", "--workers", "2",
        "--max-examples", str(examples), "--seed", str(seed), "--no-color",
        "--continue-on-failure", "--warnings", "off", "--request-timeout", "60",
        "--generation-database", "none",
    ]  # fmt: skip
    for name, value in headers.items():
        command += ["--header", f"{name}:{value}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = done.stdout + done.stderr
    counted = re.search(r"^  (\d+) generated", report, re.MULTILINE)
    if done.returncode not in (0, 1) or counted is None:
        raise RuntimeError(f"schemathesis did not run: {report[-2000:]}")
    return Tested(int(counted[1]), done.returncode == 0, report)
