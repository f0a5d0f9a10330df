"""The endpoints over models whose tokenizers are of all types: what is read and what is written are
the ids and the characters of the whole text."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.client.request_stream import Update
from engine.protocol.token_ids import unpack_ids
from service.inference.inputs.continuations import Context
from service.inference.output_text import OutputText
from service.text.stop import StopStrings
from service.text.tokenizer import Tokenizer
from tests.service.harness import Service, fake_runner, running
from tests.service.text.test_tokenizer_types import Counting
from tests.tokenizer_types import TEXT, TYPES, end_of, save_tokenizer

GENERATE, COMPLETIONS, SCORE = "/v1/generate", "/v1/completions", "/v1/score"
every_type = pytest.mark.parametrize("name", TYPES)
SPACED = ("sentencepiece", "metaspace_first", "metaspace_always", "unigram", "unigram_words")
# Whose grammars can be told which bytes tokens stand for, and whose tokens can spell any word.
GUIDED = [name for name in TYPES if name not in ("wordpiece", "words", "words_and_lines")]


@dataclass
class Text:
    """A service, and the tokenizer of its model."""

    service: Service
    tokenizer: Tokenizer
    library: Any

    def id_of(self, name: str) -> int:
        id = self.tokenizer.id_of(name)
        assert id is not None, name
        return id

    def last_read(self) -> list[int]:
        """The prompt of the request that the engine admitted last."""
        return list(unpack_ids(self.service.runner.admitted[-1].prompt))


@asynccontextmanager
async def serving(folder: Path, name: str, **options: Any) -> AsyncIterator[Text]:
    library = save_tokenizer(folder, name)
    options = {"eos": None, "host_rows": 32, "slots": 16, **options}
    runner = fake_runner(folder, vocab_size=library.get_vocab_size(), **options)
    async with running(runner) as service:
        yield Text(service, Tokenizer(library), library)


# What is written.


@every_type
async def test_random_tokens_are_told_as_they_are_whole(name: str, tmp_path: Path) -> None:
    """Also those that are no UTF-8: 200, U+FFFD, and a stream says what the plain answer says."""
    chance = random.Random(5)
    async with serving(tmp_path, name) as text:
        size = text.tokenizer.vocab_size
        prompts = [[chance.randrange(size) for _ in range(9)] for _ in range(12)]
        body = {"prompts": prompts, "max_tokens": 30, "top_k": 0, "seed": 3, "temperature": 1}
        results = (await text.service.post(GENERATE, body))["results"]
        pieces = {i: "" for i in range(len(prompts))}
        for frame in await text.service.stream(GENERATE, body):
            pieces[frame["index"]] += frame["text"]
        for prompt, result in zip(prompts, results, strict=True):
            assert result["text"] == pieces[result["index"]]
            whole = text.tokenizer.decode([*prompt, *result["token_ids"]])
            assert text.tokenizer.decode_open(prompt) + result["text"] == whole
        with_logprobs = await text.service.post(GENERATE, {**body, "logprobs": 2})
        assert [one["text"] for one in with_logprobs["results"]] == list(pieces.values())


async def test_bytes_that_are_no_utf_8(tmp_path: Path) -> None:
    async with serving(tmp_path, "sentencepiece") as text:
        lone, word = text.id_of("<0xE5>"), text.id_of("▁The")
        body = {
            "prompt": [1, word, lone],
            "max_tokens": 2,
            "temperature": 0,
            "logit_bias": {str(word): 100},
        }
        (choice,) = (await text.service.post(COMPLETIONS, body))["choices"]
        assert choice["text"] == "\ufffd The The"
        frames = await text.service.stream(COMPLETIONS, body)
        assert "".join(frame["choices"][0]["text"] for frame in frames) == "\ufffd The The"


class Breaks:
    """A decoder that cannot tell one of its tokens."""

    late, holds = 0, True

    def feed(self, token: int) -> str:
        if token == ord("x"):
            raise ValueError("no text")
        return chr(token)

    def feed_all(self, tokens: Any) -> str:
        return "".join(map(self.feed, tokens))

    def flush(self) -> str:
        return ""


@pytest.fixture
def breaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Tokenizer, "decoder", lambda *_, **__: Breaks())
    init = OutputText.__init__

    def without_plain(self: OutputText, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self._plain = self._takes_plain = None
        self._decoder = Breaks()

    monkeypatch.setattr(OutputText, "__init__", without_plain)
    yield


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"stop": "ZZZ"}])
async def test_an_answer_that_cannot_be_told_ends_alone(
    service: Service, breaks: None, more: Any
) -> None:
    body = {"prompts": ["abc", "vw", "klm"], "max_tokens": 4, "temperature": 0, **more}
    first, second, third = (await service.post(GENERATE, body))["results"]
    assert (first["text"], third["text"]) == ("defg", "nopq")
    assert second == {
        "index": 1,
        "error": {
            "message": "internal error",
            "type": "server_error",
            "param": None,
            "code": "server_error",
        },
    }
    frames = await service.stream(GENERATE, body)
    texts = ["".join(f["text"] for f in frames if f["index"] == i and "text" in f) for i in (0, 2)]
    assert texts == ["defg", "nopq"]
    (broken,) = [frame for frame in frames if "error" in frame]
    assert broken["index"] == 1
    body = {"prompt": body["prompts"], "max_tokens": 4, "temperature": 0}
    choices = (await service.post(COMPLETIONS, body))["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["length", "error", "length"]
    assert "error" in await service.post(COMPLETIONS, {**body, "prompt": "vw"}, 500)
    assert service.client.stats.running == 0


async def test_what_keeps_a_state_looks_at_each_token_once(tmp_path: Path) -> None:
    """With stop strings that cut the answer, whatever its tokens are."""
    library = save_tokenizer(tmp_path, "sentencepiece")
    tokenizer = Tokenizer(library)
    counting = Counting(tokenizer._library)
    object.__setattr__(tokenizer._vocabulary, "library", counting)
    for token in (tokenizer.id_of("<0x80>"), tokenizer.id_of("▁The")):
        assert token is not None
        answer = OutputText(tokenizer, [1], StopStrings(["quick"]), keeps=True)
        counting.decoded = 0
        for _ in range(400):
            answer.take(Update([token]))
        answer.take(Update(list(tokenizer.encode("quick", begins=False))))
        assert answer.stopped and answer.kept_tokens() == 400
        assert counting.decoded <= 400 * 16


# What is read.


@every_type
@pytest.mark.parametrize(
    ("context", "continuation"),
    [
        ("The quick", "ly"),
        ("The quick", " brown fox"),
        ("The quick ", "brown fox"),
        ("The quick \n", "brown"),
        ("To be, or not to be:", " that is the question."),
        ("don", "'t you see?"),
        ("日本", "語"),
        ("", "The quick"),
    ],
)
async def test_a_continuation_has_the_ids_of_the_whole_text(
    name: str, context: str, continuation: str, tmp_path: Path
) -> None:
    async with serving(tmp_path, name, eos=0) as text:
        body = {"items": [{"context": context, "continuations": [continuation]}]}
        (told,) = (await text.service.post(SCORE, body))["results"][0]["continuations"]
        read = text.last_read()
        whole = list(text.tokenizer.encode(context + continuation))
        before = list(text.tokenizer.encode(context.rstrip())) or [0]
        if not context and not text.tokenizer.begin_ids:
            whole = [0, *whole]
        common = next(
            (i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before)
        )
        if common == 0:  # the first token of all is another one: end-of-text stands before it
            whole, common = [0, *whole], 1
        assert read == whole
        assert told["num_tokens"] == len(whole) - common
        assert not set(read[1:]) & set(text.tokenizer.end_ids)


async def test_a_continuation_that_joins_its_context_is_forked_where_they_part(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, "wordpiece") as text:
        body = {"items": [{"context": "the quick", "continuations": ["ly", " fox"]}]}
        joined, apart = (await text.service.post(SCORE, body))["results"][0]["continuations"]
        encode = text.tokenizer.encode
        assert list(encode("the quickly"))[:2] == list(encode("the quick"))[:2]
        assert joined["num_tokens"] == len(encode("the quickly")) - 2
        assert apart["num_tokens"] == len(encode("the quick fox")) - len(encode("the quick"))


@every_type
async def test_a_long_context_is_encoded_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many continuations it has; their ids are those of the whole text all the same."""
    context, continuations = "\n".join(TEXT), [f"ly {i}" for i in range(80)]
    read: list[str] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, **how: bool) -> Any:
        read.append(text)
        return encode(self, text, **how)

    async with serving(tmp_path, name, eos=0, max_step_tokens=4096) as text:
        monkeypatch.setattr(Tokenizer, "encode", counted)
        body = {"items": [{"context": context, "continuations": continuations}]}
        told = (await text.service.post(SCORE, body))["results"][0]["continuations"]
        monkeypatch.undo()
        assert sum(map(len, read)) < len(continuations) * len(context) / 2
        before = list(text.tokenizer.encode(context))
        for continuation, one in zip(continuations, told, strict=True):
            whole = list(text.tokenizer.encode(context + continuation))
            common = next(i for i, id in enumerate(whole) if before[i : i + 1] != [id])
            assert one["num_tokens"] == len(whole) - common
        assert [*unpack_ids(text.service.runner.admitted[-1].prompt)] == whole


async def test_the_event_loop_turns_while_many_continuations_are_read(tmp_path: Path) -> None:
    """Also where a context has no place to be cut at."""
    async with serving(tmp_path, "sentencepiece", eos=0) as text:
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        context = Context(
            "a" * 20_000, "context", text.tokenizer, text.service.lifecycle.runtime.info,
            begins=True, goes_on=False,
        )  # fmt: skip
        await context.ids()
        other = asyncio.create_task(turn())
        for _ in range(12):
            await context.followed_by("b", "continuation")
        other.cancel()
        assert turns >= 4


async def test_a_continuation_that_adds_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, "wordpiece") as text:
        body = {"items": [{"context": "the quick", "continuations": [" "]}]}
        param = "items[0].continuations[0]"
        assert "adds no token" in await text.service.refused(SCORE, body, param)


@every_type
async def test_text_after_a_state_goes_on_in_mid_sentence(name: str, tmp_path: Path) -> None:
    async with serving(tmp_path, name) as text:
        ids = list(text.tokenizer.encode("ly brown", begins=False))
        marks = {*text.tokenizer.begin_ids, *text.tokenizer.end_ids}
        assert not set(ids) & marks
        first = await text.service.post("/v1/states", {"prompt": "The quick", "id": "kept"})
        assert first["tokens"] == len(text.tokenizer.encode("The quick"))
        body = {"prompt": "ly brown", "state": "kept", "max_tokens": 1}
        await text.service.post(COMPLETIONS, body)
        assert text.last_read() == ids
        turn = {"prompts": ["The quick"], "session_id": "talk", "max_tokens": 1}
        await text.service.post(GENERATE, turn)
        assert text.last_read() == list(text.tokenizer.encode("The quick"))
        await text.service.post(GENERATE, {**turn, "prompts": ["ly brown"]})
        assert text.last_read() == ids
        item = {"context": "ly", "continuations": [" brown"]}
        await text.service.post(SCORE, {"items": [item], "state": "kept"})
        assert text.last_read() == ids
        await text.service.post(SCORE, {"texts": ["ly brown"], "state": "kept"})
        assert text.last_read()[: len(ids)] == ids


@every_type
async def test_a_text_in_pieces_has_the_ids_of_the_whole(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.inference.inputs.state_upload.PIECE", 700)
    monkeypatch.setattr("service.http.upload.MOST_AT_ONCE", 333)
    whole = "\n".join(TEXT) + "\n" + " ".join(TEXT).replace("\n", " ")
    async with serving(tmp_path, name, max_step_tokens=4096) as text:

        async def upload() -> AsyncIterator[bytes]:
            data = whole.encode()
            for start in range(0, len(data), 333):
                yield data[start : start + 333]

        response = await text.service.http.post("/v1/states/text", content=upload())
        assert response.status_code == 200, response.text
        read = [id for request in text.service.runner.admitted for id in unpack_ids(request.prompt)]
        assert len(text.service.runner.admitted) > 3
        assert read == list(text.tokenizer.encode(whole))
        assert response.json()["tokens"] == len(read)


# Where both meet.


@pytest.mark.parametrize("name", SPACED)
async def test_what_goes_on_after_a_state_keeps_its_first_space(name: str, tmp_path: Path) -> None:
    """In an echo, its offsets, and the bytes that are counted."""
    async with serving(tmp_path, name) as text:
        await text.service.post("/v1/states", {"prompt": "The quick", "id": "kept"})
        body = {"prompt": " brown", "echo": True, "logprobs": 0, "max_tokens": 0}
        (choice,) = (await text.service.post(COMPLETIONS, {**body, "state": "kept"}))["choices"]
        assert choice["text"] == " brown"
        pieces = [len(name) for name in choice["logprobs"]["tokens"]]
        starts = [sum(pieces[:i]) for i in range(len(pieces))]
        assert choice["logprobs"]["text_offset"] == starts
        (told,) = (await text.service.post(SCORE, {"texts": [" brown"], "state": "kept"}))[
            "results"
        ]
        nats = -told["total_logprob"]
        assert told["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(" brown"))


@pytest.mark.parametrize("name", GUIDED)
@pytest.mark.parametrize("prompt", ["", "The"])
async def test_a_grammar_keeps_its_first_space(name: str, prompt: str, tmp_path: Path) -> None:
    async with serving(tmp_path, name, eos=0) as text:
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
        for grammar, allowed in (
            ({"choice": [" yes", " no"]}, (" yes", " no")),
            ({"regex": " [a-b]{3}"}, None),
            ({"choice": ["yes", "no"]}, ("yes", "no")),
        ):
            asked = {**body, "structured_outputs": grammar}
            (choice,) = (await text.service.post(COMPLETIONS, asked))["choices"]
            if allowed is None:
                assert len(choice["text"]) == 4 and choice["text"][0] == " "
            else:
                assert choice["text"] in allowed
            frames = await text.service.stream(COMPLETIONS, asked)
            assert "".join(f["choices"][0]["text"] for f in frames) == choice["text"]


@pytest.mark.parametrize("name", SPACED)
async def test_without_a_grammar_a_text_begins_without_a_space(name: str, tmp_path: Path) -> None:
    """As the library decodes it."""
    async with serving(tmp_path, name) as text:
        names = text.library.get_vocab()
        word = next(name for name in names if name[:1] == "▁" and name[1:].isalpha())
        special = min(text.tokenizer.special_ids.values())
        body = {"prompt": [special], "max_tokens": 2, "temperature": 0}
        body["logit_bias"] = {str(names[word]): 100}
        (choice,) = (await text.service.post(COMPLETIONS, body))["choices"]
        assert choice["text"] == text.library.decode([special, names[word], names[word]])
        assert choice["text"] == f"{word[1:]} {word[1:]}"


@every_type
async def test_stop_strings_may_name_special_tokens(name: str, tmp_path: Path) -> None:
    """Which have no text; alone, and with text around them."""
    async with serving(tmp_path, name) as text:
        specials = [
            (special, id)
            for special, id in text.tokenizer.special_ids.items()
            if special not in ("<unk>", "[UNK]")
        ]
        for special, id in specials:
            before = 0 if name == "without_end" else (id - 1) % text.tokenizer.vocab_size
            # The model goes on with the next id: from `before` comes the special token.
            body = {"prompt": [before], "max_tokens": 5, "temperature": 0, "return_token_ids": True}
            (plain,) = (await text.service.post(COMPLETIONS, body))["choices"]
            assert plain["token_ids"][0] == id
            next_text = text.tokenizer.decoder([before]).feed(plain["token_ids"][1])
            for stop, left in ((special, ""), (special + next_text, ""), ("?" + special, None)):
                asked = {**body, "stop": ["never", stop], "return_state": True}
                (choice,) = (await text.service.post(COMPLETIONS, asked))["choices"]
                frames = await text.service.stream(COMPLETIONS, asked)
                assert "".join(f["choices"][0]["text"] for f in frames) == choice["text"]
                if left is None:
                    assert choice["finish_reason"] == "length"
                    assert choice["text"] == plain["text"]
                else:
                    assert (choice["finish_reason"], choice["text"]) == ("stop", left)
                    assert choice["state"]["tokens"] == 1  # as if it had not come


async def test_special_tokens_that_a_prompt_spells_out(tmp_path: Path) -> None:
    prompt = "<|im_start|>user\nThe fox<|im_end|>\n"
    async with serving(tmp_path, "byte_level") as text:
        start, end = text.id_of("<|im_start|>"), text.id_of("<|im_end|>")
        for path, field in ((COMPLETIONS, "prompt"), (GENERATE, "prompts")):
            body = {field: prompt if field == "prompt" else [prompt], "max_tokens": 1}
            await text.service.post(path, body)
            assert not {start, end} & set(text.last_read())
            await text.service.post(path, {**body, "parse_special": True})
            assert text.last_read() == text.library.encode(prompt).ids
            assert text.last_read()[0] == start and text.last_read().count(end) == 1
            await text.service.refused(path, {**body, "parse_special": 1}, "parse_special")


async def test_chat_messages_never_spell_special_tokens_out(tmp_path: Path) -> None:
    async with serving(tmp_path, "sentencepiece") as text:
        content = "see</s>there <s>ly"
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        await text.service.post("/v1/chat/completions", body)
        begin = text.id_of("<s>")
        rendered = f"[INST] {content} [/INST]"
        assert text.last_read() == [begin, *text.tokenizer.encode(rendered, marks=False)]


async def test_an_end_mark_stands_behind_whole_texts_alone(tmp_path: Path) -> None:
    async with serving(tmp_path, "with_bos_and_end") as text:
        begin, end = text.id_of("<s>"), text.id_of("</s>")
        await text.service.post(COMPLETIONS, {"prompt": "The fox", "max_tokens": 1})
        assert text.last_read()[0] == begin and end not in text.last_read()
        told = await text.service.post("/tokenize", {"prompt": "The fox"})
        assert (told["tokens"][0], told["tokens"][-1]) == (begin, end)
        told = await text.service.post(SCORE, {"texts": ["The fox"]})
        assert told["results"][0]["token_ids"][-1] == end
        told = await text.service.post(SCORE, {"texts": ["The fox"], "return_state": True})
        assert told["results"][0]["token_ids"][-1] != end


@every_type
async def test_an_empty_prompt(name: str, tmp_path: Path) -> None:
    """Stands for what the tokenizer puts before a text, or for the end-of-text token."""
    library = TYPES[name]()
    end = end_of(name, library)
    async with serving(tmp_path, name, eos=end) as text:
        expected = list(text.tokenizer.begin_ids) or ([end] if end is not None else None)
        if expected is None:
            await text.service.refused(COMPLETIONS, {"prompt": ""}, "prompt")
        else:
            await text.service.post(COMPLETIONS, {"prompt": "", "max_tokens": 1})
            assert text.last_read() == expected


async def test_bytes_of_a_scored_text_are_counted_with_their_space(tmp_path: Path) -> None:
    async with serving(tmp_path, "metaspace_first") as text:
        told = (await text.service.post(SCORE, {"texts": ["The quick"]}))["results"][0]
        first = len(text.tokenizer.decode(told["token_ids"][:1]))
        nats = -told["total_logprob"]
        assert told["bits_per_byte"] == pytest.approx(
            nats / 0.6931471805599453 / (len("The quick") - first)
        )


@every_type
@pytest.mark.parametrize("whole", ["The quick brown", " brown fox", "\u65e5, \ufb01sh ~ THE"])
async def test_bytes_of_a_scored_text_are_its_own(name: str, whole: str, tmp_path: Path) -> None:
    """Whatever a normalizer makes of them, and those that have no token; all but the first
    token's, and all behind a state."""
    async with serving(tmp_path, name) as text:

        async def size(**more: Any) -> float:
            told = (await text.service.post(SCORE, {"texts": [whole], **more}))["results"][0]
            return -told["total_logprob"] / math.log(2) / told["bits_per_byte"]

        ids = text.tokenizer.encode(whole)
        plain = text.tokenizer.decode(ids)
        expected = len(whole.encode())
        if not text.tokenizer.begin_ids:
            first = text.tokenizer.bytes_of(ids[0])
            added = plain.startswith(" ") or "\u2581" in str(text.library.id_to_token(ids[0]))
            known = text.library.id_to_token(ids[0]) not in ("<unk>", "[UNK]")
            if known:
                expected -= len(first) - (added and whole[0] != " ")
        assert await size() == pytest.approx(expected)
        await text.service.post("/v1/states", {"prompt": "The quick", "id": "kept"})
        assert await size(state="kept") == pytest.approx(len(whole.encode()))


@every_type
async def test_an_echo_behind_a_state_is_the_whole_prompt(name: str, tmp_path: Path) -> None:
    """Its first space too, which texts that begin would lose."""
    async with serving(tmp_path, name) as text:
        ids = list(text.tokenizer.encode(" brown", begins=False))
        begin = list(text.tokenizer.encode("The quick", marks=False))
        decode = text.tokenizer.decode
        expected = decode(begin + ids)[len(decode(begin)) :]
        assert expected == " brown"
        await text.service.post("/v1/states", {"prompt": "The quick", "id": "kept"})
        await text.service.post(COMPLETIONS, {"prompt": "The quick", "session_id": "talk"})
        body = {"max_tokens": 0, "echo": True}
        for more in (
            {"state": "kept", "prompt": " brown"},
            {"state": "kept", "prompt": ids},
            {"state": "kept", "prompt": " brown", "logprobs": 1},
            {"session_id": "talk", "prompt": ids},
            {"session_id": "talk", "prompt": " brown"},
        ):
            (choice,) = (await text.service.post(COMPLETIONS, {**body, **more}))["choices"]
            assert choice["text"] == expected, more
            frames = await text.service.stream(COMPLETIONS, {**body, **more})
            assert "".join(f["choices"][0]["text"] for f in frames) == expected, more
            if "logprobs" in more and len(ids) > 1:
                second = len(text.tokenizer.decoder(begin).feed(ids[0]))
                assert choice["logprobs"]["text_offset"][1] == second


async def test_offsets_behind_bytes_that_are_no_character(service: Service) -> None:
    body = {"prompt": [226, 97, 98], "echo": True, "logprobs": 0, "max_tokens": 0}
    (choice,) = (await service.post(COMPLETIONS, body))["choices"]
    assert choice["text"] == "\ufffdab"
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    body = {"prompt": [97], "logprobs": 0, "max_tokens": 3, "temperature": 0}
    body["logit_bias"] = {"226": 100}
    (choice,) = (await service.post(COMPLETIONS, body))["choices"]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("\ufffd" * 3, [0, 1, 2])
    frames = await service.stream(COMPLETIONS, body)
    offsets = [f["choices"][0]["logprobs"]["text_offset"] for f in frames]
    assert [offset for some in offsets for offset in some] == [0, 1, 2]


async def test_names_of_the_most_tokens(service: Service) -> None:
    for path in (COMPLETIONS, "/v1/chat/completions"):
        body: dict[str, Any] = {"max_tokens": 3, "max_completion_tokens": 4}
        body |= (
            {"prompt": "abc"}
            if path == COMPLETIONS
            else {"messages": [{"role": "user", "content": "a"}]}
        )
        await service.refused(path, body, "max_tokens")
    body = {"prompt": "abc", "max_completion_tokens": 2, "temperature": 0}
    assert (await service.post(COMPLETIONS, body))["choices"][0]["text"] == "de"
    body["max_tokens"] = 2
    assert (await service.post(COMPLETIONS, body))["choices"][0]["text"] == "de"
