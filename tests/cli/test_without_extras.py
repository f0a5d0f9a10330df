"""Without the packages of the extras `loadtest` and `train` the server and the commands work, and
what needs them says in one line how to install them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT, TINY, Done, environment

MISSING = "import sys; sys.modules['httpx'] = sys.modules['matplotlib'] = None\n"


def without(code: str, *arguments: str | Path) -> Done:
    """What a program prints where neither package can be imported."""
    done = subprocess.run(
        [sys.executable, "-c", MISSING + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
    )
    return Done(done.returncode, done.stdout, done.stderr)


def minserve(*arguments: str | Path) -> Done:
    return without("from service import cli; sys.exit(cli.main())", *arguments)


def test_the_server_and_convert_need_neither() -> None:
    done = without(
        "import engine.models.convert, engine.worker, service.app.app, "
        "service.server.api_processes, service.server.api_server, service.server.server, "
        "service.terminal.serve"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_generate_and_score_need_neither(trained: Path, text_file: Path) -> None:
    done = minserve("generate", "To be", "--model", trained, "--max-tokens", "2", "--device", "cpu")
    assert (done.returncode, done.stderr) == (0, "")
    done = minserve("score", text_file, "--model", trained, "--device", "cpu", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["tokens"] > 0


def test_a_plot_of_scores_is_refused_before_the_model_is_read(
    text_file: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "positions.png"
    done = minserve("score", text_file, "--plot", picture, "--model", "/nonexistent/model")
    assert (done.returncode, done.stderr) == (
        2,
        "minserve: error: matplotlib is not installed; pip install 'minserve[train]'\n",
    )


def test_training_goes_on_without_its_picture(text_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = minserve("train", "--data", text_file, "--out", out, *TINY)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == (
        "curve.png was not written: matplotlib is not installed; pip install 'minserve[train]'"
    )
    assert (out / "model.safetensors").exists() and not (out / "curve.png").exists()
    assert "curve.png" not in (out / "README.md").read_text()


def test_a_report_with_plots_is_refused_before_the_run(tmp_path: Path) -> None:
    done = minserve("bench", "--html", tmp_path / "page.html", "--url", "http://127.0.0.1:9")
    assert (done.returncode, done.stderr) == (
        2,
        "minserve bench: error: matplotlib is not installed; pip install 'minserve[loadtest]'\n",
    )


@pytest.mark.parametrize("tool", ["agreement", pytest.param("fuzz", marks=pytest.mark.slow)])
def test_a_load_test_says_what_to_install(tool: str) -> None:
    code = f"import runpy; runpy.run_module('loadtest.{tool}', run_name='__main__')"
    done = without(code, "--help")
    assert (done.returncode, done.stderr) == (
        2,
        "loadtest: error: httpx is not installed; pip install 'minserve[loadtest]'\n",
    )


def test_httpx_is_imported_where_its_lack_is_told() -> None:
    packages = ("loadtest", "service", "engine")
    sources = [path for package in packages for path in ROOT.glob(f"{package}/**/*.py")]
    imports = re.compile(r"^\s*(import|from) httpx\b", re.MULTILINE)
    found = [path for path in sources if imports.search(path.read_text(encoding="utf-8"))]
    assert found == [ROOT / "loadtest" / "with_httpx.py"]


@pytest.mark.parametrize("tool", ["report", pytest.param("lm_plots", marks=pytest.mark.slow)])
def test_a_picture_says_what_to_install(tool: str, tmp_path: Path) -> None:
    (tmp_path / "figures.json").write_text("{}")
    code = f"import runpy; runpy.run_module('loadtest.{tool}', run_name='__main__')"
    done = without(code, tmp_path / "figures.json", "--png", tmp_path / "picture.png")
    assert (done.returncode, done.stderr) == (
        2,
        "loadtest: error: matplotlib is not installed; pip install 'minserve[loadtest]'\n",
    )
