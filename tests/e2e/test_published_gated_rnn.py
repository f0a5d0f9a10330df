"""GRU and LSTM models of PyTorch code: converted by one command, served by another, against torch.

The GRU is a model of words in the layout of pytorch/examples, the LSTM one of characters.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor, nn

from service import cli
from tests.e2e.conftest import Server
from tests.e2e.published import asked, greedy
from tests.models import gated_rnn

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
WORDS = ["the", "cat", "sat", "on", "mat", *(f"word{n}" for n in range(54)), "<unk>", "<eos>"]


class Published:
    """What a user has, the folder that is made of it, and what torch computes in float64."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind, self.folder = kind, folder / "my-model"
        characters = kind == "lstm"
        tokens = list(string.printable) if characters else WORDS
        torch.manual_seed(2)
        self.module = gated_rnn.published(kind, seed=4, embedding=16)
        self.module.encoder = nn.Embedding(len(tokens), 16)
        self.module.decoder = nn.Linear(24, len(tokens))
        with torch.no_grad():
            self.module.decoder.weight.mul_(5)
        torch.save(self.module.state_dict(), folder / "model.pt")
        vocabulary = folder / ("characters.json" if characters else "words.txt")
        vocabulary.write_text(json.dumps(tokens) if characters else "\n".join(tokens))
        given = ["--family", kind, "--tokenizer", str(vocabulary)]
        assert cli.main(["convert", str(folder / "model.pt"), str(self.folder), *given]) == 0

    def logits(self, ids: list[int]) -> Tensor:
        return gated_rnn.logits(self.module, torch.tensor(ids))


@pytest.fixture(scope="module", params=["gru", "lstm"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(tmp_path_factory.mktemp("published"), request.param)


def serve(model: Published, *options: str) -> Server:
    return Server("--device", "cpu", "--threads", "1", *options, model=str(model.folder))


@pytest.fixture(scope="module")
def server(model: Published) -> Iterator[Server]:
    server = serve(model, "--engines", "2")
    yield server
    assert server.stop() == 0


def generated(server: Server, count: int = 8, **body: object) -> tuple[list[int], int]:
    """Greedy tokens, and how many tokens of the prompt were not read again."""
    told = asked(server, "/v1/generate", max_tokens=count, **GREEDY, **body)
    return told["results"][0]["token_ids"], told["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_greedy_texts_are_those_of_torch(server: Server, model: Published) -> None:
    for prompt in ("the cat", "the cat sat on\nthe mat"):
        ids = asked(server, "/tokenize", prompt=prompt)["tokens"]
        expected = greedy(model.logits, ids, 12)
        assert len(expected) >= 3
        told = asked(
            *(server, "/v1/completions"),
            prompt=prompt,
            max_tokens=len(expected),
            **GREEDY,
            return_token_ids=True,
        )
        assert told["choices"][0]["token_ids"] == expected
        text = asked(server, "/detokenize", tokens=[*ids, *expected])["prompt"]
        assert text.endswith(told["choices"][0]["text"])


def test_scores_are_those_of_torch(server: Server, model: Published) -> None:
    ids = asked(server, "/tokenize", prompt="the mat on the cat")["tokens"]
    told = asked(server, "/v1/score", texts=[ids])["results"][0]["token_logprobs"]
    exact = model.logits(ids).log_softmax(-1)
    expected = [float(exact[at, token]) for at, token in enumerate(ids[1:])]
    assert told[0] is None and told[1:] == pytest.approx(expected, abs=1e-4)


def test_a_long_prompt_is_read_in_parts_and_cached(server: Server, model: Published) -> None:
    ids = [token % 40 for token in range(3, 2100)]
    (whole, _), (again, cached) = (generated(server, prompts=[ids]) for _ in range(2))
    assert whole == again and cached > 0
    count = len(expected := greedy(model.logits, ids, 8))
    assert whole[:count] == expected and count >= 2


def test_a_state_goes_on_here_and_in_another_server(server: Server, model: Published) -> None:
    ids = [token % 40 for token in range(60)]
    whole, _ = generated(server, prompts=[ids], no_cache=True)
    asked(server, "/v1/states", prompt=ids[:50], id="begun")
    assert generated(server, prompts=[ids[50:]], state="begun")[0] == whole
    content = httpx.get(f"{server.url}/v1/states/begun/content").content
    other = serve(model)
    try:
        moved = httpx.post(f"{other.url}/v1/states/import?id=moved", content=content)
        assert moved.status_code == 200, moved.text
        assert generated(other, prompts=[ids[50:]], state="moved")[0] == whole
    finally:
        assert other.stop() == 0


def test_a_session_goes_on_turn_by_turn(server: Server, model: Published) -> None:
    first = asked(
        *(server, "/v1/completions"),
        prompt="the cat", max_tokens=4, return_token_ids=True, session_id="talk", **GREEDY,
    )  # fmt: skip
    told = first["choices"][0]
    then = asked(server, "/tokenize", prompt="the cat")["tokens"] + told["token_ids"]
    more = list(range(5))
    turn, _ = generated(server, count=4, prompts=[more], session_id="talk")
    count = len(expected := greedy(model.logits, [*then, *more], 4))
    assert turn[:count] == expected


def test_models_tells_the_family_and_its_state(server: Server, model: Published) -> None:
    (card,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert (card["family"], card["cell"]) == (model.kind, model.kind)
    names = ["hidden"] if model.kind == "gru" else ["hidden", "cell"]
    assert [one["name"] for one in card["state"]] == names
    assert card["state_bytes"] == 4 * 2 * 24 * len(names)
    assert card["backend"]["name"] == "cpu"


def test_grammars_hold(server: Server, model: Published) -> None:
    """Where the tokens can spell the text, which few words can."""
    choices = ["yes", "no, 3"]
    body = {"prompt": "the", "max_tokens": 20, "structured_outputs": {"choice": choices}}
    if model.kind == "lstm":
        told = asked(server, "/v1/completions", **body)
        assert told["choices"][0]["text"] in choices
    else:
        refused = httpx.post(f"{server.url}/v1/completions", json=body)
        assert refused.status_code == 400 and "can spell" in refused.text


def test_int8_weights_give_a_text_the_same_bits_in_any_batch(model: Published) -> None:
    server = serve(model, "--quantize", "int8", "--deterministic")
    try:
        prompts = [[1, 2, 3], [4], list(range(40)) * 5]
        told = {"texts": prompts, "no_cache": True}
        together = asked(server, "/v1/score", **told)["results"]
        for prompt, found in zip(prompts, together, strict=True):
            (alone,) = asked(server, "/v1/score", texts=[prompt], no_cache=True)["results"]
            assert alone["token_logprobs"] == found["token_logprobs"]
        (card,) = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert (card["quantization"], card["backend"]["name"]) == ("int8", "cpu")
    finally:
        assert server.stop() == 0
