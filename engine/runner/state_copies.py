"""StateCopier: executes the copies of stored states in a plan.

A place is a row of the state pool (first those of running sequences, then those of stored states,
which also have a hidden state) or, as ~row, a row of host memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.ops.upload import UploadRing
from engine.runner.host_pool import HostStatePool
from engine.runner.state_pool import StatePool
from engine.step_plan import INITIAL, Admission, Copy, Load, Store


class StateCopier:
    """Copies stored states, which are in the rows of `pool` from `slots` on and in host memory.

    With a state that ends a prompt the model's hidden state after its last token is stored, from
    which the logits can be computed. It is `d_model` numbers, on the device of type `hidden_dtype`,
    elsewhere fp32. All rows have room for one.
    """

    def __init__(
        self,
        pool: StatePool,
        slots: int,
        host_rows: int,
        d_model: int,
        hidden_dtype: torch.dtype,
        uploads: UploadRing,
    ) -> None:
        self._pool = pool
        self._slots = slots
        self._device = pool.device
        self._uploads = uploads
        self._hidden = torch.zeros(
            pool.rows - slots, d_model, dtype=hidden_dtype, device=pool.device
        )
        self._host = HostStatePool(host_rows, pool.width + d_model, pool.device)

    def begin(self, admissions: Sequence[Admission]) -> None:
        """Initialize the slots of admitted sequences with the states that they start from."""
        self._pool.reset([one.slot for one in admissions if one.source is None])
        found = [Copy(one.source, one.slot) for one in admissions if one.source is not None]
        if found:
            self.carry_out(found)

    def carry_out(self, moves: Sequence[Copy | Load]) -> None:
        """Execute moves with the effect of doing them in order; copies are done in parallel."""
        together = _ParallelCopy()
        for move in moves:
            if isinstance(move, Copy):
                together.add(move)
                continue
            self._copy(together)
            together = _ParallelCopy()
            self._put(move)
        self._copy(together)

    def _copy(self, copies: _ParallelCopy) -> None:
        """Execute the copies; all sources are read before any target is written."""
        initial, slots = self._pool.initial_row, self._slots
        here: list[tuple[int, int]] = []  # from and to the pool
        inwards: list[tuple[int, int]] = []
        outwards: list[tuple[int, int]] = []
        through: list[tuple[int, int]] = []  # from and to host memory
        for target, source in copies.origins.items():
            if source == INITIAL:
                source = initial
            if source == target:
                continue
            if source >= 0:
                (here if target >= 0 else outwards).append((source, target))
            else:
                (inwards if target >= 0 else through).append((source, target))
        loaded = self._host.load([~source for source, _ in inwards]) if inwards else None
        leaving = [self._host.load([~source for source, _ in through])] if through else []
        if outwards:
            leaving.append(self._gather([source for source, _ in outwards]))
        if here:
            self._pool.copy(*map(list, zip(*here, strict=True)))
            kept = [(one, two) for one, two in here if slots <= one != initial and two >= slots]
            if kept:
                rows = self._uploads.put([one - slots for one, _ in kept])
                self._put_hidden(self._hidden.index_select(0, rows), [two for _, two in kept])
        if loaded is not None:
            targets = [target for _, target in inwards]
            self._pool.scatter(loaded[:, : self._pool.width], targets)
            self._put_hidden(loaded[:, self._pool.width :], targets)
        if leaving:
            states = leaving[0] if len(leaving) == 1 else torch.cat(leaving)
            self._host.save(states, [~target for _, target in (*through, *outwards)])

    def hidden_at(self, sources: Sequence[int]) -> Tensor:
        """Return the hidden states [n, d_model] stored at these places, of the model's type."""
        found = self._hidden.new_empty(len(sources), self._hidden.shape[1])
        on_host = [i for i, source in enumerate(sources) if source < 0]
        on_device = [i for i, source in enumerate(sources) if source >= 0]
        if on_device:
            rows = [sources[i] - self._slots for i in on_device]
            there, row = self._uploads.put([on_device, rows])
            found.index_copy_(0, there, self._hidden.index_select(0, row))
        if on_host:
            states = self._host.load([~sources[i] for i in on_host])
            there = self._uploads.put(on_host)
            found.index_copy_(0, there, states[:, self._pool.width :].to(found.dtype))
        return found

    def keep(self, copies: Sequence[Copy], rows: dict[int, int], hidden: Tensor | None) -> None:
        """Execute the copies after a step, with hidden states where requested.

        `rows` gives the row of `hidden` [tokens, d_model] by key.
        """
        on_device = [copy for copy in copies if copy.target >= 0]
        self._pool.copy([copy.source for copy in on_device], [copy.target for copy in on_device])
        with_hidden = [copy for copy in on_device if copy.key >= 0]
        if with_hidden:
            assert hidden is not None
            targets = [copy.target - self._slots for copy in with_hidden]
            sources = [rows[copy.key] for copy in with_hidden]
            there, row = self._uploads.put([targets, sources])
            self._hidden.index_copy_(0, there, hidden.index_select(0, row))
        on_host = [copy for copy in copies if copy.target < 0]
        if on_host:
            states = self._gather([copy.source for copy in on_host])
            for state, copy in zip(states, on_host, strict=True):
                if copy.key >= 0:
                    assert hidden is not None
                    state[self._pool.width :] = hidden[rows[copy.key]]
            self._host.save(states, [~copy.target for copy in on_host])

    def export(self, exports: Sequence[Store]) -> dict[int, Tensor]:
        """Return the states by ticket; valid once the device is done (`exported` reads them)."""
        found = {}
        for one in exports:
            width = self._host_width if one.hidden else self._pool.width
            if one.source < 0:
                found[one.ticket] = self._host.get(~one.source)[:width].clone()
                continue
            state = self._pool.gather([one.source])[0]
            if one.hidden:
                state = torch.cat([state, self._hidden[one.source - self._slots].float()])
            if self._device.type == "cuda":
                there = torch.empty(width, pin_memory=True)
                state = there.copy_(state, non_blocking=True)
            found[one.ticket] = state
        return found

    def _gather(self, sources: Sequence[int]) -> Tensor:
        """Return states as rows of host memory [n, width]; sequences' hidden states are zeros."""
        states = self._pool.gather(sources)
        kept_rows = range(self._pool.initial_row - self._slots)
        rows = [source - self._slots for source in sources]
        if all(row in kept_rows for row in rows):
            stored = self._hidden.index_select(0, self._uploads.put(rows))
            return torch.cat([states, stored.float()], dim=1)
        hidden = torch.zeros(len(sources), self._hidden.shape[1], device=self._device)
        kept = [i for i, row in enumerate(rows) if row in kept_rows]
        if kept:
            there, row = self._uploads.put([kept, [rows[i] for i in kept]])
            hidden[there] = self._hidden[row].float()
        return torch.cat([states, hidden], dim=1)

    @property
    def _host_width(self) -> int:
        return self._pool.width + self._hidden.shape[1]

    def _put_hidden(self, hidden: Tensor, targets: Sequence[int]) -> None:
        """Store hidden states [n, d_model] for those of `targets` that have memory for them."""
        kept = [i for i, target in enumerate(targets) if target >= self._slots]
        if kept:
            rows = [targets[i] - self._slots for i in kept]
            there, row = self._uploads.put([rows, kept])
            hidden = hidden.index_select(0, row).to(self._hidden.dtype)
            self._hidden.index_copy_(0, there, hidden)

    def _put(self, move: Load) -> None:
        state = torch.frombuffer(bytearray(move.state), dtype=torch.float32)
        if move.target < 0:
            self._host.put(~move.target, state)
        else:
            if self._device.type == "cuda":
                state = state.pin_memory().to(self._device, non_blocking=True)
            state = state.unsqueeze(0)
            self._pool.scatter(state[:, : self._pool.width], [move.target])
            if state.shape[1] > self._pool.width:
                self._put_hidden(state[:, self._pool.width :], [move.target])


class _ParallelCopy:
    """Sequential copies converted to one parallel copy.

    `origins` maps each place that is written to the place whose original content it has in the end.
    """

    def __init__(self) -> None:
        self.origins: dict[int, int] = {}

    def add(self, copy: Copy) -> None:
        """Append a copy, executed after those added before."""
        self.origins[copy.target] = self.origins.get(copy.source, copy.source)


def exported(states: dict[int, Tensor]) -> dict[int, bytes]:
    """Return the bytes of exported states; the device must be done."""
    return {ticket: state.numpy().tobytes() for ticket, state in states.items()}
