"""`minserve train`: its parts of the data, its token cache, and the model card that it writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from engine.training.curve import Point
from engine.training.data import Part
from engine.training.tokenizer import train_byte_bpe
from engine.training.trainer import Trainer
from service.terminal import console, train
from tests.cli.conftest import TEXT, TINY, Minserve

FAST = [*TINY, "--steps", "2", "--evaluate-every", "1", "--window", "8"]


def test_a_cache_can_be_encoded_here_and_trained_on_elsewhere(
    minserve: Minserve, text_file: Path, tmp_path: Path
) -> None:
    cache, out = tmp_path / "cache", tmp_path / "out"
    ranges = ["--valid", "2000:2300", "--test", "2300:"]
    done = minserve("train", "--data", text_file, *ranges, "--encode-only", "--tokens", cache)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "train: 2,000 tokens of 2,000 bytes, 1 document",
        "valid: 300 tokens of 300 bytes, bytes 2,000 to 2,300",
        "test: 280 tokens of 280 bytes, bytes 2,300 to the end",
    ]
    assert not out.exists()
    done = minserve("train", "--tokens", cache, "--encode-only")  # says the same of what is there
    assert done.stdout.startswith("train: 2,000 tokens")

    done = minserve("train", "--tokens", cache, "--out", out, *FAST)
    assert done.returncode == 0, done.stderr
    assert "tokens: train 2,000, valid 300, test 280; CPU" in done.stderr
    assert re.fullmatch(
        rf"{out}: best at step \d; test loss \d\.\d{{4}} nats per token in windows, "
        r"\d\.\d{4} with the state carried\n",
        done.stdout,
    )
    assert sorted(path.name for path in cache.iterdir()) == [
        *("test.bin", "test.starts.npy", "tokenizer.json", "tokens.json", "train.bin"),
        *("train.starts.npy", "valid.bin", "valid.starts.npy"),
    ]
    readme = (out / "README.md").read_text()
    assert "A mingru language model of cache, trained by minserve." in readme
    assert "| valid | 300 | 300 | bytes 2,000 to 2,300 |" in readme
    for row in ("valid, windows of 8 targets", "valid, state carried", "test, state carried"):
        assert f"| {row}" in readme
    names = ["README.md", "config.json", "curve.jsonl", "curve.png", "model.safetensors"]
    assert sorted(path.name for path in out.iterdir()) == [*names, "tokenizer.json"]


def test_a_cache_in_the_runs_folder_that_was_asked_for_stays(
    minserve: Minserve, text_file: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "out" / "tokens"
    given = ["--data", text_file, "--out", tmp_path / "out", *FAST]
    assert minserve("train", *given, "--tokens", cache).returncode == 0
    assert (cache / "tokens.json").exists()
    assert minserve("train", *given, "--overwrite").returncode == 0
    assert not cache.exists()


def test_the_card_says_what_it_is_told(minserve: Minserve, text_file: Path, tmp_path: Path) -> None:
    about = tmp_path / "about.md"
    about.write_text("## Licence\n\nNone of Hamlet's.\n")
    given = ["--data", text_file, "--out", tmp_path / "out", *FAST, "--valid", f"@{text_file}"]
    done = minserve("train", *given, "--card", about, "--data-name", "one question")
    assert done.returncode == 2  # all of it would be held out
    assert "the training text is empty" in done.stderr or "train part" in done.stderr
    other = tmp_path / "other.txt"
    other.write_text(TEXT)
    given[-1] = str(other)
    done = minserve("train", *given, "--card", about, "--data-name", "one question")
    assert done.returncode == 0, done.stderr
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "A mingru language model of one question, trained by minserve." in readme
    assert "\n\n## Licence\n\nNone of Hamlet's.\n\n## Losses" in readme
    assert str(tmp_path) not in readme
    assert "--valid other.txt --card about.md" in readme


def test_a_list_of_documents_is_named_without_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["minserve", "train", "--valid", "@/home/me/valid.txt", "--test=@/home/me/test.txt"]
    monkeypatch.setattr("sys.argv", [*words, "--card", "/home/me/card.md", "--overwrite"])
    assert console.command_for_others() == (
        "minserve train --valid @valid.txt --test=@test.txt --card card.md"
    )


def test_a_card_that_is_no_text_is_refused(
    minserve: Minserve, text_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "card.md").write_bytes(b"\xff")
    given = ["--data", text_file, "--out", tmp_path / "out", *FAST]
    done = minserve("train", *given, "--card", tmp_path / "card.md")
    assert done.returncode == 2
    assert "card.md: not UTF-8 text" in done.stderr
    assert not (tmp_path / "out").exists()


def test_all_options_of_a_large_run_work_together(minserve: Minserve, tmp_path: Path) -> None:
    data = tmp_path / "books"
    data.mkdir()
    for name in "abcdef":
        (data / name).write_text(f"Title: {name}\n\n" + f"It was {name}, he said.\n\n" * 40)
    (tmp_path / "valid.txt").write_text("Title: b\n")
    done = minserve(
        *("train", "--data", data, "--out", tmp_path / "out", *FAST, "--test", "0:500"),
        *("--valid", f"@{tmp_path / 'valid.txt'}", "--header-every", "200", "--vocab-size", "270"),
        *("--carry", "0.9", "--optimizer", "muon", "--ema", "0.9", "--evaluate-tokens", "100"),
        "--tie-embeddings",
    )
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"]) == (270, 269)
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "| carry | 0.9 |" in readme and "| optimizer | muon |" in readme
    generated = minserve("generate", "It", "--model", tmp_path / "out", "--max-tokens", "5")
    assert generated.returncode == 0, generated.stderr


def test_a_run_whose_own_cache_is_gone_encodes_again(
    minserve: Minserve, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--data", text_file, "--out", tmp_path / "out", *FAST]
    run = Trainer.run
    monkeypatch.setattr(Trainer, "run", lambda self, **how: run(self, should_stop=lambda: True))
    stopped = minserve("train", *given)
    assert stopped.returncode == 130
    assert "stopped at step 0; the state is saved" in stopped.stderr
    monkeypatch.undo()
    train.discard(tmp_path / "out" / "tokens", tmp_path / "out")
    done = minserve("train", *given, "--resume")
    assert done.returncode == 0, done.stderr
    assert str(len((tmp_path / "out" / "curve.jsonl").read_text().splitlines())) == "2"


def test_data_that_has_changed_is_not_resumed_on(
    minserve: Minserve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    given = ["--data", text, "--out", tmp_path / "out", *FAST]
    run = Trainer.run
    monkeypatch.setattr(Trainer, "run", lambda self, **how: run(self, should_stop=lambda: True))
    assert minserve("train", *given).returncode == 130
    monkeypatch.undo()
    text.write_text(TEXT.replace("be", "eb"))
    done = minserve("train", *given, "--resume")
    assert done.returncode == 2
    assert "the unfinished run was trained on other data" in done.stderr
    assert (tmp_path / "out" / "training-state.pt").exists()


def test_progress_says_how_long_the_rest_will_take() -> None:
    shown: list[tuple[float, str | None]] = []

    class Shown:
        def to(self, done: float, note: str | None = None) -> None:
            shown.append((done, note))

    show = train._shower(Shown(), 10_000)
    for step, seconds in ((100, 50.0), (200, 70.0), (300, 170.0)):
        show(
            Point(
                step=step,
                tokens=step,
                train_loss=2.0,
                valid_loss=1.5,
                learning_rate=1e-3,
                tokens_per_second=12345.6,
                seconds=seconds,
            )
        )
    assert shown == [
        (100, "step 100, 12,346 tokens/s, train 2.0000, valid 1.5000"),
        (200, "step 200, 12,346 tokens/s, train 2.0000, valid 1.5000, 33 min left"),
        (300, "step 300, 12,346 tokens/s, train 2.0000, valid 1.5000, 2 h 42 min left"),
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (7169, "119 min"), (7170, "2 h 0 min")],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert console.duration(seconds) == text


def test_the_bytes_of_a_text_that_is_split_are_those_of_its_tokens() -> None:
    """Not a tenth of all: tokens differ in length."""
    tokenizer = train_byte_bpe(["one two one two Grüße " * 50], 265, "<end>")
    ids = tokenizer.encode("one two " * 40 + "xyzzy? " * 20).ids
    text = tokenizer.decode(ids)
    whole = Part(np.array(ids), bytes=len(text))
    data = train.data_of({"train": whole}, 8, tokenizer)
    assert data.valid.bytes == len(tokenizer.decode(data.valid.ids.tolist()))
    assert data.train.bytes == len(text) - data.valid.bytes
    assert train.data_of({"train": whole, "valid": whole}, 8, tokenizer).valid is whole


def test_ctrl_c_while_encoding_ends_quietly(
    minserve: Minserve, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("service.terminal.corpus._encode", interrupt)
    done = minserve("train", "--data", text_file, "--out", tmp_path / "out", *FAST)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
