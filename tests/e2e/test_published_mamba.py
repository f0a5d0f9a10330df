"""Folders of Mamba and Mamba-2 in both layouts, served whole, against the equations."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tests.e2e.conftest import Server
from tests.e2e.published import asked, greedy
from tests.models import mamba, mamba2
from tests.tokenizer_types import save_tokenizer

LONG = 20_000  # tokens
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


class Published:
    """The folder, and what its model says by the equations in float64."""

    def __init__(self, folder: Path, form: str) -> None:
        self.folder = folder
        folder.mkdir()
        self.tokenizer: Tokenizer = save_tokenizer(folder, "sentencepiece")
        size = self.tokenizer.get_vocab_size()
        self.equations: Any = mamba2 if "mamba2" in form else mamba
        changes = {"falcon": mamba.FALCON, "mamba2": mamba2.CODESTRAL}.get(form, {})
        self.values = self.equations.VALUES | changes | {"vocab_size": size + 3}  # padded
        self.weights = self.equations.published_weights(self.values, seed=3)
        if form.startswith("mamba_ssm"):
            told, weights = self.equations.as_mamba_ssm(self.values, self.weights)
            (folder / "config.json").write_text(json.dumps(told))
            torch.save(weights, folder / "pytorch_model.bin")
        else:
            (folder / "config.json").write_text(json.dumps(self.values))
            save_file(self.weights, folder / "model.safetensors", {"format": "pt"})

    def logits(self, ids: list[int]) -> torch.Tensor:
        logits: torch.Tensor = self.equations.logits(self.values, self.weights, torch.tensor(ids))
        return logits

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """The best tokens after `ids`, see `tests.e2e.published`."""
        return greedy(self.logits, ids, count)


@pytest.fixture(
    scope="module",
    params=[
        "mamba_ssm",
        "mamba2",
        pytest.param("falcon", marks=pytest.mark.slow),
        pytest.param("mamba_ssm, mamba2", marks=pytest.mark.slow),
    ],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(tmp_path_factory.mktemp("published") / request.param, request.param)


@pytest.fixture(scope="module")
def server(model: Published) -> Iterator[Server]:
    server = Server("--device", "cpu", "--threads", "1", model=str(model.folder))
    yield server
    assert server.stop() == 0


def generated(server: Server, count: int = 8, **body: object) -> tuple[list[int], int]:
    """Greedy tokens, and how many tokens of the prompt were not read again."""
    told = asked(server, "/v1/generate", max_tokens=count, **GREEDY, **body)
    return told["results"][0]["token_ids"], told["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_greedy_texts_are_those_of_the_equations(server: Server, model: Published) -> None:
    for prompt in ("the", "a longer text, with ñ"):
        ids = asked(server, "/tokenize", prompt=prompt)["tokens"]
        expected = model.greedy(ids, 12)
        assert len(expected) >= 3
        told = asked(
            *(server, "/v1/completions"),
            prompt=prompt,
            max_tokens=len(expected),
            return_token_ids=True,
            **GREEDY,
        )
        assert told["choices"][0]["token_ids"] == expected


def test_scores_are_those_of_the_equations(server: Server, model: Published) -> None:
    ids = asked(server, "/tokenize", prompt="the rest of it")["tokens"]
    told = asked(server, "/v1/score", texts=[ids])["results"][0]["token_logprobs"]
    exact = model.logits(ids).log_softmax(-1)
    expected = [float(exact[at, token]) for at, token in enumerate(ids[1:])]
    assert told[0] is None and told[1:] == pytest.approx(expected, abs=1e-4)


def test_a_state_goes_on_as_the_whole_text(server: Server, model: Published) -> None:
    """After a named state, a fork and a snapshot of it and from a cached prompt: the same."""
    ids = asked(server, "/tokenize", prompt="the beginning and the rest of a text")["tokens"]
    first, then = ids[:-4], ids[-4:]
    expected = model.greedy(ids, 8)
    count = len(expected)
    found, cached = generated(server, count, prompts=[ids])
    assert count >= 3 and found == expected and cached < len(first)
    asked(server, "/v1/states", prompt=first, id="begun")
    asked(server, "/v1/states/begun/fork", id="forked")
    content = httpx.get(f"{server.url}/v1/states/begun/content").content
    moved = httpx.post(f"{server.url}/v1/states/import?id=moved", content=content)
    assert moved.status_code == 200, moved.text
    for name in ("begun", "forked", "moved"):
        assert generated(server, count, prompts=[then], state=name)[0] == expected
    found, cached = generated(server, count, prompts=[ids])
    assert found == expected and cached >= len(first)


def test_a_session_s_turns_are_one_text(server: Server, model: Published) -> None:
    ids = asked(server, "/tokenize", prompt="the first turn")["tokens"]
    expected = model.greedy(ids, 5)
    assert generated(server, len(expected), prompts=[ids], session_id="talk")[0] == expected
    more = asked(server, "/tokenize", prompt="and more", add_special_tokens=False)["tokens"]
    last = model.greedy(ids + expected + more, 5)
    assert len(expected) >= 3 and last
    assert generated(server, len(last), prompts=[more], session_id="talk")[0] == last


def test_the_next_turn_of_a_long_conversation_reads_its_own_tokens_alone(server: Server) -> None:
    """From its session's state, and from a cached one where the whole text is sent again."""

    def read() -> float:
        """The tokens of prompts that the engine has read."""
        text = httpx.get(f"{server.url}/metrics").text
        (line,) = re.findall(r"^minserve_prompt_tokens_total (.*)$", text, re.MULTILINE)
        return float(line)

    ids = random.Random(1).choices(range(3, 60), k=LONG)
    begun = read()
    answer, cached = generated(server, prompts=[ids], session_id="long")
    assert (read() - begun, cached) == (LONG, 0)
    more = [7, 8, 9]
    begun = read()
    second, _ = generated(server, prompts=[more], session_id="long")
    # the last token of an answer is read with the next turn
    assert read() - begun == 1 + len(more)
    begun = read()
    again, cached = generated(server, prompts=[[*ids, *answer, *more]])
    assert again == second and cached >= LONG
    assert read() - begun == LONG + len(answer) + len(more) - cached


def test_models_tells_the_family_its_state_and_its_backend(
    server: Server, model: Published
) -> None:
    (card,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    family, ssm, convolved = "mamba", [3, 48, 16], 48
    if model.equations is mamba2:
        family, ssm, convolved = "mamba2", [3, 6, 8, 16], 48 + 2 * 16 * model.values["n_groups"]
    assert (card["family"], card["cell"]) == (family, family)
    assert [(one["name"], one["shape"]) for one in card["state"]] == [
        ("ssm", ssm),
        ("conv", [3, 3, convolved]),
    ]
    assert card["state_bytes"] == 4 * 3 * (48 * 16 + 3 * convolved)
    assert card["backend"]["name"] == "cpu"
