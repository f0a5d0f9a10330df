"""ApiRegistry: the supervisor's side of its API processes: who they are, what they still need, what
they count."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from engine.errors import EngineError
from engine.protocol.events import ModelInfo
from engine.supervisor.channel import Pipe
from engine.supervisor.control_messages import (
    Collect,
    ControlReply,
    FromMember,
    Gather,
    Left,
    Problem,
    Reload,
    Samples,
    Serve,
    ToMember,
    Using,
    Welcome,
)

log = logging.getLogger(__name__)

MemberPipe: TypeAlias = Pipe[FromMember, ToMember]
COLLECT_SECONDS = 2.0  # for a member to tell its metrics; then those it told last are taken


@dataclass(eq=False)
class _Member:
    name: str
    pipe: MemberPipe
    using: int = 0  # the generation of the youngest engine that its new requests go to
    needs: set[int] = field(default_factory=set)  # generations on which it may have requests
    samples: bytes | None = None  # as it told them last
    asked: dict[int, asyncio.Future[None]] = field(default_factory=dict)  # by nonce, for samples


class ApiRegistry:
    """By name; all on one event loop."""

    def __init__(
        self,
        reload: Callable[[str | None], Awaitable[ModelInfo]],
        on_unneeded: Callable[[int], None],
        fold: Callable[[list[bytes]], bytes] | None,
    ) -> None:
        """`on_unneeded` is called with a generation that no member needs any more. `fold` sums
        the samples of members that are no more, so that what was once told never falls."""
        self._reload = reload
        self._on_unneeded = on_unneeded
        self._fold = fold
        self._members: dict[str, _Member] = {}
        self._departed: bytes | None = None  # samples
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, pipe: MemberPipe) -> str:
        """A new member's name, which nobody else gets."""
        name = f"member-{next(self._numbers)}"
        self._members[name] = _Member(name, pipe)
        pipe.send(Welcome(name))
        return name

    async def listen(self, name: str) -> None:
        """Does what a member asks for, until its end is gone."""
        member = self._members[name]
        try:
            while True:
                self._take(member, await member.pipe.receive())
        except EOFError:
            pass
        finally:
            self._remove(member)

    def tell(self, message: ToMember) -> None:
        """Tells everybody."""
        for member in self._members.values():
            member.pipe.send(message)

    def serve(self, order: Serve, only: str | None = None) -> None:
        """Tells everybody, or one, which engines new requests are to go to."""
        for member in self._members.values():
            if only in (None, member.name):
                member.needs.update(order.generations)
                member.pipe.send(order)

    def need(self, generation: int) -> bool:
        """Whether anybody may have something in flight on this engine."""
        return any(generation in member.needs for member in self._members.values())

    async def answers(self, name: str, seconds: float) -> bool:
        """Whether a member does, within that time; what it counts is then known."""
        member = self._members.get(name)
        if member is None:
            return False
        done, _ = await asyncio.wait({self._ask(member)}, timeout=seconds)
        return bool(done)

    async def all_use(self, generation: int) -> None:
        """Returns when nobody sends new requests to an older engine."""
        while any(member.using < generation for member in self._members.values()):
            self._changed.clear()
            await self._changed.wait()

    def close(self) -> None:
        """Lets all members go."""
        for task in list(self._tasks):
            task.cancel()
        for member in list(self._members.values()):
            member.pipe.close()

    def _take(self, member: _Member, message: FromMember) -> None:
        match message:
            case Using():
                member.using = max(member.using, message.generation)
                self._changed.set()
            case Left():
                self._leave(member, message.generation)
            case Reload():
                self._spawn(self._answer_reload(member, message))
            case Gather():
                member.samples = message.own
                self._spawn(self._answer_gather(member, message))
            case Samples():
                member.samples = message.samples
                waiting = member.asked.pop(message.nonce, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(None)

    def _leave(self, member: _Member, generation: int) -> None:
        member.needs.discard(generation)
        if not self.need(generation):
            self._on_unneeded(generation)

    def _remove(self, member: _Member) -> None:
        del self._members[member.name]
        member.pipe.close()
        for waiting in member.asked.values():
            if not waiting.done():
                waiting.set_result(None)
        for generation in list(member.needs):
            self._leave(member, generation)
        self._changed.set()
        if member.samples is not None and self._fold is not None:
            known = [samples for samples in (self._departed, member.samples) if samples is not None]
            self._departed = self._fold(known)

    async def _answer_reload(self, member: _Member, message: Reload) -> None:
        try:
            info = await self._reload(message.model)
        except EngineError as error:
            member.pipe.send(ControlReply(message.nonce, Problem.of(error)))
        except Exception as error:
            log.exception("unexpected error in a reload")
            problem = Problem(EngineError.code, f"the reload failed: {error}")
            member.pipe.send(ControlReply(message.nonce, problem))
        else:
            member.pipe.send(ControlReply(message.nonce, info=info))

    async def _answer_gather(self, asker: _Member, message: Gather) -> None:
        waiting = [self._ask(member) for member in self._others(asker)]
        if waiting:
            await asyncio.wait(waiting, timeout=COLLECT_SECONDS)
        # Whoever left meanwhile is among the departed now.
        known = [self._departed, *(member.samples for member in self._others(asker))]
        samples = [one for one in known if one is not None]
        asker.pipe.send(ControlReply(message.nonce, samples=samples))

    def _others(self, asker: _Member) -> list[_Member]:
        return [member for member in self._members.values() if member is not asker]

    def _ask(self, member: _Member) -> asyncio.Future[None]:
        nonce = next(self._numbers)
        answer = member.asked[nonce] = asyncio.get_running_loop().create_future()
        member.pipe.send(Collect(nonce))
        return answer

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
