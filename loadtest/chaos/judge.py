"""Judges how one request ended, by what its client sees."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Verdict = Literal[
    "answered",  # whole, or a stream to its [DONE]
    "refused",  # 4xx or 5xx with an error that says why
    "failed",  # a stream whose one error event ended it
    "no server",  # nothing took the connection
    "BROKEN",  # cut off, torn, or an answer that is none
    "HUNG",  # no end in time
]
# What no fault may bring about.
WRONG: tuple[Verdict, ...] = ("BROKEN", "HUNG")


class Ending:
    """Collects the body of one answer and judges it when it has ended."""

    def __init__(self, stream: bool, prompts: int = 1) -> None:
        self._stream = stream
        self._prompts = prompts
        self._body = b""

    def take(self, data: bytes) -> None:
        self._body += data

    def judge(self, status: int) -> Verdict:
        """Return the verdict on an answer that has ended on the wire."""
        try:
            if status != 200:
                return "refused" if _tells(msgspec.json.decode(self._body)) else "BROKEN"
            return self._events() if self._stream else self._plain()
        except (msgspec.MsgspecError, LookupError, TypeError, AttributeError):
            return "BROKEN"

    def _plain(self) -> Verdict:
        results = msgspec.json.decode(self._body)["results"]
        return "answered" if len(results) == self._prompts else "BROKEN"

    def _events(self) -> Verdict:
        """Return the verdict on a stream.

        Every prompt must end once; [DONE], or one error for all prompts, must come last and once.
        """
        *events, rest = self._body.split(b"\n\n")
        if rest or not events or not all(event.startswith(b"data: ") for event in events):
            return "BROKEN"
        contents = [event[6:] for event in events]
        done = contents[-1] == b"[DONE]"
        frames: list[Any] = [msgspec.json.decode(one) for one in contents[: -1 if done else None]]
        ended: set[int] = set()
        for place, frame in enumerate(frames):
            if "error" in frame and "index" not in frame:
                return "failed" if place == len(frames) - 1 and not done else "BROKEN"
            if frame["index"] in ended:
                return "BROKEN"
            if frame.get("finish_reason") or "error" in frame:
                ended.add(frame["index"])
        return "answered" if done and len(ended) == self._prompts else "BROKEN"


def _tells(body: Any) -> bool:
    return isinstance(body["error"]["message"], str)
