"""What the engine sends to API processes: the events of its steps, and what it says of itself.

Plain data, encoded by msgspec, as in requests.py. An API process is told `Ready` or `LoadFailed`
once, a `Pong` for each `Ping`, a `StateReply` for each `StateCall`, and one `StepEvents` for each
round in which it has a part.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from engine.protocol.failed import Failed
from engine.protocol.logprobs import PackedLogprobs, TokenLogprobs
from engine.protocol.requests import FinishReason
from engine.protocol.state_calls import StateInfo, StateReply
from engine.protocol.token_ids import unpack_ids


class Scores(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of a run of prompt tokens; runs arrive in order and without gaps."""

    request: int
    start: int  # index in the prompt of the first token of this run
    reports: PackedLogprobs


class Timing(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a request's time in the engine went, in seconds; None for what it did not come to."""

    queue: float = 0.0  # from arrival until its first step, or until it ended without one
    prefill: float | None = None  # from its first step until its prompt was read
    decode: float | None = None  # from its first token until its last


class Finished(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The one terminal event of a request that was served (also in part)."""

    request: int
    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int  # how many of them were not read again
    completion_tokens: int
    timing: Timing = Timing()
    answer: bytes = b""  # its tokens, packed (pack_ids), when the request was not streamed
    reports: PackedLogprobs | None = None  # likewise, where asked for
    state: StateInfo | None = None  # as it was kept
    snapshot: bytes = b""  # as a file, where asked for

    @property
    def tokens(self) -> list[int]:
        """The answer's, when the request was not streamed."""
        return unpack_ids(self.answer).tolist()

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Of these tokens, where asked for."""
        return [] if self.reports is None else self.reports.unpack()


class Run(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The next `length` tokens of each of `requests`, which several decode steps brought at once,
    or one of them with its log-probabilities.

    `tokens` holds them packed (`pack_ids`), one request's after the other's; so does `reports`,
    where the requests asked for log-probabilities.
    """

    requests: list[int]
    length: int
    tokens: bytes
    reports: PackedLogprobs | None = None


class Stats(msgspec.Struct, frozen=True):
    """One round of the engine and its load after it; feeds the metrics."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0  # prompt tokens of the waiting requests
    pace: float = 0.0  # mean seconds from one request's leaving the queue to the next's; 0: unknown
    slots_used: int = 0
    slots_total: int = 0
    state_bytes: int = 0  # held in device memory by sequences, cached and kept states
    host_state_bytes: int = 0  # of cached and kept states in main memory
    disk_state_bytes: int = 0  # of kept states on disk
    states: int = 0  # kept under an id
    batch_size: int = 0  # sequences in the round
    prefill_tokens: int = 0  # prompt tokens read in the round
    decode_tokens: int = 0  # tokens generated in the round
    prefill_seconds: float = 0.0
    decode_steps: int = 0  # a round may take several, or none
    decode_seconds: float = 0.0  # of one of them
    prefix_queries_tokens: int = 0  # prompt tokens of the requests admitted in the round
    prefix_hits_tokens: int = 0  # those of them that a cached state already covered
    # Requests admitted in the round by what the cache had for them: hits, and misses by reason:
    # "new" (nothing of it was known), "unaligned" (known, but not at a place where bits would stay
    # the same), "unheld" (known, but nothing is held there), "short" (of one token, or all of it is
    # to be scored).
    prefix_hits: int = 0
    prefix_misses: dict[str, int] = {}
    evictions: dict[str, int] = {}  # states that left a tier in the round, by the tier
    store_errors: int = 0  # files of kept states that could not be written or removed meanwhile

    def load(self) -> Stats:
        """The load alone, for those who had no part in the round."""
        return Stats(
            running=self.running,
            waiting=self.waiting,
            waiting_tokens=self.waiting_tokens,
            pace=self.pace,
            slots_used=self.slots_used,
            slots_total=self.slots_total,
            state_bytes=self.state_bytes,
            host_state_bytes=self.host_state_bytes,
            disk_state_bytes=self.disk_state_bytes,
            states=self.states,
        )


class StepEvents(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """All that one round has to say to one API process. `requests`, `tokens` run in parallel: of
    those who asked for no log-probabilities. A request's tokens in `runs` come after those in
    `tokens`."""

    requests: list[int] = []
    tokens: list[int] = []
    runs: list[Run] = []
    started: list[int] = []  # requests that have left the queue for a slot
    scores: list[Scores] = []
    finished: list[Finished] = []
    failed: list[Failed] = []
    stats: Stats = Stats()

    def in_runs(self) -> Iterator[tuple[int, list[int], list[TokenLogprobs]]]:
        """Every request of `runs` with its tokens and, where it asked for them, their
        log-probabilities, in order."""
        for run in self.runs:
            ids, length = unpack_ids(run.tokens).tolist(), run.length
            logprobs = [] if run.reports is None else run.reports.unpack()
            for index, request in enumerate(run.requests):
                mine = slice(index * length, (index + 1) * length)
                yield request, ids[mine], logprobs[mine]


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the API processes need to know of the loaded model."""

    name: str
    folder: str  # where tokenizer.json lies
    fingerprint: str  # of the weights and the config
    cell: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]  # each of them ends a text
    parameters: int
    state_bytes: int  # of one sequence: fp32, cell and conv
    slots: int
    device: str  # "cpu", "cuda:0"
    device_name: str
    dtype: str
    quantization: str | None = None  # of the matrices
    deterministic: bool = False  # a sequence's logits do not depend on its company
    cell_shape: tuple[int, int] = (0, 0)  # of a state: layers, inner
    conv_shape: tuple[int, int, int] | None = None  # layers, taps - 1, d_model; None without any

    @property
    def eos_token_id(self) -> int | None:
        """The first of those that end a text; None where there is none."""
        return self.eos_token_ids[0] if self.eos_token_ids else None


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded and warm."""

    info: ModelInfo


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be loaded; the worker ends. `code` and `message` as in `Failed`."""

    code: str
    message: str


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The answer to a `Ping`."""

    nonce: int


FromEngine = Ready | LoadFailed | StepEvents | Pong | StateReply
