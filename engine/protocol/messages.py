"""What crosses the process boundary: requests in, events out; plain data, encoded by msgspec. The
garbage collector passes over what there is much of (`gc=False`), for plain data has no cycles.

Towards the engine: `Request`, `Abort`, `StateCall`, `Ping`, `Gone`, `Shutdown`. From the engine:
`Ready` or `LoadFailed` once, `Pong`, `StateReply`, and one `StepEvents` per round and API process.

Every request that is submitted ends in exactly one `Finished` or `Failed`, and every `StateCall`
has one `StateReply`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from engine.protocol.logprobs import PackedLogprobs, TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "timeout"]

ID_BYTES = 4  # of one packed token id
LEAST_PRIORITY, MOST_PRIORITY = -100, 100  # the most and the least urgent


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as native-endian int32 bytes: ID_BYTES a token, whatever the id.

    Raises OverflowError for an id that int32 cannot hold; check the range first.
    """
    # array() would take bytes for packed items, not for an iterable of integers.
    return array("i", list(ids) if isinstance(ids, bytes | bytearray) else ids).tobytes()


def unpack_ids(packed: bytes) -> array[int]:
    """The token ids that `pack_ids` packed."""
    ids = array("i")
    ids.frombytes(packed)
    return ids


GrammarKind = Literal["json", "regex", "choice", "grammar"]
StateAction = Literal["get", "fork", "move", "delete", "list", "export", "import"]  # see StateCall


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What the whole text of an answer has to match: a JSON schema, a regular expression, one of
    several texts (a JSON list of strings), or a grammar in Lark's or llama.cpp's notation."""

    kind: GrammarKind
    text: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """How the tokens of one request are drawn.

    Applied in this order: grammar, penalties, logit_bias, min_tokens, temperature, top_k, top_p,
    min_p. A draw depends on (seed, choice, position) and the logits alone; `position` counts
    generated tokens from 0.

    With a `grammar` the tokens that end an answer are possible where the text matches, and only
    there (those of stop_token_ids that are text also as text). Where nothing can follow, the
    answer ends by itself, with "stop", whatever min_tokens and ignore_eos say.
    """

    max_tokens: int = 16
    min_tokens: int = 0  # end-of-text and stop_token_ids are impossible before this many tokens
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off; the best token always stays: 0 = greedy
    min_p: float = 0.0  # 0 = off
    repetition_penalty: float = 1.0  # over the prompt's and the answer's tokens; 1 = off
    presence_penalty: float = 0.0  # over the answer's tokens
    frequency_penalty: float = 0.0  # over the answer's tokens
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0  # in [0, 2**63)
    choice: int = 0  # which of n samples of one prompt this is
    logprobs: int | None = None  # None = none; k >= 0 = the token's own and the k best
    grammar: Grammar | None = None


class KeepState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """That a request's state is to be kept when it ends: exactly after the last kept token.

    Those are the prompt and the answer's delivered tokens, less what an `Abort` says is cut off. A
    request that fails, or whose client has left (finish_reason "abort"), keeps nothing: what was
    kept under the id before stays as it was.
    """

    id: str = ""  # under which it is kept, in place of what was there; "": a new id of the engine's
    ttl: float | None = None  # seconds after its last use; None: the engine's own
    export: bool = False  # Finished.snapshot holds it as a file
    store: bool = True  # False: it is not kept by the engine, only exported
    must_last: bool = False  # it fails (StateNotStored) where there is a folder and no file of it
    brief: bool = False  # it need not last: the folder is not waited for, and memory will do


class Request(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, gc=False):
    """One prompt and what to do with it. `id` is unique within its client.

    With `sampling.max_tokens == 0` nothing is generated: the request only scores its prompt, or
    reads it into the state that is to be kept.
    """

    id: int
    prompt: bytes  # pack_ids; at least one token, unless it goes on from a state
    sampling: SamplingParams = SamplingParams()
    stream: bool = True  # False: tokens are gathered in the engine and come with Finished
    score: bool = False  # report log-probabilities of prompt tokens
    score_from: int = 1  # index of the first prompt token to score, >= 1
    score_top: int = 0  # the k best at each scored position
    # Of a kept state, after which the prompt is read; "": at the beginning of a text.
    state: str = ""
    state_optional: bool = False  # where there is no such state, it begins a text
    keep: KeepState | None = None
    # Prompt lengths at which a state is cached beside those that always are (at the prompt's end,
    # the answer's end and where the prompt leaves what was read before).
    cache_points: tuple[int, ...] = ()
    cache_salt: str = ""  # cached states serve requests of the same owner and salt
    # Whose request it is: states serve requests of the same owner alone, and owners have equal
    # parts in the queue.
    owner: str = ""
    priority: int = 0  # from LEAST_PRIORITY to MOST_PRIORITY; a lower one has a slot earlier
    timeout: float | None = None  # seconds from arrival; then finish_reason "timeout"
    run_on: int = 0  # of max_tokens: those that are not meant to be drawn, and not charged ahead

    @property
    def prompt_tokens(self) -> int:
        """How many token ids the prompt packs."""
        return len(self.prompt) // ID_BYTES


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Ends requests early; those already ended or unknown are ignored.

    `reason` becomes their finish_reason: "abort" for a client that left, "stop" for a stop string.
    """

    ids: list[int]
    reason: FinishReason = "abort"
    # For requests with `keep`, in parallel to `ids`: how many of the answer's tokens stand in the
    # text that is kept. Empty: all that were delivered.
    kept: list[int] = []


class StateCall(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Asks something of the kept states of `owner`; `StateReply` of the same `call` answers.

    get: the state `id`, which counts as a use of it. fork: the same state under another id,
    `target` ("": a new one). move: likewise, but then `id` is forgotten, and its place in the quota
    is the other's. delete: forgets `id`. list: up to `limit` states in order of their
    ids, from the first after `id` on. export: `id` as a file. import: the file `content` under the
    id `target` ("": a new one).

    Where there is a folder of states, what fork, move and import keep is there before they are
    answered, or they fail (StateNotStored) and nothing has changed; where the error says so (a disk
    that hangs, or a folder that cannot be synced) it is kept, or may be yet. What delete could not
    remove is there still.
    """

    call: int
    action: StateAction
    owner: str = ""
    id: str = ""
    target: str = ""
    content: bytes = b""
    limit: int = 100
    ttl: float | None = None  # of what fork, move and import keep; None: the engine's own
    brief: bool = False  # it need not last: the folder is not waited for, and memory will do


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Asks for a `Pong` with the same nonce: the engine's loop is turning."""

    nonce: int
    quiet: bool = False  # the sender has no use for the load, and is not told it


class Gone(msgspec.Struct, frozen=True, tag=True):
    """A client is no more: what it has in flight is aborted, and it is told nothing."""

    client: str | None = None  # the name of another one than the sender; names are not used again


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Ends the engine; what is in flight ends as aborted."""


ToEngine = Request | Abort | StateCall | Ping | Gone | Shutdown


Tier = Literal["device", "host", "disk"]


class StateInfo(msgspec.Struct, frozen=True, array_like=True):
    """One kept state. Times are seconds since the epoch."""

    id: str
    owner: str
    tokens: int  # that it stands after
    bytes: int  # of the state, wherever it lies
    tier: Tier
    fingerprint: str  # of the model that it belongs to
    created: float
    expires: float  # unless it is used before
    recent: list[int] = []  # the last tokens, up to four, whose text may end within a character
    busy: bool = False  # a request is under way that will take its place
    # It lies in the folder of states, where a restart finds it; None: there is no such folder.
    stored: bool | None = None


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


class Failed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The one terminal event of a request that was not served; `errors.from_failed` reads it."""

    request: int
    code: str
    message: str
    param: str | None = None
    retry_after: float | None = None


class StateReply(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The one answer to an `StateCall`; where `failed` is set, nothing was done (its `request` is
    the call)."""

    call: int
    failed: Failed | None = None
    states: list[StateInfo] = []  # one, but for delete (none) and list
    content: bytes = b""  # of export
    more: bool = False  # of list: there are states after these


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
