"""Messages from the engine to API processes: events of its rounds, and load and model info.

Plain data, encoded by msgspec, as in requests.py. An API process gets one `Ready` or `LoadFailed`,
a `Pong` for each `Ping`, a `StateReply` for each `StateCall`, and one `StepEvents` for each round
that concerns its requests.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from engine.backend_info import BackendInfo
from engine.protocol.failed import Failed
from engine.protocol.logprobs import PackedLogprobs, TokenLogprobs
from engine.protocol.requests import FinishReason
from engine.protocol.state_calls import StateInfo, StateReply
from engine.protocol.token_ids import unpack_ids
from engine.state_spec import StateSpec


class Scores(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of consecutive prompt tokens; runs come in order, without gaps."""

    request: int
    start: int  # index in the prompt of this run's first token
    reports: PackedLogprobs


class Timing(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The time that a request spent in each stage of the engine, in seconds.

    None marks a stage that the request did not reach.
    """

    queue: float = 0.0  # from arrival to its first step, or to its end if it had none
    prefill: float | None = None  # from its first step until its whole prompt was read
    decode: float | None = None  # from its first token to its last


class Finished(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The terminal event of a request that was served, completely or in part."""

    request: int
    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int  # prompt tokens that a cached state covered
    completion_tokens: int
    timing: Timing = Timing()
    answer: bytes = b""  # packed tokens (pack_ids) of a request that was not streamed
    reports: PackedLogprobs | None = None  # log-probabilities of `answer`, if requested
    state: StateInfo | None = None  # the state that was kept, if one was
    snapshot: bytes = b""  # the kept state as a file, if requested

    @property
    def tokens(self) -> list[int]:
        """The generated token ids of a request that was not streamed."""
        return unpack_ids(self.answer).tolist()

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """The log-probabilities of `tokens`; empty if they were not requested."""
        return [] if self.reports is None else self.reports.unpack()


class Run(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`length` new tokens for each of `requests`, packed.

    Used when several decode steps finished at once, or when a request wants log-probabilities.
    `tokens` holds the ids packed (`pack_ids`), request by request. `reports` holds their
    log-probabilities in the same order, if the requests asked for them.
    """

    requests: list[int]
    length: int
    tokens: bytes
    reports: PackedLogprobs | None = None


class Stats(msgspec.Struct, frozen=True):
    """Counters of one round and the engine's load after it, from which metrics are made."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0  # prompt tokens of the waiting requests
    pace: float = 0.0  # mean seconds between two requests leaving the queue; 0: unknown
    slots_used: int = 0
    slots_total: int = 0
    state_bytes: int = 0  # device memory of running sequences, cached and kept states
    host_state_bytes: int = 0  # host memory of cached and kept states
    disk_state_bytes: int = 0  # disk space of kept states
    states: int = 0  # kept states (named by an id)
    batch_size: int = 0  # sequences in this round
    prefill_tokens: int = 0  # prompt tokens read in this round
    decode_tokens: int = 0  # tokens generated in this round
    prefill_seconds: float = 0.0
    decode_steps: int = 0  # decode steps in this round; may be 0 or several
    decode_seconds: float = 0.0  # mean duration of one decode step
    prefix_queries_tokens: int = 0  # prompt tokens of the requests admitted in this round
    prefix_hits_tokens: int = 0  # prompt tokens that a cached state covered
    # Requests admitted in this round: prefix cache hits, and misses by reason. "new": no prefix was
    # seen before. "unaligned": a prefix was seen, but not at a position from which results stay
    # bitwise equal. "unheld": a prefix was seen, but its state is not cached (any more). "short":
    # the prompt has one token, or all of it is to be scored.
    prefix_hits: int = 0
    prefix_misses: dict[str, int] = {}
    evictions: dict[str, int] = {}  # states evicted from each tier in this round
    store_errors: int = 0  # state files that could not be written or removed
    # With a store that servers share: seconds of each look-up of a name, by its result ("memory",
    # "store", "new", "refused", "unavailable"), and seconds until each state was stored.
    state_fetches: dict[str, list[float]] = {}
    state_writes: list[float] = []

    @property
    def state_usage(self) -> float:
        """The part of the state slots that running sequences hold, 0 to 1; 0 without slots."""
        return self.slots_used / self.slots_total if self.slots_total else 0.0

    def load(self) -> Stats:
        """Return a copy with the load only, for a process that had no part in the round."""
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
    """Everything that one round reports to one API process.

    `requests` and `tokens` are parallel: one token of each request that wants no log-probabilities.
    A request's tokens in `runs` come after its token in `tokens`.
    """

    requests: list[int] = []
    tokens: list[int] = []
    runs: list[Run] = []
    started: list[int] = []  # requests that were admitted: they left the queue for a slot
    scores: list[Scores] = []
    finished: list[Finished] = []
    failed: list[Failed] = []
    stats: Stats = Stats()

    def in_runs(self) -> Iterator[tuple[int, list[int], list[TokenLogprobs]]]:
        """Yield (request id, token ids, log-probabilities) of every request in `runs`, in order.

        The log-probabilities are empty for requests that did not ask for them.
        """
        for run in self.runs:
            ids, length = unpack_ids(run.tokens).tolist(), run.length
            logprobs = [] if run.reports is None else run.reports.unpack()
            for index, request in enumerate(run.requests):
                mine = slice(index * length, (index + 1) * length)
                yield request, ids[mine], logprobs[mine]


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about the loaded model that API processes need."""

    name: str
    folder: str  # contains tokenizer.json
    fingerprint: str  # hash of the weights and the config
    family: str  # family of models (engine/models)
    cell: str  # name of its recurrence
    vocab_size: int
    eos_token_ids: tuple[int, ...]  # each of them ends a text
    parameters: int
    d_model: int  # width of a hidden state
    state_bytes: int  # size of one sequence's state
    slots: int
    device: str  # e.g. "cpu" or "cuda:0"
    device_name: str
    dtype: str
    quantization: str | None = None  # format of the weight matrices; None: not quantised
    deterministic: bool = False  # logits of a sequence do not depend on the rest of its batch
    state: tuple[StateSpec, ...] = ()  # the tensors of one sequence's state
    backend: BackendInfo = BackendInfo("")  # what runs the model
    shared_states: bool = False  # kept states are in a store, where every engine finds them

    @property
    def eos_token_id(self) -> int | None:
        """The first end-of-text id; None if the model has none."""
        return self.eos_token_ids[0] if self.eos_token_ids else None


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded and warmed up."""

    info: ModelInfo


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be loaded, and the worker ends; `code` and `message` as in `Failed`."""

    code: str
    message: str


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The answer to the `Ping` with the same nonce."""

    nonce: int


FromEngine = Ready | LoadFailed | StepEvents | Pong | StateReply
