"""One client process: sends its share of the requests on time, and measures its own lateness."""

from __future__ import annotations

import asyncio
import gc
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from service.terminal.bench.connection import BadResponse, Connection, Server
from service.terminal.bench.request_bodies import PATHS, Body, RequestBodies, RequestOptions
from service.terminal.bench.responses import Record, StreamedResponse, WholeResponse

try:
    from uvloop import new_event_loop
except ImportError:  # uvloop does not exist for this system
    from asyncio import new_event_loop  # type: ignore[assignment]

# Thresholds of the garbage collector with which it never collects the oldest generation.
YOUNG_GARBAGE_ALONE = (5_000, 10, 1_000_000_000)
LOOK_SECONDS = 0.01  # between measurements of the event loop's lateness


@dataclass(frozen=True)
class Workload:
    """The work of one process: an open loop with the times `due`, or a loop of `closed` users."""

    url: str
    asked: RequestOptions
    headers: dict[str, str]
    timeout: float  # seconds for one request
    seed: int
    due: list[float] = field(default_factory=list)  # seconds from the start
    most_at_once: int | None = None  # requests in flight; more wait, and the wait counts
    closed: int = 0  # users, each of which sends its next request when the last one has ended
    count: int | None = None  # requests of a closed loop; or
    seconds: float | None = None  # its length in seconds


@dataclass
class Report:
    """The results of one process."""

    records: list[Record]
    late: bytes = b""  # packed doubles: lateness of its event loop, in seconds
    busy: float = 0.0  # share of a core that the process used


class Client:
    """Sends requests of a workload and records their answers; `now` counts from `start`."""

    def __init__(self, workload: Workload, start: float) -> None:
        """`start`: a time.monotonic."""
        self._workload = workload
        self._start = start
        self._server = Server(workload.url, workload.headers)
        self._path = PATHS[workload.asked.endpoint]
        self._idle: list[Connection] = []
        self.records: list[Record] = []

    def now(self) -> float:
        """Return the seconds from the start."""
        return time.monotonic() - self._start

    async def send(self, body: Body, due: float) -> None:
        """Send one request and record its answer in `records`."""
        workload = self._workload
        record = Record(due=due, sent=self.now(), prompts=workload.asked.batch)
        record.prompt_bytes = body.prompt_bytes
        self.records.append(record)
        whole = WholeResponse()
        answer = StreamedResponse(self._start) if workload.asked.streams else whole
        request = self._server.request(self._path, body.data)
        connection: Connection | None = None

        def take(data: bytes) -> None:
            # The body of an error is JSON, even if the request asked for a stream.
            (answer if connection is not None and connection.status == 200 else whole).take(data)

        try:
            async with asyncio.timeout(workload.timeout):
                while True:
                    reused = bool(self._idle)
                    connection = self._idle.pop() if reused else await self._server.connect()
                    try:
                        status = await connection.ask(request, take)
                        break
                    except BadResponse:
                        # The server may close an idle connection at the moment of its next use.
                        if not reused or connection.answered:
                            raise
            if status != 200:
                record.outcome, record.message = whole.error(status)
        except TimeoutError:
            record.outcome = "timeout"
        except OSError as error:
            record.outcome = f"no connection: {error.strerror or type(error).__name__}"
        except BadResponse as error:
            record.outcome = f"connection lost: {error}"
        finally:
            record.end = self.now()
            answer.close(record)
            if connection is not None and connection.open:
                if record.outcome == "timeout":
                    connection.close()
                else:
                    self._idle.append(connection)

    async def open_loop(self, bodies: RequestBodies) -> None:
        """Send a request at each of the workload's times."""
        room = asyncio.Semaphore(self._workload.most_at_once or 1 << 30)

        async def one(body: Body, due: float) -> None:
            async with room:
                await self.send(body, due)

        async with asyncio.TaskGroup() as tasks:
            for due in self._workload.due:
                body = bodies.draw()
                await asyncio.sleep(max(0.0, due - self.now()))
                tasks.create_task(one(body, due))

    async def closed_loop(self, bodies: RequestBodies) -> None:
        """Send the requests of the workload's users."""
        left = self._workload.count

        async def user() -> None:
            nonlocal left
            while left is None or left > 0:
                if self._workload.seconds is not None and self.now() >= self._workload.seconds:
                    return
                if left is not None:
                    left -= 1
                body = bodies.draw()
                await self.send(body, self.now())

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._workload.closed):
                tasks.create_task(user())

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()


async def _watch(late: array[float]) -> None:
    while True:
        begun = time.monotonic()
        await asyncio.sleep(LOOK_SECONDS)
        late.append(max(0.0, time.monotonic() - begun - LOOK_SECONDS))


async def _drive(workload: Workload, bodies: RequestBodies, client: Client) -> Report:
    await asyncio.sleep(max(0.0, -client.now()))
    late: array[float] = array("d")
    watch = asyncio.create_task(_watch(late))
    used, begun = time.process_time(), time.monotonic()
    try:
        await (client.closed_loop if workload.closed else client.open_loop)(bodies)
    finally:
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
        client.close()
    busy = (time.process_time() - used) / max(time.monotonic() - begun, 1e-9)
    return Report(client.records, late.tobytes(), busy)


def drive(workload: Workload, start: Callable[[], float]) -> Report:
    """Run a workload and return the report.

    `start`: called when this process is ready; returns the time.monotonic at which the run begins.
    Raises OSError or ValueError for files and addresses that cannot be used.
    """
    bodies = RequestBodies(workload.asked, workload.seed)
    with _young_garbage_alone():
        client = Client(workload, start())
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(_drive(workload, bodies, client))


@contextmanager
def _young_garbage_alone() -> Iterator[None]:
    """Keep the garbage collector from scanning all records again and again.

    With ten thousand records that takes a tenth of a second, and answers wait meanwhile.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*YOUNG_GARBAGE_ALONE)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
