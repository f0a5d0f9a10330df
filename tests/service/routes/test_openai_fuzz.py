"""Whatever is sent to the OpenAI endpoints and the tokenizer's, the server answers: 200, or a 400
that says what was wrong."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from service.schemas.chat import ChatMessage, ChatRequest
from service.schemas.completions import CompletionRequest
from service.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from tests.service.chat import chat_runner
from tests.service.harness import error_message, running

TEXT = st.text(st.sampled_from("abz é<|end|>start\n\ufdd0"), max_size=12) | st.just("<|end|>")
SCALARS = (
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([299, 300, 2**31, 2**70])
    | st.floats(allow_nan=False, allow_infinity=False) | TEXT
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=5,
)
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), max_size=2)
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "prompt": TEXT | st.lists(TEXT, max_size=3) | st.lists(st.integers(0, 299), max_size=3),
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "user", "assistant", "developer"])},
            optional={"name": TEXT},
        ).flatmap(lambda one: (TEXT | PARTS).map(lambda content: {**one, "content": content})),
        min_size=1,
        max_size=3,
    ),
    "tokens": st.lists(st.integers(-1, 300), max_size=4),
    "max_tokens": st.integers(0, 4),
    "n": st.integers(1, 3),
    "best_of": st.integers(1, 3),
    "logprobs": st.booleans() | st.integers(0, 3),
    "top_logprobs": st.integers(0, 3),
    "stream": st.booleans(),
    "stream_options": st.just({"include_usage": True}),
    "temperature": st.sampled_from([0, 0.5, 100]),
    "stop": TEXT | st.lists(TEXT, max_size=2),
    "logit_bias": st.dictionaries(st.sampled_from(["1", "258", "300"]), st.integers(-100, 100)),
    "stop_token_ids": st.lists(st.integers(0, 299), max_size=2),
    "min_tokens": st.integers(0, 3),
    "chat_template_kwargs": st.dictionaries(TEXT | st.sampled_from(["messages", "self"]), VALUES),
}
FLAGS = (
    "echo", "ignore_eos", "return_token_ids", "return_token_strs", "add_special_tokens",
    "add_generation_prompt", "continue_final_message",
)  # fmt: skip
GOOD |= dict.fromkeys(FLAGS, st.booleans())
KINDS = {
    "/v1/completions": (CompletionRequest, "prompt"),
    "/v1/chat/completions": (ChatRequest, "messages"),
    "/tokenize": (TokenizeRequest, "prompt"),
    "/detokenize": (DetokenizeRequest, "tokens"),
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    path = draw(st.sampled_from(sorted(KINDS)))
    model, main = KINDS[path]
    names = draw(st.lists(st.sampled_from(sorted(set(model.model_fields) - {"model"})), max_size=4))
    body: dict[str, Any] = {"max_tokens": 3} if "max_tokens" in model.model_fields else {}
    for name in [main, *names]:
        chance = draw(st.integers(0, 9))
        body[name] = draw(GOOD.get(name, st.none()) if chance < 9 else VALUES)
    if "messages" in body and not draw(st.integers(0, 3)) and isinstance(body["messages"], list):
        field = draw(st.sampled_from(sorted(ChatMessage.model_fields)))
        body["messages"].append({"role": "user", "content": "x", field: draw(VALUES)})
    return path, body


@settings(max_examples=20, deadline=None)
@given(st.lists(requests(), min_size=20, max_size=20))
def test_no_request_breaks_the_server(batch: list[tuple[str, dict[str, Any]]]) -> None:
    async def send() -> set[int]:
        with tempfile.TemporaryDirectory() as folder:
            async with running(chat_runner(Path(folder)), max_tokens=50) as service:
                seen = set()
                for path, body in batch:
                    response = await service.http.post(path, json=body)
                    assert response.status_code in (200, 400), (path, body, response.text)
                    if response.status_code == 400:
                        error = response.json()
                        error_message(error, error["error"]["param"])
                    seen.add(response.status_code)
                assert service.lifecycle.state == "ready"
                return seen

    assert asyncio.run(send())
