"""What goes wrong is told in one line on stderr, with exit code 2 and without a traceback."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from service import cli
from service.settings import Settings
from tests.cli.conftest import ROOT, TINY, Minserve, environment
from tests.models.folders import FORBIDDEN, UNREADABLE, forbidden

COMMANDS = ["serve", "generate", "score", "train", "convert", "bench"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line of a command that must fail."""
    assert cli.main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("minserve: error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    "problem",
    [typer.BadParameter("7 is too many"), typer.TyperException("Could not open file 'x'")],
    ids=["a bad parameter", "any other"],
)
def test_whatever_the_command_lines_library_finds_is_one_line(
    problem: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not only what it calls a wrong use."""

    def fail(**_: object) -> None:
        raise problem

    monkeypatch.setattr(cli, "app", fail)
    message = str(problem.format_message())  # type: ignore[attr-defined]
    assert refused(capsys, "serve") == f"minserve: error: {message}\n"


@pytest.mark.parametrize("command", COMMANDS[:-1])
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"Usage: minserve {command}")
    assert "--" in shown


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_shows_no_names_of_the_language(
    command: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value is of a plain type, one of several words or in words: no list[str], no enumeration,
    no object."""
    monkeypatch.setenv("COLUMNS", "400")  # a line for each option
    monkeypatch.setenv("TERMINAL_WIDTH", "400")
    try:
        assert cli.main([command, "--help"] if command else ["--help"]) == 0
    except SystemExit as ended:  # of argparse
        assert ended.code == 0
    shown = capsys.readouterr().out
    kinds = set(re.findall(r"<[^>]*>", shown))
    allowed = {"<str>", "<int>", "<float>", "<path>", "<|endoftext|>"}
    assert all(kind in allowed or re.fullmatch(r"<\w+(\|\w+)+>", kind) for kind in kinds), kinds
    for name in ("list[", "List[", "Optional", "Union", "Literal", "None", "Path(", " at 0x"):
        assert name not in shown
    assert not re.search(r"\b[A-Z][a-z]+[A-Z]?\w*\.[a-z_]+\b", shown)  # Kind.member


def test_without_a_command_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {command} " in shown for command in COMMANDS)


def test_bench_passes_its_arguments_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr("service.terminal.bench.command.main", lambda argv: seen.append(argv) or 3)
    assert cli.main(["bench", "--url", "http://x", "--help"]) == 3
    assert seen == [["--url", "http://x", "--help"]]


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    from importlib.metadata import version

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"minserve {version('minserve')}\n"


def test_help_loads_neither_torch_nor_the_service() -> None:
    code = (
        "import sys; from service import cli; cli.main(['train', '--help']);"
        "heavy = {'torch', 'fastapi', 'numpy', 'tokenizers'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment()
    )
    assert done.returncode == 0, done.stderr


def test_every_option_of_serve_is_a_setting() -> None:
    import inspect

    options = inspect.signature(cli.serve).parameters
    assert set(options) <= set(Settings.model_fields)
    assert all(option.default is None for option in options.values())


def test_every_number_of_the_recipe_is_an_option_with_its_default() -> None:
    import inspect

    from engine.training.recipe import Recipe

    options = inspect.signature(cli.train).parameters
    for field in dataclasses.fields(Recipe):
        assert options[field.name].default == field.default


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["frobnicate"], "frobnicate"),
        (["train", "--frobnicate"], "--frobnicate"),
        (["train"], "--data is missing"),
        (["train", "--data", "x"], "--out is missing"),
        (["train", "--data", "x", "--encode-only"], "--tokens"),
        (
            ["train", "--tokens", "/nonexistent/cache", "--out", "/nonexistent/out"],
            "no tokens.json",
        ),
        (["generate"], "prompt"),
        (["serve", "--port", "many"], "--port"),
        (["serve", "--port", "65536"], "MINSERVE_PORT"),
        (["serve", "--max-slots", "0"], "max_slots"),
        (["serve", "--device", "tpu"], "device"),
        (["generate", "x", "--model", "/nonexistent/model"], "/nonexistent/model"),
        (["generate", "x", "--stop", ""], "--stop"),
        (["score", "/nonexistent/file"], "/nonexistent/file"),
        (["convert", "/nonexistent/file", "/nonexistent/folder"], "/nonexistent/file"),
    ],
)
def test_bad_arguments(
    arguments: list[str], says: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments[0] == "score":
        arguments = [*arguments, "--model", str(trained)]
    assert says in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("variable", "named"),
    [("MINSERVE_MAX_N", "MINSERVE_MAX_N is"), ("MINSERVE_PORT", "--port (MINSERVE_PORT) is")],
)
def test_a_setting_is_named_as_it_can_be_given(
    variable: str, named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, "x")
    assert f"error: {named} 'x'" in refused(capsys, "serve")


def test_serve_does_not_start_open_for_a_slip_in_a_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINSERVE_API_KEY", "name:key")
    told = refused(capsys, "serve", "--port", "0")
    assert "MINSERVE_API_KEY is not a setting; did you mean MINSERVE_API_KEYS?" in told


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--cell", "gru"], "hgrn"),
        (["--dropout", "1"], "dropout"),
        (["--learning-rate", "nan"], "learning_rate"),
        (["--d-model", "0"], "d_model"),
        (["--conv-kernel", "1"], "conv_kernel"),
        (["--window", "100000"], "100000"),
        (["--sample-prompt", ""], "--sample-prompt"),
        (["--device", "tpu"], "device"),
        (["--threads", "0"], "threads"),
        (["--resume"], "no unfinished run"),
        (["--tokenizer", "/nonexistent/tokenizer.json"], "/nonexistent/tokenizer.json"),
        (["--data", "/nonexistent/text"], "/nonexistent/text"),
        (["--data", "/proc/fs/nowhere"], "there is no such file or folder"),
        (["--valid", "5:5"], "--valid 5:5 is empty"),
        (["--valid", "2580:"], "--valid begins at byte 2,580; the data has 2,580"),
        (["--valid", "0:100", "--test", "99:"], "--valid and --test have bytes in common"),
        (["--valid", "@/nonexistent/list"], "/nonexistent/list"),
        (["--test", "0:100"], "--test needs --valid"),
        (["--header-every", "-1"], "--header-every is -1"),
        (["--vocab-size", "256"], "--vocab-size is 256; allowed: at least 257"),
        (["--vocab-size", "300", "--tokenizer", "x"], "give one of them"),
        (["--gpus", "3"], "batch is 4; allowed on 3 GPUs: multiples of 3"),
        (["--gpus", "0"], "--gpus is 0"),
        (["--gpus", "2", "--device", "cuda:1"], "--gpus"),
        (["--carry", "1"], "carry"),
        (["--optimizer", "sgd"], "muon"),
        (["--evaluate-tokens", "-1"], "evaluate_tokens"),
        (["--card", "/nonexistent/card.md"], "/nonexistent/card.md"),
        (["--out", "/proc/nowhere"], "/proc/nowhere"),
    ],
)
def test_train_refuses_before_it_begins(
    options: list[str],
    says: str,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    arguments = ["train", "--data", text_file, "--out", out, *TINY, *options]
    assert says in refused(capsys, *arguments)
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"too short", "at least"),
        (b"fine until \xff here", "not UTF-8 text: invalid start byte at byte 11"),
    ],
)
def test_a_text_that_cannot_be_trained_on(
    content: bytes, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_bytes(content)
    arguments = ["train", "--data", tmp_path / "text", "--out", tmp_path / "out", *TINY]
    assert says in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("content", "says"), [(b"", "nothing to score"), (b"x", "nothing"), (b"\xc3", "not UTF-8")]
)
def test_a_text_that_cannot_be_scored(
    content: bytes,
    says: str,
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "text").write_bytes(content)
    assert says in refused(capsys, "score", tmp_path / "text", "--model", trained)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--window", "0"], "--window is 0; allowed: at least 1"),
        (["--window", "many"], "--window"),
        (["--range", "5:5"], "--range 5:5 is empty"),
        (["--range", "all"], "--range is 'all'; allowed: BEGIN:END"),
        (["--range", "1000000:"], "the range begins at byte 1,000,000; the data has 2,580"),
        (["--documents", "--end-of-text", " "], "--end-of-text is empty"),
        (["--only", "/nonexistent/list"], "/nonexistent/list"),
        (["--plot", "/nonexistent/folder/curve.png"], "/nonexistent/folder is no folder"),
        (["--plot", "/"], "--plot: / is a folder"),
        (["/nonexistent/file"], "/nonexistent/file"),
        (["-"], '"-" takes no other path'),
        (["--frobnicate"], "--frobnicate"),
    ],
)
def test_documents_that_cannot_be_scored(
    options: list[str],
    says: str,
    trained: Path,
    text_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["score", text_file, *options, "--model", trained, "--device", "cpu"]
    assert says in refused(capsys, *arguments)


def test_stdin_is_no_document(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--window", "64"], ["--documents"], ["--range", "0:10"], ["--by-position"]):
        told = refused(capsys, "score", "-", *options, "--model", trained)
        assert "stdin is scored as one text" in told


def test_a_listed_document_that_is_not_there_is_named(
    trained: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "list").write_text("To be, or not to be: that is the question.\nTitle: Emma\n")
    arguments = ["score", text_file, "--only", tmp_path / "list", "--model", trained]
    told = refused(capsys, *arguments)
    assert "there is no document for the line 'Title: Emma'" in told and "more" not in told
    (tmp_path / "list").write_text("Title: Emma\nTitle: Dracula\n")
    assert "'Title: Dracula' nor for 1 more" in refused(capsys, *arguments)


@pytest.mark.parametrize("content", ["", " \n", "x"])
def test_documents_without_two_tokens(
    content: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text(content)
    arguments = ["score", tmp_path, "--window", "9", "--by-position", "--model", trained]
    assert "nothing to score: no document has two tokens" in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "-0.1"], "top_p is -0.1; allowed: a finite number, at least 0, at most 1"),
        (["--top-p", "nan"], "top_p is nan"),
        (["--top-k", "-2"], "--top-k is -2; allowed: 0 or -1 (off) or an integer up to 2147483647"),
        (["--top-k", str(2**31)], f"--top-k is {2**31}"),
        (["--max-tokens", "-1"], "max_tokens"),
        (["--seed", str(2**63)], f"--seed is {2**63}; allowed: an integer from {-(2**63)}"),
        (["--seed", str(-(2**63) - 1)], f"--seed is {-(2**63) - 1}; allowed: "),
    ],
)
def test_sampling_parameters_out_of_range(
    options: list[str], says: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "x", "--model", trained, "--device", "cpu", *options]
    assert says in refused(capsys, *arguments)


def test_an_empty_prompt(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "empty" in refused(capsys, "generate", "", "--model", trained, "--device", "cpu")


def test_text_needs_a_tokenizer(
    trained: Path, tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["convert", str(trained), str(tmp_path / "copy")]) == 0
    (tmp_path / "copy" / "tokenizer.json").unlink()
    capsys.readouterr()
    for arguments in (["generate", "x"], ["score", str(text_file)]):
        assert "tokenizer.model" in refused(capsys, *arguments, "--model", tmp_path / "copy")


def commands_that_read_a_model(folder: Path, text_file: Path, tmp_path: Path) -> list[list[str]]:
    place = ["--model", str(folder), "--device", "cpu"]
    return [
        ["generate", "x", *place],
        ["score", str(text_file), *place],
        ["convert", str(folder), str(tmp_path / "converted")],
    ]


@pytest.mark.parametrize(("spoil", "says"), UNREADABLE.values(), ids=list(UNREADABLE))
def test_a_model_that_cannot_be_read(
    spoil: Callable[[Path], object],
    says: str,
    trained: Path,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(trained, folder)
    spoil(folder)
    for arguments in commands_that_read_a_model(folder, text_file, tmp_path):
        assert says in refused(capsys, *arguments)
    assert not (tmp_path / "converted").exists()


@pytest.mark.parametrize("name", [*FORBIDDEN, "tokenizer.json"])
def test_a_model_that_may_not_be_read(
    name: str, trained: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with forbidden(trained, name) as folder:
        for arguments in commands_that_read_a_model(folder, text_file, folder.parent)[:2]:
            says = refused(capsys, *arguments)
            assert "Permission denied" in says
            assert "damaged" not in says and "missing" not in says


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_serve_ends_where_the_model_cannot_be_read(
    name: str, minserve: Minserve, trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(trained, folder)
    (folder / name).unlink()
    (folder / name).mkdir()
    done = minserve("serve", "--port", "0", "--model", folder, "--device", "cpu")
    told = done.stderr + caplog.text  # a server logs it
    assert done.returncode == 2
    assert f"{name}: is a folder; allowed: a file" in told and "Traceback" not in told


def test_a_tokenizer_that_leads_nowhere_is_not_taken_for_none(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(trained, folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("/nowhere")
    told = refused(capsys, "generate", "x", "--model", folder, "--device", "cpu")
    assert "tokenizer.json: is a link to /nowhere, which does not exist" in told


def test_cuda_without_a_usable_gpu_says_the_mend(
    trained: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from engine.device import resolve_device
    from engine.errors import DeviceError

    try:
        resolve_device("cuda")
    except DeviceError:
        pass
    else:
        pytest.skip("this machine has a usable GPU")
    line = refused(capsys, "score", text_file, "--model", trained, "--device", "cuda")
    assert "'cuda' cannot be used: " in line
