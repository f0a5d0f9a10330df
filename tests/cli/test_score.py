"""`minserve score` of documents: headers, windows, positions, and what it refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import chain, pairwise, zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.loader import load_model
from service.terminal import positions
from service.text.tokenizer import Tokenizer
from tests.cli.conftest import TEXT, Minserve
from tests.tokenizer_types import TEXT as TEXTS
from tests.tokenizer_types import TYPES, save_model

HEADER = "Title: Hamlet\nAuthor: William Shakespeare\n\n"
BOOKS = [
    (HEADER, TEXT[: 43 * 30]),
    ("", "Words, words, words.\n"),
    ("Title: Lear\n\n", "Nothing will come of nothing.\n" * 3),
]
EXACTLY = ["--device", "cpu", "--dtype", "float32"]
WINDOW = 50


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """The books in one file, with lines between them."""
    path = tmp_path / "library.txt"
    path.write_text("<|endoftext|>\n".join(header + body for header, body in BOOKS))
    return path


def figures(minserve: Minserve, *arguments: str | Path) -> dict[str, Any]:
    done = minserve("score", *arguments, *EXACTLY, "--json")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@torch.no_grad()
def nats_of(model: Any, *texts: str) -> list[list[float]]:
    """-log p of all bytes of each text but the first, in float64, stepping from the initial state.

    The texts step together, each in a row of its own.
    """
    state, nats = model.new_state(len(texts)), [[] for _ in texts]
    for pairs in zip_longest(*(pairwise(text.encode()) for text in texts)):
        rows = [row for row, pair in enumerate(pairs) if pair is not None]
        tokens = torch.tensor([pairs[row][0] for row in rows])
        logits = model.logits(model.step(tokens, state, torch.tensor(rows, dtype=torch.int32)))
        for row, logprobs in zip(rows, logits.double().log_softmax(-1), strict=True):
            nats[row].append(-float(logprobs[pairs[row][1]]))
    return nats


def bits(nats: Sequence[float], size: int) -> float:
    return math.fsum(nats) / math.log(2) / size


def test_headers_windows_and_positions_are_those_of_a_direct_computation(
    minserve: Minserve, trained: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "LONG", 90)
    report = figures(
        minserve, library, "--model", trained, "--documents", "--skip-header", "--by-position",
        "--window", str(WINDOW),
    )  # fmt: skip
    model, _ = load_model(trained, "cpu", "float32")
    # without a header the first byte has nothing that predicts it
    carried = [
        nats[max(len(header) - 1, 0) :]
        for (header, _), nats in zip(
            BOOKS, nats_of(model, *(header + body for header, body in BOOKS)), strict=True
        )
    ]
    scored = [len(body) - (header == "") for header, body in BOOKS]
    windows = []
    for header, body in BOOKS:
        firsts = range(0, len(body) - 1, WINDOW)
        before, *parts = nats_of(
            model, header + body[:1], *(header + body[at : at + WINDOW + 1] for at in firsts)
        )
        windows.append([*before[-1:], *chain(*(part[len(header) :] for part in parts))])
    for told, name, nats, again, size in zip(
        report["documents"],
        ("Title: Hamlet", "Words, words, words.", "Title: Lear"),
        carried,
        windows,
        scored,
        strict=True,
    ):
        assert len(nats) == len(again) == size
        assert told == {
            "first_line": name,
            "bytes": size,
            "tokens": size,
            "bits_per_byte": pytest.approx(bits(nats, size), rel=1e-5),
            "windows_bits_per_byte": pytest.approx(bits(again, size), rel=1e-5),
        }
    size = sum(scored)
    assert (report["bytes"], report["tokens"], report["window"]) == (size, size, WINDOW)
    total = list(chain(*carried))
    assert report["bits_per_byte"] == pytest.approx(bits(total, size), rel=1e-5)
    assert report["nats_per_token"] == pytest.approx(math.fsum(total) / size, rel=1e-5)
    assert report["windows_bits_per_byte"] == pytest.approx(
        bits(list(chain(*windows)), size), rel=1e-5
    )

    first = [carried[0][:1000], carried[1], carried[2]]
    assert report["by_position"] == [
        {
            "begin": 0,
            "end": 1000,
            "documents": 3,
            "bytes": 1000 + scored[1] + scored[2],
            "bits_per_byte": pytest.approx(
                bits(list(chain(*first)), 1000 + scored[1] + scored[2]), rel=1e-5
            ),
        },
        {
            "begin": 1000,
            "end": 3000,
            "documents": 1,
            "bytes": 290,
            "bits_per_byte": pytest.approx(bits(carried[0][1000:], 290), rel=1e-5),
        },
    ]
    assert [row["documents"] for row in report["by_position_long"]] == [2, 1]
    assert report["by_position_long"][0]["bytes"] == 1000 + scored[2]


def test_each_document_is_scored_as_if_alone(
    minserve: Minserve, trained: Path, library: Path, tmp_path: Path
) -> None:
    options = ["--model", trained, "--window", str(WINDOW)]
    folder = tmp_path / "books"
    folder.mkdir()
    alone = []
    for number, (header, body) in enumerate(BOOKS):
        (folder / f"{number}.txt").write_text(header + body)
        alone += figures(minserve, folder / f"{number}.txt", *options)["documents"]
    together = figures(minserve, library, *options, "--documents")
    assert together["documents"] == alone
    assert figures(minserve, folder, *options) == together
    assert figures(minserve, *sorted(folder.iterdir()), *options) == together
    tokens = sum(len(header + body) - 1 for header, body in BOOKS)
    assert together["tokens"] == together["bytes"] == tokens


def test_lists_and_ranges_choose_what_is_scored(
    minserve: Minserve, trained: Path, library: Path, tmp_path: Path
) -> None:
    options = ["--model", trained, "--documents"]
    every = figures(minserve, library, *options)["documents"]
    chosen = tmp_path / "held_out.txt"
    chosen.write_text("Title: Lear\nWords, words, words.\n")
    assert figures(minserve, library, *options, "--only", chosen)["documents"] == every[1:]
    begin = len(HEADER + BOOKS[0][1])
    part = figures(minserve, library, *options, "--range", f"{begin + 14}:{begin + 14 + 21}")
    assert part["documents"] == every[1:2]


@pytest.mark.parametrize("name", TYPES)
def test_a_document_is_scored_as_a_file_and_its_positions_add_up(
    name: str, tmp_path: Path, minserve: Minserve
) -> None:
    """Whatever the tokens' bytes are."""
    save_model(tmp_path, name)
    file = tmp_path / "text.txt"
    file.write_text("\n".join(TEXTS), encoding="utf-8")
    plain = figures(minserve, file, "--model", tmp_path)
    report = figures(minserve, file, "--model", tmp_path, "--by-position")
    assert {key: report[key] for key in plain} == plain
    rows = report["by_position"]
    assert [row["begin"] for row in rows] == [0, 1000]
    assert sum(row["bytes"] for row in rows) == report["bytes"]
    whole = sum(row["bits_per_byte"] * row["bytes"] for row in rows) / report["bytes"]
    assert whole == pytest.approx(plain["bits_per_byte"], rel=1e-9)


@pytest.mark.parametrize("name", TYPES)
def test_a_body_is_scored_after_its_header_whatever_the_tokenizer(
    name: str, tmp_path: Path, minserve: Minserve
) -> None:
    tokenizer = Tokenizer(save_model(tmp_path, name))
    body = TEXTS[0] + "\n"
    (tmp_path / "text.txt").write_text(HEADER + body, encoding="utf-8")
    report = figures(minserve, tmp_path / "text.txt", "--model", tmp_path, "--skip-header")
    ids = tokenizer.encode(body, begins=False)
    assert report["tokens"] == len(ids) + len(tokenizer.end_ids)
    assert report["bytes"] == len(body.encode())


def test_text_for_people_and_a_picture(
    minserve: Minserve, trained: Path, library: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "positions.png"
    done = minserve(
        "score", library, "--model", trained, *EXACTLY, "--documents", "--window", "64",
        "--plot", picture,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = [line.split() for line in done.stdout.splitlines()]
    assert ["documents", "3"] in words and ["window", "64"] in words
    assert ["from", "byte", "documents", "bytes", "bits", "per", "byte"] in words
    assert ["1,000", "1", f"{len(HEADER) + 290:,}"] in [line[:3] for line in words]
    assert picture.read_bytes().startswith(b"\x89PNG")
