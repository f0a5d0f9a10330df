"""Numbered turns of many sessions through the proxy, under faults, and what is left of them."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from loadtest.replicas.cluster import CONTROLLER, ENGINE, REPLICA, Cluster, pids
from loadtest.replicas.nodes import NodeCluster
from loadtest.with_httpx import httpx

TOKENS = 4  # of an answer
TEXTS = 20  # different sessions; more of them have the same texts under other names
ANSWER_SECONDS = 15.0  # a client gives an answer up after so long, and asks again
GIVE_UP_SECONDS = 300.0
HELD_SECONDS = 30.0  # how long a stopped replica is stopped, unless Ray replaces it before
FAULTS = ("replica", "engine", "controller", "hang", "scale")
NODE_FAULTS = ("node", "head")  # of a cluster of several nodes


@dataclass
class Seen:
    """What the clients have seen, all together."""

    turns: int = 0
    done_before: int = 0  # turns whose answer was lost
    retries: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0  # seconds from a turn's first request until it was carried out
    lock: threading.Lock = field(default_factory=threading.Lock)


def prompt_of(session: int, turn: int) -> str:
    """Return what the client says; sessions with the same text say the same."""
    return f"{session % TEXTS}.{turn}: "


def texts_of(url: str, turns: int) -> list[list[str]]:
    """Return the answers of each text's turns at one server, by text."""
    with httpx.Client(base_url=url, timeout=60) as client:
        return [
            [_ask(client, f"witness-{text}", text, turn)["text"] for turn in range(1, turns + 1)]
            for text in range(TEXTS)
        ]


def _ask(client: httpx.Client, name: str, session: int, turn: int) -> dict[str, Any]:
    answer = client.post(
        "/v1/completions",
        headers={"x-session-id": name},
        json={
            "prompt": prompt_of(session, turn), "session_id": name, "turn": turn,
            "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
        },
    )  # fmt: skip
    if answer.status_code != 200:
        try:
            code = answer.json()["error"]["code"]
        except (ValueError, KeyError, TypeError):
            code = "no answer of minserve's"
        raise Refused(f"{answer.status_code} {code}")
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


class Refused(Exception):
    """An answer that is an error: its status and code."""


def carry_out(
    url: str, sessions: list[int], turns: int, expected: list[list[str]], seen: Seen
) -> None:
    """Carry out all turns of some sessions, one user's work; then check what is left of them."""
    with httpx.Client(base_url=url, timeout=ANSWER_SECONDS) as client:
        for turn in range(1, turns + 1):
            for session in sessions:
                _carry_out_one(client, session, turn, expected[session % TEXTS][turn - 1], seen)
        for session in sessions:
            _check(client, session, turns, seen)


def _carry_out_one(client: httpx.Client, session: int, turn: int, right: str, seen: Seen) -> None:
    began, name = time.monotonic(), f"session-{session}"
    while True:
        why, text = "", None
        try:
            text = _ask(client, name, session, turn)["text"]
        except Refused as refused:
            why = str(refused)
        except httpx.TransportError as error:
            why = type(error).__name__
        with seen.lock:
            if text is not None or why == "409 turn_done":
                seen.turns += 1
                seen.done_before += text is None
                seen.slowest = max(seen.slowest, time.monotonic() - began)
                if text not in (None, right):
                    seen.wrong.append(f"{name} turn {turn}: {text!r} in place of {right!r}")
                return
            seen.retries[why] += 1
            if time.monotonic() - began > GIVE_UP_SECONDS:
                seen.wrong.append(f"{name} turn {turn} was never carried out: {why}")
                return
        time.sleep(0.2)


def _check(client: httpx.Client, session: int, turns: int, seen: Seen) -> None:
    tokens = sum(len(prompt_of(session, turn)) + TOKENS for turn in range(1, turns + 1))
    for _ in range(100):
        try:
            state = client.get(f"/v1/states/session:session-{session}").json()
        except (httpx.TransportError, ValueError):
            time.sleep(0.5)
            continue
        if "turns" in state:
            if (state["turns"], state["tokens"]) != (turns, tokens):
                with seen.lock:
                    seen.wrong.append(f"session-{session} has {state}, not {turns} turns")
            return
        time.sleep(0.5)
    with seen.lock:
        seen.wrong.append(f"session-{session} cannot be read")


class Trouble(threading.Thread):
    """Faults, one after the other, each until its replica serves again."""

    def __init__(
        self, cluster: Cluster | NodeCluster, faults: list[str], pause: float, seed: int
    ) -> None:
        super().__init__(daemon=True)
        self.seconds: dict[str, list[float]] = {name: [] for name in faults}
        self._cluster = cluster
        self._pause = pause
        self._draw = random.Random(seed)
        self._replicas = 2
        self._over = threading.Event()
        self._do: dict[str, Callable[[], None]] = {
            "replica": lambda: self._kill(REPLICA),
            "engine": lambda: self._kill(ENGINE),
            "controller": lambda: self._kill(CONTROLLER),
            "hang": self._hang,
            "scale": self._scale,
            "node": self._lose_node,
            "head": self._lose_head,
        }

    def run(self) -> None:
        while not self._over.wait(self._pause):
            name = self._draw.choice(list(self.seconds))
            began = time.monotonic()
            self._do[name]()
            self.seconds[name].append(time.monotonic() - began)

    def end(self) -> None:
        """Return when the last fault is over."""
        self._over.set()
        self.join()

    def _kill(self, what: str) -> None:
        before = pids(what)
        if before:
            victim = self._draw.choice(before)
            os.kill(victim, signal.SIGKILL)
            self._wait(what, victim, len(before))

    def _hang(self) -> None:
        before = pids(REPLICA)
        if not before:
            return
        victim = self._draw.choice(before)
        os.kill(victim, signal.SIGSTOP)
        try:
            self._wait(REPLICA, victim, len(before), HELD_SECONDS)
        finally:
            if victim in pids(REPLICA):
                os.kill(victim, signal.SIGCONT)

    def _scale(self) -> None:
        self._replicas = 3 if self._replicas == 2 else 2
        self._cluster.scale(self._replicas)

    def _lose_node(self) -> None:
        """End a node with its replica, and start another one, which Ray gives a replica."""
        assert isinstance(self._cluster, NodeCluster)
        nodes, before = self._cluster.nodes, pids(REPLICA)
        nodes.workers.pop(self._draw.randrange(len(nodes.workers))).kill()
        lost = [pid for pid in before if pid not in pids(REPLICA)]
        nodes.add()
        for pid in lost:
            self._wait(REPLICA, pid, len(before))

    def _lose_head(self) -> None:
        """End the head and start it again, until the cluster answers."""
        assert isinstance(self._cluster, NodeCluster)
        self._cluster.nodes.kill_head()
        self._cluster.nodes.start_head()
        until = time.monotonic() + GIVE_UP_SECONDS
        while time.monotonic() < until and not self._over.is_set():
            try:
                if httpx.get(f"{self._cluster.url}/ready", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)

    def _wait(self, what: str, victim: int, count: int, most: float = GIVE_UP_SECONDS) -> None:
        """Return when as many processes as before are there without the victim."""
        until = time.monotonic() + most
        while time.monotonic() < until and not self._over.is_set():
            there = pids(what)
            if victim not in there and len(there) >= count:
                return
            time.sleep(0.2)
