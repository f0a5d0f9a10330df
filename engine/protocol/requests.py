"""Messages from API processes to the engine: requests, aborts, pings and shutdown.

Plain data, encoded by msgspec. Types with many instances are not tracked by the garbage collector
(`gc=False`), which is safe because they contain no cycles.

Every `Request` ends in exactly one `Finished` or `Failed` (events.py). Every `StateCall` gets one
`StateReply` (state_calls.py).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.protocol.sampling_params import SamplingParams
from engine.protocol.state_calls import StateCall
from engine.protocol.token_ids import ID_BYTES

FinishReason = Literal["stop", "length", "abort", "timeout"]
LEAST_PRIORITY, MOST_PRIORITY = -100, 100  # the most urgent priority, the least urgent one


class KeepState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Asks the engine to keep a request's state when it ends, exactly after the last kept token.

    The kept tokens are the prompt and the delivered part of the answer, less what an `Abort` cuts
    off. A request that fails, or whose client has left (finish_reason "abort"), keeps nothing, and
    a state that was kept under the id before stays unchanged.
    """

    id: str = ""  # the id to keep it under, replacing a state there; "": a new id
    # seconds after its last use until it expires; None: the engine's default
    ttl: float | None = None
    export: bool = False  # return the state as a file, in Finished.snapshot
    store: bool = True  # False: only export the state, do not keep it
    must_last: bool = False  # fail with StateNotStored if it cannot be written to the state folder
    brief: bool = False  # keep it in memory without waiting for the state folder; it need not last

    @property
    def lasts(self) -> bool:
        """Whether it is to be stored where states last."""
        return self.store and not self.brief


class Request(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, gc=False):
    """One prompt and what to do with it; `id` is unique within its client.

    With `sampling.max_tokens == 0` nothing is generated: the request only scores its prompt, or
    reads it into the state that is to be kept.
    """

    id: int
    prompt: bytes  # packed by pack_ids; at least one token, unless it continues from a state
    sampling: SamplingParams = SamplingParams()
    stream: bool = True  # False: tokens are collected in the engine and sent with Finished
    score: bool = False  # report log-probabilities of prompt tokens
    score_from: int = 1  # index of the first prompt token to score, >= 1
    score_top: int = 0  # report this many top tokens at each scored position
    # Id of the kept state from which the prompt continues; "": start a new text.
    state: str = ""
    state_optional: bool = False  # if there is no such state, start a new text instead of failing
    keep: KeepState | None = None
    # The number of this turn, from 1 on, in the text that the prompt continues; the request fails
    # if that text has not had exactly the turns before it. 0: not checked.
    turn: int = 0
    # Prompt lengths after which to cache a state. Some are always cached: at the end of the prompt,
    # at the end of the answer, and where the prompt diverges from what was read before.
    cache_points: tuple[int, ...] = ()
    no_cache: bool = False  # read nothing from the prefix cache, and leave nothing in it
    cache_salt: str = ""  # cached states are shared only among requests of the same owner and salt
    # The tenant. States are visible only to their owner, and owners get equal shares of the queue.
    owner: str = ""
    # Requests with the same text here go to the same engine where possible; "": no preference.
    placement: str = ""
    priority: int = 0  # LEAST_PRIORITY to MOST_PRIORITY; lower numbers get a slot first
    timeout: float | None = None  # seconds from arrival; then it ends with finish_reason "timeout"
    run_on: int = 0  # part of max_tokens that should not be needed, and is not charged in advance

    @property
    def prompt_tokens(self) -> int:
        """The number of token ids in the prompt."""
        return len(self.prompt) // ID_BYTES


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Ends requests early; ids that have ended or are unknown are ignored.

    `reason` becomes their finish_reason: "abort" for a client that left, "stop" for a stop string.
    """

    ids: list[int]
    reason: FinishReason = "abort"
    # For requests with `keep`, parallel to `ids`: how many of the answer's tokens to include in the
    # kept state. Empty: all that were delivered.
    kept: list[int] = []


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Asks for a `Pong` with the same nonce, to show that the engine's loop is running."""

    nonce: int
    quiet: bool = False  # the sender does not want the load reports


class Gone(msgspec.Struct, frozen=True, tag=True):
    """A client has left: its requests are aborted, and no more messages are sent to it."""

    client: str | None = None  # name of the client if it is not the sender; names are not reused


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Ends the engine; requests in flight end as aborted."""


ToEngine = Request | Abort | StateCall | Ping | Gone | Shutdown
