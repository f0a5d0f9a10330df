"""A careful client: it asks again, with the number of its turn, until the turn is carried out."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from loadtest.store.turns import Answer, Line, body_of
from service.terminal.bench.connection import BadResponse

KEYS = {"emma": "key-of-emma-0123456789", "otto": "key-of-otto-0123456789"}
OWNERS = list(KEYS)
PATIENCE = (4.0, 30.0)  # seconds until a client gives an answer up: the least and the most
PAUSE = (0.05, 0.5)  # seconds before it asks again
GIVEN_UP = 300.0  # seconds after which a turn counts as lost
AGAIN = {  # of a status, the codes after which a turn is asked for again
    409: {"state_busy", "state_conflict"},
    429: None,
    500: None,
    503: None,
    507: None,
}
_HAD = re.compile(r"the state has had (\d+) turns and has (\d+) tokens")


class Lost(Exception):
    """A turn was lost, doubled or another's: what no fault may bring about."""


@dataclass
class Seen:
    """What the clients have seen, all together."""

    turns: int = 0
    retries: Counter[str] = field(default_factory=Counter)  # by why
    done_before: int = 0  # turns of which the answer was lost: turn_done
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0  # seconds from a turn's first request until it was carried out
    last: float = 0.0  # when a turn was carried out last, by time.monotonic
    gap: float = 0.0  # the longest time in which none was
    moments: list[float] = field(default_factory=list)  # when each turn was carried out

    def carried_out(self, seconds: float) -> None:
        """Note a turn that is carried out, so long after it was asked for first."""
        now = time.monotonic()
        self.turns += 1
        self.slowest = max(self.slowest, seconds)
        self.gap = max(self.gap, now - self.last)
        self.last = now
        self.moments.append(now)

    def next_after(self, moment: float) -> float:
        """Return the seconds from a moment until a turn was carried out; 0 after the last one."""
        at = bisect_left(self.moments, moment)
        return self.moments[at] - moment if at < len(self.moments) else 0.0


def owner_of(session: int) -> str:
    """Return whose session this is. Each id is used by every owner, for another text."""
    return OWNERS[session % len(OWNERS)]


def id_of(session: int) -> str:
    return f"s{session // len(OWNERS)}"


async def ask_until_done(
    lines: dict[str, Line],
    servers: int,
    session: int,
    turn: int,
    right: Answer,
    draw: random.Random,
    seen: Seen,
) -> None:
    """Have a turn carried out, whatever happens. Raises Lost."""
    line, begun, asked = lines[owner_of(session)], time.monotonic(), 0
    where = f"session {session}, turn {turn}"
    request = json.loads(body_of(session, turn, id_of(session), numbered=True))
    while time.monotonic() - begun < GIVEN_UP:
        stream = draw.random() < 0.5
        content = json.dumps(request | {"stream": stream}).encode()
        at, patience = draw.randrange(servers), draw.uniform(*PATIENCE)
        asked += 1
        try:
            status, answer = await line.fetch(at, "/v1/completions", content, "POST", patience)
            failed = _refusal(status, answer) if status != 200 or not stream else None
            if status == 200:
                found = streamed(answer) if stream else Answer.of(json.loads(answer))
        except TimeoutError:
            why = "no answer in time"
        except (OSError, BadResponse) as error:
            why = f"connection lost: {type(error).__name__}"
        except StreamFailed as error:
            why = f"stream: {error}"
        else:
            if status == 200:
                if not found.equals(right):
                    raise Lost(f"{where}: {found}, not {right}")
                if found.stored:
                    break
                why = "not stored"
            else:
                assert failed is not None
                code, message = failed
                if code == "turn_done":
                    had = _HAD.search(message)
                    if asked == 1 or had is None or had.groups() != (str(turn), str(right.tokens)):
                        raise Lost(f"{where}, asked {asked} times: {message}, not {right.tokens}")
                    seen.done_before += 1
                    break
                allowed = AGAIN.get(status, set())
                if allowed is not None and code not in allowed:
                    raise Lost(f"{where}, asked {asked} times: {status} {code}: {message}")
                why = f"{status} {code}"
        seen.retries[why] += 1
        await asyncio.sleep(draw.uniform(*PAUSE))
    else:
        raise Lost(f"{where} was not carried out in {GIVEN_UP:.0f} s")
    seen.carried_out(time.monotonic() - begun)


class StreamFailed(Exception):
    """A stream has ended with an error, or without its end."""


def _refusal(status: int, content: bytes) -> tuple[str, str]:
    try:
        error = json.loads(content)["error"]
        return str(error["code"]), str(error["message"])
    except (ValueError, LookupError, TypeError):
        return f"status {status}", repr(content[:200])


def streamed(content: bytes) -> Answer:
    """Put the events of a stream together. Raises StreamFailed."""
    text, logprobs = "", list[float]()
    for event in content.split(b"\n\n"):
        data = event.removeprefix(b"data: ")
        if data == b"[DONE]" or not data:
            continue
        try:
            frame: Any = json.loads(data)
        except ValueError:
            raise StreamFailed("torn") from None
        if "error" in frame:
            raise StreamFailed(str(frame["error"]["code"]))
        (choice,) = frame["choices"]
        if "error" in choice:
            raise StreamFailed(str(choice["error"]["code"]))
        text += choice["text"]
        if choice["logprobs"] is not None:
            logprobs += choice["logprobs"]["token_logprobs"]
        state = choice.get("state")
        if choice.get("finish_reason") == "error":
            raise StreamFailed("error")
        if state is not None:
            return Answer(text, tuple(logprobs), state["tokens"], state.get("stored"))
    raise StreamFailed("without its end")
