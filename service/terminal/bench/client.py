"""One client process: sends its share of the requests on time, and watches whether it can."""

from __future__ import annotations

import asyncio
import gc
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from service.terminal.bench.answers import Record, StreamedAnswer, WholeAnswer
from service.terminal.bench.connection import BadAnswer, Connection, Server
from service.terminal.bench.questions import PATHS, Asked, Questions

try:
    from uvloop import new_event_loop
except ImportError:  # there is none for this system
    from asyncio import new_event_loop  # type: ignore[assignment]

# Of the garbage collector: the oldest objects' turn does not come.
YOUNG_GARBAGE_ALONE = (5_000, 10, 1_000_000_000)
LOOK_SECONDS = 0.01  # between looks at the event loop's own lateness


@dataclass(frozen=True)
class Share:
    """What one process is to do: an open loop at the times `due`, or `closed` users in turns."""

    url: str
    asked: Asked
    headers: dict[str, str]
    timeout: float  # seconds of a request
    seed: int
    due: list[float] = field(default_factory=list)
    most_at_once: int | None = None  # requests; those beyond wait, and their wait counts
    closed: int = 0  # users that send their next request when the last one has ended
    count: int | None = None  # requests of a closed loop, unless
    seconds: float | None = None  # it ends after a time


@dataclass
class Report:
    """What one process has seen."""

    records: list[Record]
    late: bytes = b""  # packed doubles: how late its loop came round, in seconds
    busy: float = 0.0  # its share of a core


class _Client:
    def __init__(self, share: Share, start: float) -> None:
        self._share = share
        self._start = start
        self._server = Server(share.url, share.headers)
        self._path = PATHS[share.asked.endpoint]
        self._idle: list[Connection] = []
        self.records: list[Record] = []

    def now(self) -> float:
        return time.monotonic() - self._start

    async def send(self, body: bytes, due: float) -> None:
        """One request, to its record."""
        share = self._share
        record = Record(due=due, sent=self.now(), prompts=share.asked.batch)
        self.records.append(record)
        whole = WholeAnswer()
        answer = StreamedAnswer(self._start) if share.asked.streams else whole
        request = self._server.request(self._path, body)
        connection: Connection | None = None

        def take(data: bytes) -> None:
            # An error's body is JSON, whatever was asked for.
            (answer if connection is not None and connection.status == 200 else whole).take(data)

        try:
            async with asyncio.timeout(share.timeout):
                while True:
                    reused = bool(self._idle)
                    connection = self._idle.pop() if reused else await self._server.connect()
                    try:
                        status = await connection.ask(request, take)
                        break
                    except BadAnswer:
                        # The server may close an idle connection at the moment of its next use.
                        if not reused or connection.answered:
                            raise
            if status != 200:
                record.outcome, record.message = whole.error(status)
        except TimeoutError:
            record.outcome = "timeout"
        except OSError as error:
            record.outcome = f"no connection: {error.strerror or type(error).__name__}"
        except BadAnswer as error:
            record.outcome = f"connection lost: {error}"
        finally:
            record.end = self.now()
            answer.close(record)
            if connection is not None and connection.open:
                if record.outcome == "timeout":
                    connection.close()
                else:
                    self._idle.append(connection)

    async def open_loop(self, questions: Questions) -> None:
        room = asyncio.Semaphore(self._share.most_at_once or 1 << 30)

        async def one(body: bytes, due: float) -> None:
            async with room:
                await self.send(body, due)

        async with asyncio.TaskGroup() as tasks:
            for due in self._share.due:
                body = questions.draw()
                await asyncio.sleep(max(0.0, due - self.now()))
                tasks.create_task(one(body, due))

    async def closed_loop(self, questions: Questions) -> None:
        left = self._share.count

        async def user() -> None:
            nonlocal left
            while left is None or left > 0:
                if self._share.seconds is not None and self.now() >= self._share.seconds:
                    return
                if left is not None:
                    left -= 1
                body = questions.draw()
                await self.send(body, self.now())

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._share.closed):
                tasks.create_task(user())

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


async def _watch(late: array[float]) -> None:
    while True:
        begun = time.monotonic()
        await asyncio.sleep(LOOK_SECONDS)
        late.append(max(0.0, time.monotonic() - begun - LOOK_SECONDS))


async def _drive(share: Share, questions: Questions, client: _Client) -> Report:
    await asyncio.sleep(max(0.0, -client.now()))
    late: array[float] = array("d")
    watch = asyncio.create_task(_watch(late))
    used, begun = time.process_time(), time.monotonic()
    try:
        await (client.closed_loop if share.closed else client.open_loop)(questions)
    finally:
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
        client.close()
    busy = (time.process_time() - used) / max(time.monotonic() - begun, 1e-9)
    return Report(client.records, late.tobytes(), busy)


def drive(share: Share, start: Callable[[], float]) -> Report:
    """Carries the share out; `start` tells, when this process is ready, the time.monotonic at
    which the run begins. Raises OSError or ValueError for files and addresses of no use."""
    questions = Questions(share.asked, share.seed)
    with _young_garbage_alone():
        client = _Client(share, start())
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(_drive(share, questions, client))


@contextmanager
def _young_garbage_alone() -> Iterator[None]:
    """The collector does not look through all records again and again: that takes a tenth of a
    second once there are some ten thousand, in which answers wait to be seen."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*YOUNG_GARBAGE_ALONE)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
