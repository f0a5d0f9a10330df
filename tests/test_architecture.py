"""The architecture's promises that a type checker cannot see: who may import what."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.cache.tiered_store import CachedState

ROOT = Path(__file__).resolve().parents[1]
TORCH_FREE = [
    "service.app.app",
    "service.settings",
    "engine.client.client",
    "engine.gc_tuning",
    "engine.protocol.events",
    "engine.protocol.requests",
    "engine.config",
    "engine.errors",
    "engine.model_files",
    "engine.models.minrnn.config",
    "engine.safetensors_container",
    "engine.scheduler.scheduler",
    "engine.step_plan",
]
# What the service (its composition root, cli.py, apart) may see of the engine: modules, and what
# packages hold. Which packages it may not reach by others either, import-linter knows.
SERVICE_MAY_IMPORT = (
    "engine.client",
    "engine.protocol",
    "engine.supervisor",
    "engine.structured_output.sandbox",
    "engine.subprocesses",
    "engine.config",
    "engine.errors",
    "engine.gc_tuning",
    "engine.inline",
    "engine.model_files",
    "engine.models.minrnn.config",
    "engine.safetensors_container",
    "engine.tokenizer_files",
    "engine.tokenizer_layout",
)


def _imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
            if node.module in ("engine", "service"):
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _sources(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"no sources under {package}"
    return files


def test_importing_them_does_not_import_torch() -> None:
    """Nor does the fake engine, of which the tests start many processes."""
    modules = [*TORCH_FREE, "tests.engine.fake"]
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(name)"
    )
    command = [sys.executable, "-c", code, *modules]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_host_of_several_processes_imports_no_http() -> None:
    """It passes no request on, and stays small."""
    code = (
        "import sys, service.server.server, service.server.api_processes; "
        "print({'uvicorn', 'fastapi', 'starlette', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "set()"


def test_service_reaches_the_engine_only_through_its_client() -> None:
    for path in _sources("service"):
        # commands that need no server
        if path.name in ("cli.py", "train.py", "corpus.py", "launch.py", "score.py", "inspect.py"):
            continue
        seen = {name for name in _imports(path) if name.split(".")[0] == "engine"} - {"engine"}
        others = {
            name
            for name in seen
            if not any(f"{name}.".startswith(f"{one}.") for one in SERVICE_MAY_IMPORT)
        }
        assert not others, f"{path.relative_to(ROOT)} imports {others}"


def test_the_scheduler_knows_the_cache_by_two_names() -> None:
    allowed = {"engine.cache.state_manager.StateCacheManager", "engine.cache.prefix_cache.CacheHit"}
    for path in _sources("engine/scheduler"):
        seen: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                seen.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                seen.update(f"{node.module}.{alias.name}" for alias in node.names)
        others = {name for name in seen if f"{name}.".startswith("engine.cache.")} - allowed
        assert not others, f"{path.relative_to(ROOT)} imports {others}"


def test_only_the_tiered_store_writes_a_cached_state() -> None:
    fields, others = set(CachedState.__struct_fields__), {"pending.digest", "sequence.position"}
    for path in _sources("engine/cache"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)):
                continue
            written = ast.unparse(node)
            if node.attr in fields and ast.unparse(node.value) != "self" and written not in others:
                assert path.name == "tiered_store.py", f"{path.relative_to(ROOT)} writes {written}"


def test_engine_knows_no_http_and_no_text() -> None:
    forbidden = {"fastapi", "starlette", "pydantic", "uvicorn", "service", "prometheus_client"}
    for path in _sources("engine"):
        roots = {name.split(".")[0] for name in _imports(path)}
        assert not roots & forbidden, f"{path.relative_to(ROOT)} imports {roots & forbidden}"


def test_only_settings_reads_the_environment() -> None:
    for path in _sources("service"):
        if path.name in ("settings.py", "cli.py"):
            continue
        text = path.read_text(encoding="utf-8")
        assert "os.environ" not in text and "getenv" not in text, path.relative_to(ROOT)


def test_every_file_states_its_idea() -> None:
    for package in ("service", "engine", "loadtest"):
        for path in _sources(package):
            text = path.read_text(encoding="utf-8")
            assert ast.get_docstring(ast.parse(text)), f"{path.relative_to(ROOT)} has no docstring"


# Beginnings that refer to something that the reader has not seen, or leave a sentence unfinished.
RIDDLES = (
    "Also ", "As ", "At ", "For ", "It ", "Its ", "Likewise", "None ", "Nothing ", "Of ",
    "Raises ", "Same ", "So ", "That ", "The same", "These ", "Those ", "Until ", "Up to ",
    "What of", "Where ", "Which ", "Who ", "Whose ", "With ", "Within ", "Without ",
)  # fmt: skip


@pytest.mark.parametrize("package", ["engine", "loadtest", "service"])
def test_docstrings_begin_with_a_line_that_stands_alone(package: str) -> None:
    wrong = []
    for path in _sources(package):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(
                node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            ):
                continue
            first, *rest = (ast.get_docstring(node) or ".").split("\n")
            whole = first.endswith((".", ":")) and not (rest and rest[0])
            if not whole or first.startswith(RIDDLES):
                name = getattr(node, "name", "the file")
                wrong.append(f"{path.relative_to(ROOT)}: {name}: {first}")
    assert not wrong, "\n".join(wrong)


def test_top_level_holds_only_what_the_design_names() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    top = {line.split("/")[0] for line in listed.stdout.splitlines()}
    allowed = {
        "pyproject.toml", "README.md", "CHANGELOG.md", "CMakeLists.txt", "LICENSE",
        "service", "engine", "csrc", "docker", "tests", "loadtest",
    }  # fmt: skip
    assert {name for name in top if not name.startswith(".")} <= allowed


# The folders of csrc in order: each includes what is named with it, all of which stands above it.
CSRC_MAY_INCLUDE: dict[str, set[str]] = {
    "arch": set(),
    "core": {"arch"},
    "cells": {"core"},
    "scan": {"arch", "core", "cells"},
    "conv1d": {"core", "cells"},
    "selective": {"arch", "core", "cells"},
    "ssd": {"arch", "core", "cells", "selective"},
    "sru": {"arch", "core", "cells"},
    "sampling": {"arch", "core"},
    "pinned_copy": {"arch", "core"},
    "cpu_product": {"core"},
    "gated_rnn": {"arch", "core", "cells", "cpu_product"},
    "cpu_model": {"core", "cells", "cpu_product", "gated_rnn", "selective", "ssd"},
    "gemm": {"arch", "core", "cells"},
    "cublaslt": {"core"},
    "fused_norm": {"core", "cells"},
    "persistent_decode": {"arch", "core", "cells", "gemm"},
    "cluster_decode": {"arch", "core", "cells"},
}


def test_folders_of_kernels_include_what_stands_above_them() -> None:
    csrc = ROOT / "csrc"
    order = list(CSRC_MAY_INCLUDE)
    for folder, allowed in CSRC_MAY_INCLUDE.items():
        assert allowed <= set(order[: order.index(folder)]), f"{folder}: a circle"
    seen = set()
    for path in csrc.rglob("*.*"):
        folder = path.relative_to(csrc).parts[0]
        if path.suffix not in (".h", ".cuh", ".cpp", ".cu") or path.parent == csrc:
            continue
        seen.add(folder)
        for name in re.findall(r'^#include "([^"]+)"', path.read_text(encoding="utf-8"), re.M):
            if name.startswith("emulator/"):  # tests/csrc
                continue
            target = (path.parent / name).resolve()
            assert target.is_file(), f"{path.relative_to(ROOT)} includes {name}"
            other = target.relative_to(csrc).parts[0]
            assert other == folder or other in CSRC_MAY_INCLUDE[folder], (
                f"{path.relative_to(ROOT)} includes {name}"
            )
    assert seen == set(order)
