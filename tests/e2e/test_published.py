"""A folder as it is published, served: texts, chats, grammars and states of a tokenizer.model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import Server
from tests.models.published import WIDTH, min_lm, write_config, write_folder
from tests.sentencepiece_models import bpe_pieces, encoded, write_model

PIECES = bpe_pieces()
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "model"
    model = min_lm(num_tokens=512)
    write_folder(folder, model, vocab_size=512, eos_token_id=2)
    write_model(folder, PIECES)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    server = Server("--device", "cpu", "--threads", "1", model=str(folder))
    yield server
    assert server.stop() == 0


def asked(server: Server, path: str, **body: object) -> dict[str, object]:
    response = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    told: dict[str, object] = response.json()
    return told


def test_texts_chats_and_scores(server: Server) -> None:
    ids = [1, *encoded("The quick", PIECES)]
    assert asked(server, "/tokenize", prompt="The quick")["tokens"] == ids
    told = asked(server, "/v1/completions", prompt="The quick", max_tokens=4, seed=1)
    assert told["usage"]["prompt_tokens"] == len(ids)  # type: ignore[index]
    messages = [{"role": "user", "content": "<s> ñ"}]
    chat = asked(server, "/v1/chat/completions", messages=messages, max_tokens=4, seed=1)
    rendered = [1, *encoded("[user] <s> ñ\n", PIECES)]
    assert chat["usage"]["prompt_tokens"] == len(rendered)  # type: ignore[index]
    assert asked(server, "/v1/score", texts=["The quick brown"])["results"]


def test_grammars(server: Server) -> None:
    for choice in ("The quick", "ñ🙂"):
        guided = {"choice": [choice]}
        told = asked(
            server, "/v1/completions", prompt="a", max_tokens=60, structured_outputs=guided
        )
        assert told["choices"][0]["text"] == choice  # type: ignore[index]


def test_states(server: Server) -> None:
    body = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    whole = asked(server, "/v1/generate", prompts=["The quick brown fox"], **body)
    first = asked(server, "/v1/states", prompt="The quick")
    rest = asked(server, "/v1/generate", prompts=[" brown fox"], state=first["id"], **body)
    texts = [told["results"][0]["text"] for told in (whole, rest)]  # type: ignore[index]
    assert texts[0] == texts[1]


def test_models_tells_how_it_runs(server: Server) -> None:
    (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    inner = int(WIDTH * 1.5)
    assert (model["family"], model["cell"], model["vocab_size"]) == ("minrnn", "mingru", 512)
    assert model["state"] == [{"name": "cell", "shape": [2, inner], "dtype": "F32"}]
    assert model["state_bytes"] == 2 * inner * 4
    assert model["backend"] == {
        "name": "cpu", "paths": [{"name": "cpu", "used": True, "reason": None}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("transformer", "HGRNForCausalLM, Mamba2ForCausalLM, MambaForCausalLM"),
        pytest.param(
            "small",
            f"has token id {len(PIECES) - 1}, but the model's vocabulary ends at 36",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_folder_that_cannot_be_served_ends_the_command(
    kind: str, message: str, tmp_path: Path
) -> None:
    if kind == "transformer":
        write_config(tmp_path, architectures=["LlamaForCausalLM"])
    else:
        write_folder(tmp_path)
        write_model(tmp_path, PIECES)
    done = subprocess.run(
        [sys.executable, "-m", "service.cli", "serve", "--port", "0", "--device", "cpu",
         "--model", str(tmp_path)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    errors = [line for line in done.stderr.splitlines() if "error: " in line]
    assert done.returncode == 2 and len(errors) == 1 and message in errors[0], done.stderr
