"""HostStatePool: stored states in host memory, one row each, and their copies to and from the GPU.

A row is a packed state and the hidden state after it, in words of 32 bits. Memory is allocated in
slabs as rows are used. On a GPU the slabs are pinned, which takes milliseconds each, so a thread
prepares the next ones. States leave the device on a separate stream and do not delay steps: the
rows are first gathered into a new tensor on the device, so that the next step may overwrite them.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

SLAB_BYTES = 2**23
SLABS_AHEAD = 8


class HostStatePool:
    """A pool of `rows` rows of `width` floats."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.rows = rows
        self._width = width
        self._device = device
        self._per_slab = max(1, min(rows, SLAB_BYTES // (4 * width))) if width else 1
        self._slabs: dict[int, Tensor] = {}  # [per_slab, width]
        self._coming: dict[int, Future[Tensor]] = {}  # slabs that the thread is making
        self._maker = ThreadPoolExecutor(1, "slabs") if device.type == "cuda" else None
        self._stream = self._saved = self._loaded = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._saved = torch.cuda.Event()
            self._loaded = torch.cuda.Event()

    def save(self, states: Tensor, rows: Sequence[int]) -> None:
        """Copy states [n, width] from a device tensor, which nobody else writes to, into rows."""
        if self._stream is None:
            for state, row in zip(states, rows, strict=True):
                self._row(row).copy_(state)
            return
        assert self._saved is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for first, there in self._runs(rows):
                there.copy_(states[first : first + len(there)], non_blocking=True)
            self._saved.record(self._stream)
        states.record_stream(self._stream)

    def load(self, rows: Sequence[int]) -> Tensor:
        """Copy rows to the device; return [n, width]."""
        states = torch.empty(len(rows), self._width, device=self._device)
        if self._saved is not None:
            torch.cuda.current_stream(self._device).wait_event(self._saved)
        for first, there in self._runs(rows):
            states[first : first + len(there)].copy_(there, non_blocking=True)
        if self._loaded is not None:
            self._loaded.record(torch.cuda.current_stream(self._device))
        return states

    def put(self, row: int, state: Tensor) -> None:
        """Write a host tensor [<= width] to the beginning of a row; waits for copies in flight."""
        for event in (self._saved, self._loaded):
            if event is not None:
                event.synchronize()
        self._row(row)[: len(state)].copy_(state)

    def get(self, row: int) -> Tensor:
        """Return a row [width]; waits for copies in flight."""
        if self._saved is not None:
            self._saved.synchronize()
        return self._row(row)

    def _runs(self, rows: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield rows that are adjacent in memory together: index of the first, view [n, width]."""
        first = 0
        while first < len(rows):
            end = first + 1
            slab, index = self._slab(rows[first])
            while end < len(rows) and rows[end] == rows[end - 1] + 1 and rows[end] % self._per_slab:
                end += 1
            yield first, slab[index : index + end - first]
            first = end

    def _row(self, row: int) -> Tensor:
        slab, index = self._slab(row)
        return slab[index]

    def _slab(self, row: int) -> tuple[Tensor, int]:
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} is outside the {self.rows} rows in host memory")
        number, index = divmod(row, self._per_slab)
        slab = self._slabs.get(number)
        if slab is None:
            slab = self._slabs[number] = self._taken(number)
        return slab, index

    def _taken(self, number: int) -> Tensor:
        """Return a slab that is used for the first time, and prepare the next ones."""
        if self._maker is None:
            return self._made()
        for later in range(number, min(number + SLABS_AHEAD, -(-self.rows // self._per_slab))):
            if later not in self._slabs and later not in self._coming:
                self._coming[later] = self._maker.submit(self._made)
        try:
            return self._coming.pop(number).result()
        except Exception:  # memory was short when it was made ahead; it may suffice now
            return self._maker.submit(self._made).result()

    def _made(self) -> Tensor:
        if self._maker is None:
            return torch.empty(self._per_slab, self._width)
        with torch.cuda.device(self._device):
            return pinned(self._per_slab * self._width).view(self._per_slab, self._width)


def pinned(floats: int) -> Tensor:
    """Allocate zeros in page-locked memory, for the current device.

    The memory is allocated first and then locked: cudaHostAlloc, which does both, blocks all other
    CUDA calls of the process until it is done. Call this from a thread that launches no kernels,
    because an asynchronous error would be reported at its next launch.
    """
    size = -(-4 * floats // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages that nothing else uses
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(pages, dtype=torch.float32).zero_()
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(memory.data_ptr(), size, 0)) != 0:
        return torch.zeros(floats, pin_memory=True)
    storage = memory.untyped_storage()
    weakref.finalize(storage, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory[:floats]
