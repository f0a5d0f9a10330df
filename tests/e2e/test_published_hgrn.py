"""An HGRN folder in flash-linear-attention's layout, served whole, against its equations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tests.e2e.conftest import Server
from tests.e2e.published import asked, greedy
from tests.models import hgrn
from tests.tokenizer_types import save_tokenizer

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


class Published:
    """The folder, and what its model says by the equations in float64."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.tokenizer: Tokenizer = save_tokenizer(folder, "sentencepiece")
        size = self.tokenizer.get_vocab_size()
        self.values = hgrn.VALUES | {"vocab_size": size + 3, "use_short_conv": True}  # padded
        self.weights = hgrn.published_weights(self.values, seed=3)
        (folder / "config.json").write_text(json.dumps(self.values))
        save_file(self.weights, folder / "model.safetensors", {"format": "pt"})
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))

    def logits(self, ids: list[int]) -> torch.Tensor:
        return hgrn.logits(self.values, self.weights, torch.tensor(ids))

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """The best tokens after `ids`, see `tests.e2e.published`."""
        return greedy(self.logits, ids, count)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(tmp_path_factory.mktemp("published") / "hgrn")


@pytest.fixture(scope="module")
def server(model: Published) -> Iterator[Server]:
    folder = str(model.folder)
    server = Server("--device", "cpu", "--threads", "1", "--deterministic", model=folder)
    yield server
    assert server.stop() == 0


def test_greedy_texts_are_those_of_the_equations(server: Server, model: Published) -> None:
    for prompt in ("the", "a longer text, with ñ"):
        ids = asked(server, "/tokenize", prompt=prompt)["tokens"]
        expected = model.greedy(ids, 12)
        assert len(expected) >= 3
        told = asked(
            *(server, "/v1/completions"),
            prompt=prompt,
            max_tokens=len(expected),
            temperature=0,
            ignore_eos=True,
            return_token_ids=True,
        )
        assert told["choices"][0]["token_ids"] == expected


def test_chats_are_read_by_the_template(server: Server, model: Published) -> None:
    messages = [{"role": "user", "content": "the end"}]
    ids = asked(server, "/tokenize", messages=messages)["tokens"]
    text = asked(server, "/detokenize", tokens=ids)["prompt"]
    assert "[user] the end" in text
    expected = model.greedy(ids, 6)
    told = asked(
        *(server, "/v1/chat/completions"),
        messages=messages,
        max_tokens=len(expected),
        temperature=0,
        ignore_eos=True,
        return_token_ids=True,
    )
    assert told["choices"][0]["token_ids"] == expected


def test_scores_are_those_of_the_equations(server: Server, model: Published) -> None:
    ids = asked(server, "/tokenize", prompt="the rest of it")["tokens"]
    told = asked(server, "/v1/score", texts=[ids])["results"][0]["token_logprobs"]
    exact = model.logits(ids).log_softmax(-1)
    expected = [float(exact[at, token]) for at, token in enumerate(ids[1:])]
    assert told[0] is None and told[1:] == pytest.approx(expected, abs=1e-4)


def test_a_state_goes_on_as_the_whole_text(server: Server) -> None:
    """After a named state, a snapshot of it and from a cached prompt: the same tokens."""
    ids = asked(server, "/tokenize", prompt="the beginning and the rest of a text")["tokens"]
    first, then = ids[:-4], ids[-4:]
    greedy = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}

    def tokens(**body: object) -> list[int]:
        found: list[int] = asked(server, "/v1/generate", **greedy, **body)["results"][0][
            "token_ids"
        ]
        return found

    whole = tokens(prompts=[ids])
    asked(server, "/v1/states", prompt=first, id="begun")
    assert tokens(prompts=[then], state="begun") == whole
    content = httpx.get(f"{server.url}/v1/states/begun/content").content
    moved = httpx.post(f"{server.url}/v1/states/import?id=moved", content=content)
    assert moved.status_code == 200, moved.text
    assert tokens(prompts=[then], state="moved") == whole
    assert tokens(prompts=[ids]) == whole  # from the cached prompt


def test_models_tells_the_family_and_its_state(server: Server) -> None:
    (card,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert (card["family"], card["cell"]) == ("hgrn", "hgrn")
    assert [one["name"] for one in card["state"]] == ["hidden", "i_conv", "f_conv"]
    assert card["state_bytes"] == 4 * 3 * 24 * (1 + 3 + 3)
    assert card["backend"]["name"] == "cpu"


def test_grammars_hold(server: Server) -> None:
    told = asked(
        *(server, "/v1/completions"),
        prompt="the",
        max_tokens=20,
        structured_outputs={"choice": ["yes", "no"]},
    )
    assert told["choices"][0]["text"] in ("yes", "no")
