"""A checkpoint folder with a chat template, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from engine.training.tokenizer import byte_level_tokenizer
from tests.engine.fake import FakeRunner
from tests.service.harness import fake_runner

START, END = 257, 258  # <|start|>, <|end|>
VOCABULARY = 300
# The prompt's last byte decides what the fake model goes on with.
TEMPLATE = (
    "{% for message in messages %}"
    "<|start|>{{ message.role }}:{{ message.content | trim }}{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant:a{% endif %}"
)


def save_chat_tokenizer(folder: Path, template: Any = TEMPLATE, **config: Any) -> Path:
    """Bytes, two special tokens more, and a template in tokenizer_config.json."""
    library = byte_level_tokenizer()
    library.add_special_tokens(
        [AddedToken(f"<|{name}|>", special=True) for name in ("start", "end")]
    )
    assert library.token_to_id("<|end|>") == END
    library.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "chat_template": template, "model_max_length": 8, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def chat_runner(folder: Path, **options: Any) -> FakeRunner:
    return fake_runner(save_chat_tokenizer(folder), vocab_size=VOCABULARY, **options)


def prompt_ids(*turns: tuple[str, str]) -> list[int]:
    """What TEMPLATE makes of a conversation."""
    ids: list[int] = []
    for role, content in turns:
        ids += [START, *f"{role}:{content}".encode(), END]
    return [*ids, START, *b"assistant:a"]
