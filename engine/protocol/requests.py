"""What API processes send to the engine: requests, aborts and notices.

Plain data, encoded by msgspec. What there is much of is not tracked by the garbage collector
(`gc=False`), which is safe because plain data has no cycles.

Every `Request` ends in exactly one `Finished` or `Failed` (events.py), and every `StateCall` has
one `StateReply` (state_calls.py).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.protocol.sampling_params import SamplingParams
from engine.protocol.state_calls import StateCall
from engine.protocol.token_ids import ID_BYTES

FinishReason = Literal["stop", "length", "abort", "timeout"]
LEAST_PRIORITY, MOST_PRIORITY = -100, 100  # the most and the least urgent


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
