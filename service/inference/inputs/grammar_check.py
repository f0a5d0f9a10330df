"""GrammarCheck: compiles the grammars of requests once in a sandbox before the engine gets them.

Compiling an untrusted grammar may take forever and cannot be interrupted. So it runs in a process
of its own (engine.structured_output.sandbox), which is killed when it has used up its processor
time or memory, and started again for the next grammar. Results are cached. Grammars are compiled
one at a time; API keys take turns.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from starlette.types import Receive, Scope

from engine.errors import EngineError
from engine.protocol.events import ModelInfo
from engine.protocol.sampling_params import Grammar
from engine.structured_output.sandbox import LENGTH_BYTES, frame
from engine.subprocesses import module_environment
from service.http.disconnect import unless_client_leaves
from service.http.scope import ARRIVED, INFERENCE

MEMORY = 128 * 2**20  # bytes that compiling one grammar may take, beyond the idle process
WALL_SECONDS = 60.0  # wall time, in case the machine gives the process no processor time
MOST_KNOWN = 4096  # cached results
MOST_KNOWN_BYTES = 16 * 2**20  # of their grammars

T = TypeVar("T")

# The id() of a loaded model's ModelInfo, and a grammar. Equal ModelInfos may have other tokenizers.
_Key = tuple[int, Grammar]


class FairLock:
    """A lock that owners take in rotation, however many tasks of one owner wait.

    For use on one event loop.
    """

    def __init__(self) -> None:
        self._taken = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the next owner is first

    @asynccontextmanager
    async def hold(self, owner: str) -> AsyncIterator[None]:
        """Wait for the lock and hold it as long as the context lasts."""
        await self._take(owner)
        try:
            yield
        finally:
            self._pass_on()

    async def _take(self, owner: str) -> None:
        if not self._taken:
            self._taken = True
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():  # this task has been given the lock already
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            owner = next(iter(self._waiting))
            line = self._waiting.pop(owner)
            granted = line.popleft()
            if line:
                self._waiting[owner] = line
            if not granted.done():  # else the task was cancelled
                granted.set_result(None)
                return
        self._taken = False


class GrammarCheck:
    """Compiles grammars in a sandbox process and caches whether they can be used."""

    def __init__(self, seconds: float, observe: Callable[[float], None]) -> None:
        """Prepare the check; the process starts with the first grammar.

        Args:
            seconds: Processor time allowed for one grammar.
            observe: Called with the seconds that each grammar took that was not cached.
        """
        self._seconds = seconds
        self._observe = observe
        self._process: Process | None = None
        self._serves: ModelInfo | None = None  # the model that the process was started for
        self._lock = FairLock()
        self._asked: dict[_Key, asyncio.Task[str | None]] = {}
        self._waiting: Counter[_Key] = Counter()  # callers that wait for each grammar
        # Each result keeps its ModelInfo alive, so that its id() is not used again.
        self._known: OrderedDict[_Key, tuple[str | None, ModelInfo]] = OrderedDict()
        self._known_bytes = 0

    async def check(self, grammar: Grammar, info: ModelInfo, owner: str = "") -> str | None:
        """Return what is wrong with a grammar for this model, or None if it can be used.

        `owner`: the API key's name; owners take turns. Raises EngineError if the check fails. A
        grammar is not compiled if nobody waits for it any more when its turn comes.
        """
        key = (id(info), grammar)
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key][0]
        task = self._asked.get(key)
        if task is None:
            task = self._asked[key] = asyncio.create_task(self._find_out(key, info, owner))
            task.add_done_callback(_look_away)
        self._waiting[key] += 1
        try:
            return await asyncio.shield(task)  # others may wait for it too
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]

    async def close(self) -> None:
        """End the process; checks in progress fail."""
        for task in list(self._asked.values()):
            task.cancel()
            with suppress(asyncio.CancelledError, EngineError):
                await task
        await self._end()

    def knows(self, grammar: Grammar, info: ModelInfo) -> bool:
        """Whether the result for a grammar is cached."""
        return (id(info), grammar) in self._known

    async def _find_out(self, key: _Key, info: ModelInfo, owner: str) -> str | None:
        try:
            async with self._lock.hold(owner):
                if not self._waiting[key]:
                    raise EngineError("nobody waits for this grammar any more")
                began = time.perf_counter()
                verdict = await self._ask(key[1], info)
                self._observe(time.perf_counter() - began)
        finally:  # at once, so that new callers do not get the result of a failed check
            del self._asked[key]
        self._known[key] = verdict, info
        self._known_bytes += len(key[1].text)
        while len(self._known) > MOST_KNOWN or self._known_bytes > MOST_KNOWN_BYTES:
            (_, oldest), _ = self._known.popitem(last=False)
            self._known_bytes -= len(oldest.text)
        return verdict

    async def _ask(self, grammar: Grammar, info: ModelInfo) -> str | None:
        process = await self._start(info)
        assert process.stdin is not None and process.stdout is not None
        try:
            async with asyncio.timeout(WALL_SECONDS):
                process.stdin.write(frame(grammar))
                await process.stdin.drain()
                length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "little")
                reply = await process.stdout.readexactly(length)
                return msgspec.msgpack.decode(reply, type=str | None)
        except TimeoutError as error:
            await self._end()
            raise EngineError("the grammar could not be checked in time") from error
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await process.wait()
            self._process = None
        except asyncio.CancelledError:
            await self._end()  # else its answer would be taken for the next grammar's
            raise
        if code == -signal.SIGPROF:
            return f"takes more than {self._seconds:g} s to compile; use a simpler one"
        if code < 0:
            return "takes too much memory to compile; use a simpler one"
        raise EngineError(f"the process that checks grammars has ended with exit code {code}")

    async def _start(self, info: ModelInfo) -> Process:
        """Return the process that checks grammars for this model; start it if need be."""
        if self._process is not None and self._process.returncode is None and self._serves is info:
            return self._process
        await self._end()
        command = [
            "-P",
            "-m",
            "engine.structured_output.sandbox",
            info.folder,
            str(info.vocab_size),
        ]
        command += [str(self._seconds), str(MEMORY)]
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, *command, env=module_environment(), stdin=PIPE, stdout=PIPE
            )
        except OSError as error:
            reason = error.strerror or error
            raise EngineError(f"grammars cannot be checked: {sys.executable}: {reason}") from error
        self._serves = info
        return self._process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _look_away(done: asyncio.Task[str | None]) -> None:
    """Retrieve a task's exception, in case no caller waits for it any more."""
    if not done.cancelled():
        done.exception()


@dataclass(slots=True)
class RequestCheck:
    """`GrammarCheck.check` for one HTTP request, whose body must have been read."""

    _grammars: GrammarCheck
    _scope: Scope
    _receive: Receive
    _owner: str  # the request's API key name

    async def check(self, grammar: Grammar, info: ModelInfo, timeout: float) -> str | None:
        """Return what is wrong with a grammar for this model, or None if it can be used.

        Raises ClientGone if the client disconnects meanwhile, TimeoutError if the result is not
        known `timeout` seconds after the request's arrival, and EngineError if the check fails.
        """
        work = self._grammars.check(grammar, info, self._owner)
        if self._grammars.knows(grammar, info):
            return await work
        left = self._scope[ARRIVED] + timeout - time.perf_counter()
        return await unless_client_leaves(self._scope, self._receive, _within(left, work))


async def _within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    async with asyncio.timeout(seconds):
        return await work


def get_grammars(request: Request) -> RequestCheck:
    """Return the application's grammar check for this request; a FastAPI dependency."""
    scope = request.scope
    return RequestCheck(scope["app"].state.grammars, scope, request.receive, scope[INFERENCE].owner)
