"""Records of single requests, and the parsers of answers that fill them in."""

from __future__ import annotations

import time
from array import array

import msgspec


class Record(msgspec.Struct, array_like=True):
    """One request as its client saw it. Times are seconds from the start of the run."""

    due: float  # when it was scheduled; latencies count from here
    sent: float
    end: float = 0.0
    first: float | None = None  # arrival of the first token of a stream
    outcome: str = "ok"
    prompts: int = 1
    tokens: int = 0  # generated, or scored
    gaps: bytes = b""  # packed doubles: seconds between the events of one prompt's answer
    per_token: bytes = b""  # packed doubles: mean seconds per token after the first, by prompt
    message: str = ""  # the server's error message
    prompt_bytes: int = 0  # of text prompts, in UTF-8
    prompt_tokens: int = 0  # by the server's count
    cached_tokens: int = 0  # of these, not computed again: the prefix cache had their state

    @property
    def ok(self) -> bool:
        """Whether the request was answered without an error."""
        return self.outcome == "ok"

    @property
    def ttft(self) -> float | None:
        """Time to first token in seconds; None for answers that are not streamed."""
        return None if self.first is None else self.first - self.due

    @property
    def e2e(self) -> float:
        """End-to-end latency in seconds."""
        return self.end - self.due


def unpack(packed: bytes) -> array[float]:
    """Return the values of packed doubles."""
    values = array("d")
    values.frombytes(packed)
    return values


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    token_ids: list[int] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None

    @property
    def cached(self) -> int:
        details = self.prompt_tokens_details
        return (details.cached_tokens or 0) if details else 0


class _Frame(msgspec.Struct):
    """The fields of an event that hold tokens, of /v1/generate and of OpenAI's endpoints."""

    index: int = 0
    token_ids: list[int] | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


class _ErrorDetail(msgspec.Struct):
    code: str | None = None
    type: str | None = None
    message: str = ""


class _Error(msgspec.Struct):
    error: _ErrorDetail


_decode_frame = msgspec.json.Decoder(_Frame).decode
_decode_error = msgspec.json.Decoder(_Error).decode


class StreamedResponse:
    """Parses server-sent events and records when each prompt's tokens arrived.

    Tokens get the time at which `take` is called, so a late client measures late times; the run
    therefore measures the client's lateness, too.
    """

    def __init__(self, start: float) -> None:
        """`start`: the time.monotonic at which the run began."""
        self._start = start
        self._open = b""  # the beginning of an event that is not complete
        self._began: dict[int, float] = {}  # by prompt
        self._latest: dict[int, float] = {}
        self._tokens: dict[int, int] = {}
        self._total: int | None = None  # tokens by the server's count; some may have no text
        self._usage: dict[int, _Usage] = {}  # by prompt; OpenAI's is of all prompts
        self._gaps = array("d")
        self._done = False
        self._failed = False
        self._garbled = False

    def take(self, data: bytes) -> None:
        """Take a part of the body that arrived now."""
        now = time.monotonic() - self._start
        *events, self._open = (self._open + data).split(b"\n\n")
        for event in events:
            if event == b"data: [DONE]":
                self._done = True
            elif event.startswith(b"data: "):
                try:
                    self._frame(_decode_frame(event[6:]), now)
                except msgspec.MsgspecError:
                    self._garbled = True

    def _frame(self, frame: _Frame, now: float) -> None:
        if frame.error is not None:
            self._failed = True
        if frame.usage is not None and not frame.choices:
            self._usage[frame.index] = frame.usage
            if frame.token_ids is None:
                self._total = frame.usage.completion_tokens  # OpenAI's last event
        if frame.token_ids:
            self._note(frame.index, len(frame.token_ids), now)
        for choice in frame.choices:
            if choice.token_ids is not None or choice.text:
                self._note(choice.index, len(choice.token_ids or [0]), now)

    def _note(self, index: int, tokens: int, now: float) -> None:
        if index in self._latest:
            self._gaps.append(now - self._latest[index])
        else:
            self._began[index] = now
        self._latest[index] = now
        self._tokens[index] = self._tokens.get(index, 0) + tokens

    def close(self, record: Record) -> None:
        """Fill in the record; its outcome only if it is "ok" so far."""
        record.first = min(self._began.values(), default=None)
        record.tokens = sum(self._tokens.values()) if self._total is None else self._total
        record.prompt_tokens = sum(usage.prompt_tokens for usage in self._usage.values())
        record.cached_tokens = sum(usage.cached for usage in self._usage.values())
        record.gaps = self._gaps.tobytes()
        record.per_token = array(
            "d",
            [
                (self._latest[index] - began) / (self._tokens[index] - 1)
                for index, began in self._began.items()
                if self._tokens[index] > 1
            ],
        ).tobytes()
        if record.ok and self._garbled:
            record.outcome = "answer not understood"
        elif record.ok and self._failed:
            record.outcome = "error in the stream"
        elif record.ok and not self._done:
            record.outcome = "stream cut short"


class WholeResponse:
    """Parses an answer that is not streamed and counts its tokens."""

    def __init__(self) -> None:
        self._body = bytearray()  # a score has some 40 bytes per token of its text

    def take(self, data: bytes) -> None:
        """Take a part of the body."""
        self._body += data

    def close(self, record: Record) -> None:
        """Fill in the record; its outcome only if it is "ok" so far."""
        if not record.ok:
            return
        try:
            answer = msgspec.json.decode(self._body)
            if "usage" in answer:
                usage = msgspec.convert(answer["usage"], _Usage)
                record.tokens = usage.completion_tokens
                record.prompt_tokens, record.cached_tokens = usage.prompt_tokens, usage.cached
            for result in answer.get("results", []):
                if "error" in result:
                    record.outcome = "error in a result"
                record.tokens += result.get("num_scored_tokens", 0)
        except (msgspec.MsgspecError, TypeError, LookupError, AttributeError):
            record.outcome = "answer not understood"

    def error(self, status: int) -> tuple[str, str]:
        """Return the outcome of an error, such as `429 queue_full`, and its message."""
        try:
            detail = _decode_error(self._body).error
        except msgspec.MsgspecError:
            return str(status), ""
        return f"{status} {detail.code or detail.type or ''}".strip(), detail.message
