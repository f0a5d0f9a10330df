"""A table of execution paths, and a backend that reads tokens by the fastest of them.

An ExecutionPath is one way to compute a step or a prompt, a row of the table. `prepare` times the
paths for some of the sizes of CUDA graphs; other sizes use the path of the nearest size that was
timed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from engine.backend_info import BackendInfo, PathInfo
from engine.models.backends.autotune import quickest_graph_of
from engine.models.backends.tuning_cache import TuningCache
from engine.models.language_model import LanguageModel
from engine.models.state import ModelState, Step, StepToBests

log = logging.getLogger(__name__)

# The cases for which a path is chosen, separately for each size: steps of so few sequences that
# only whole-step kernels compete ("few"), other steps ("step"), prompts ("prompt"), and steps of
# which only the most likely token is needed ("argmax"). The size of a step is its rows, of a prompt
# its tokens.
Workload = Literal["few", "step", "prompt", "argmax"]

# tokens, cu_seqlens, state, slots -> hidden states (ModelBackend.prefill)
Prefill = Callable[[Tensor, Tensor, ModelState, Tensor], Tensor]

# Up to this many rows or tokens, library products were never faster, nor was a head that finds the
# most likely token.
FEW_ROWS = 32
ANY = range(sys.maxsize)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExecutionPath:
    """One way to read tokens: a row of the table.

    Args:
        name: unique in a table; identifies the path in the tuning cache and the log.
        sizes: by workload, the sizes at which it competes. If it was chosen for a neighbouring
            size, it is not used for larger ones than these; smaller ones use the table's first
            path.
        unmeasured: by workload, the sizes for which it is used if nothing was timed. The last path
            that claims a size gets it.
        at_once: with more rows it takes turns on some GPUs, so it is used for at most this many or
            the largest number that was timed.
        step: tokens int32 [batch], state, slots int32 [batch] -> logits fp32 [batch, vocabulary].
        step_to_bests: the same step with a head that finds the most likely token instead of logits;
            None: the path does not support it, or it would not pay.
        prefill: None: the path reads no prompts.
        tune: chooses kernels for sizes of a workload before they are timed or captured. Waits for
            the device. None: there is nothing to choose.
    """

    name: str
    sizes: Mapping[Workload, range]
    step: Step
    step_to_bests: StepToBests | None = None
    prefill: Prefill | None = None
    unmeasured: Mapping[Workload, range] = field(default_factory=dict)
    at_once: int = sys.maxsize
    tune: Callable[[Workload, Collection[int]], None] | None = None

    def takes(self, workload: Workload, size: int) -> bool:
        """Return whether it competes at this size."""
        return workload in self.sizes and size in self.sizes[workload]


class Row(NamedTuple):
    """A candidate row of the table, before it is known whether the model supports it."""

    name: str
    reason: str | None  # why it is not supported, to complete "not used: "; None: it is
    # makes the paths of a supported model; none for lack of memory
    paths: Callable[[], Sequence[ExecutionPath]]


class UsablePaths(NamedTuple):
    """The paths of a table whose rows were tried, and what became of each row."""

    paths: list[ExecutionPath]
    told: tuple[PathInfo, ...]


def usable_paths(rows: Iterable[Row]) -> UsablePaths:
    """Return the paths of the rows that are supported, in order, and log which they are."""
    paths: list[ExecutionPath] = []
    told: list[PathInfo] = []
    for row in rows:
        own = [] if row.reason is not None else row.paths()
        reason = row.reason or (None if own else "no room on this device")
        log.info("execution path %s: %s", row.name, f"not used: {reason}" if reason else "used")
        paths += own
        told.append(PathInfo(row.name, reason is None, reason))
    return UsablePaths(paths, tuple(told))


def to_be_timed(sizes: Iterable[int]) -> list[int]:
    """Return the sizes to time, up to a second each: powers of two and the largest."""
    rising = sorted(set(sizes))
    return [size for size in rising if size.bit_count() == 1 or size == rising[-1]]


def nearest(
    workload: Workload,
    chosen: Mapping[int, ExecutionPath],
    size: int,
    unmeasured: ExecutionPath,
    base: ExecutionPath,
) -> ExecutionPath:
    """Return the path chosen for this size, or for the nearest one.

    Nearest by ratio: between two powers of two the larger one is nearer from 1.42 times the smaller
    one on.

    Args:
        workload: the workload.
        chosen: the workload's chosen paths, by size.
        size: the size.
        unmeasured: used if no chosen path supports so large a size.
        base: used if the nearest path does not support so small a size.
    """
    timed = max(chosen, default=0)
    possible = {
        other: path
        for other, path in chosen.items()
        if size < path.sizes.get(workload, ANY).stop and size <= max(path.at_once, timed)
    }
    if not possible or size == 0:
        return unmeasured
    path = possible[min(possible, key=lambda other: max(other, size) / min(other, size))]
    return base if size < path.sizes.get(workload, ANY).start else path


class PathBackend:
    """A ModelBackend of `model` that reads tokens by the fastest of `paths`.

    Args:
        model: the model.
        paths: of equally fast ones the first is taken. The first of all must read prompts and steps
            of any size.
        logits: bf16 or fp32 hidden states [n, d_model] -> logits fp32 [n, vocabulary].
        tune_logits: chooses its kernels for these numbers of rows; None: there is nothing to
            choose.
        tuning: earlier measurements; None: everything is measured.
        info: the backend's name and what became of each row of its table.
    """

    def __init__(
        self,
        model: LanguageModel,
        paths: Sequence[ExecutionPath],
        logits: Callable[[Tensor], Tensor],
        *,
        info: BackendInfo,
        tune_logits: Callable[[Collection[int]], None] | None = None,
        tuning: TuningCache | None = None,
    ) -> None:
        self.model = model
        self.info = info
        self.paths = list(paths)
        self._logits, self._tune_logits = logits, tune_logits
        self._tuning = TuningCache() if tuning is None else tuning
        self.chosen: dict[Workload, dict[int, ExecutionPath]] = {
            "few": {},
            "step": {},
            "prompt": {},
            "argmax": {},
        }

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Type of the result of `prefill`; see ModelBackend.hidden_dtype."""
        return self.model.activations

    def prepare(
        self, steps: Collection[int], prompts: Collection[int], logits: Collection[int]
    ) -> None:
        """Choose kernels for these sizes; see ModelBackend.prepare."""
        begin = perf_counter()
        sizes: dict[Workload, list[int]] = {"few": [], "step": [], "prompt": sorted(set(prompts))}
        for size in sorted(set(steps)):
            sizes[self._kind_of_step(size)].append(size)
        timed = {
            workload: [
                size for size in to_be_timed(own) if len(self._candidates(workload, size)) > 1
            ]
            for workload, own in sizes.items()
        }
        for workload, own in timed.items():
            self._tune(workload, {size: self._candidates(workload, size) for size in own})
        if self._tune_logits is not None:
            self._tune_logits(logits)
        for workload, own in timed.items():
            for size in own:
                self._choose(workload, size, self._candidates(workload, size))
        for size, path in self.chosen["step"].items():
            self._choose_to_bests(size, path)
        # The sizes in between, whose paths are known now.
        for workload, own in sizes.items():
            self._tune(workload, {size: [self.path(workload, size)] for size in own})
        torch.cuda.empty_cache()  # graphs allocate from another pool
        self._tuning.save()
        if self._tuning.measured or self._tuning.read:
            log.info(
                "kernels chosen in %.1f s: %d by measuring, %d from earlier measurements (%s)",
                *(perf_counter() - begin, self._tuning.measured, self._tuning.read),
                self._tuning.path or "no tuning cache",
            )

    def _tune(self, workload: Workload, paths: Mapping[int, Collection[ExecutionPath]]) -> None:
        """Let the paths choose kernels for the sizes that they will read."""
        for path in self.paths:
            sizes = [size for size, own in paths.items() if path in own]
            if path.tune is not None and sizes:
                path.tune(workload, sizes)

    def _kind_of_step(self, rows: int) -> Workload:
        return "few" if any(path.takes("few", rows) for path in self.paths) else "step"

    def _candidates(self, workload: Workload, size: int) -> list[ExecutionPath]:
        return [path for path in self.paths if path.takes(workload, size)]

    def path(self, workload: Workload, size: int) -> ExecutionPath:
        """Return the path for this size: the measured one, or the default if nothing was timed."""
        unmeasured = self.paths[0]
        for path in self.paths:
            if size in path.unmeasured.get(workload, ()):
                unmeasured = path
        return nearest(workload, self.chosen[workload], size, unmeasured, self.paths[0])

    def _choose(self, workload: Workload, size: int, candidates: Sequence[ExecutionPath]) -> None:
        with suppress(torch.OutOfMemoryError):  # its neighbours' choices are used then
            self.chosen[workload][size] = self._quickest(workload, size, candidates)

    def _choose_to_bests(self, rows: int, path: ExecutionPath) -> None:
        """Choose whether a step with this path should end with a head that finds the best token.

        The alternative is to compute all logits, which sampling must then read again.
        """
        if rows <= FEW_ROWS:
            return
        if path.step_to_bests is not None:  # takes no longer
            self.chosen["argmax"][rows] = path
            return
        others = self._candidates("argmax", rows)
        if others:
            self._choose("argmax", rows, [path, *others])

    def _quickest(
        self, workload: Workload, size: int, candidates: Sequence[ExecutionPath]
    ) -> ExecutionPath:
        names = [path.name for path in candidates]
        known = self._tuning.path_of(workload, size, names)
        if known is None:
            known = names[self._timed(workload, size, candidates)]
            self._tuning.add_path(workload, size, names, known)
        return candidates[names.index(known)]

    @torch.no_grad()
    def _timed(self, workload: Workload, size: int, candidates: Sequence[ExecutionPath]) -> int:
        """Time each path on random tokens, of `size` sequences or of one prompt."""
        device = self.model.device
        random = torch.Generator(device).manual_seed(0)
        vocabulary = self.model.config.vocab_size
        tokens = torch.randint(
            vocabulary, (size,), dtype=torch.int32, device=device, generator=random
        )
        prompt = workload == "prompt"
        state = self.model.new_state(1 if prompt else size)
        slots = torch.arange(1 if prompt else size, dtype=torch.int32, device=device)
        read = {"prompt": _read_prompt, "argmax": _find_bests}.get(workload, _read_step)
        runs = [partial(read, path, tokens, state, slots) for path in candidates]
        # Steps follow one another under load; prompts come in between.
        return quickest_graph_of(runs, lasting=not prompt)

    @torch.no_grad()
    def prefill(
        self, tokens: Tensor, cu_seqlens: Tensor, state: ModelState, slots: Tensor
    ) -> Tensor:
        """Read packed prompts; see ModelBackend.prefill."""
        prefill = self.path("prompt", len(tokens)).prefill
        assert prefill is not None
        return prefill(tokens, cu_seqlens, state, slots)

    @torch.no_grad()
    def step(self, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        """Run a step; see ModelBackend.step."""
        rows = len(tokens)
        return self.path(self._kind_of_step(rows), rows).step(tokens, state, slots)

    def step_to_bests(self, rows: int) -> StepToBests | None:
        """Return a step that finds the best tokens; see ModelBackend.step_to_bests."""
        if rows <= FEW_ROWS:  # computing their logits is as fast
            return None
        path = self.path(self._kind_of_step(rows), rows)
        if path.step_to_bests is None:
            path = nearest("argmax", self.chosen["argmax"], rows, path, path)
        return None if path.step_to_bests is None else partial(_find_bests, path)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits; see ModelBackend.logits."""
        return self._logits(hidden)

    def initial_state(self) -> dict[str, Tensor]:
        """Return the initial state; see ModelBackend.initial_state."""
        return self.model.initial_state()


def _read_step(path: ExecutionPath, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
    return path.step(tokens, state, slots)


@torch.no_grad()
def _find_bests(path: ExecutionPath, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
    if path.step_to_bests is not None:
        return path.step_to_bests(tokens, state, slots)
    return path.step(tokens, state, slots).argmax(1)  # takes as long as sampling


def _read_prompt(path: ExecutionPath, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
    assert path.prefill is not None
    # Made on the device, because nothing may wait for it while others are timed.
    bounds = torch.arange(2, dtype=torch.int32, device=tokens.device) * len(tokens)
    return path.prefill(tokens, bounds, state, slots)
