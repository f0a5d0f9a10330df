"""The table of paths: which sizes are timed, who competes, who is taken for what was not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backend_info import BackendInfo, PathInfo
from engine.models.backends import dispatch
from engine.models.backends.dispatch import (
    ANY,
    ExecutionPath,
    PathBackend,
    Row,
    Workload,
    nearest,
    to_be_timed,
    usable_paths,
)
from engine.models.backends.tuning_cache import TuningCache
from engine.models.minrnn.config import MinRnnConfig
from engine.models.minrnn.lm import LM
from engine.models.state import ModelState
from engine.runner.cuda_graphs import buckets
from tests.models.variants import int32

CONFIG = MinRnnConfig(cell="mingru", vocab_size=29, d_model=8, n_layers=1)
MANY = range(33, sys.maxsize)


def path_of(name: str, taken: list[tuple[str, int]] | None = None, **fields: Any) -> ExecutionPath:
    """One whose logits are its name's length, and that notes what it has read."""
    noted: list[tuple[str, int]] = [] if taken is None else taken

    def step(tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        noted.append((name, len(tokens)))
        return torch.full((len(tokens), CONFIG.vocab_size), float(len(name)))

    def prefill(tokens: Tensor, cu_seqlens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        noted.append((name, len(tokens)))
        return torch.zeros(len(tokens), CONFIG.d_model)

    return ExecutionPath(**{"name": name, "step": step, "prefill": prefill, **fields})


#: As those of a small model on Hopper are.
CHAIN = path_of(
    "chain",
    sizes={"step": ANY, "prompt": ANY},
    unmeasured={"step": ANY, "prompt": ANY},
)
TO_HEAD = path_of("to a head", sizes={"step": MANY, "argmax": MANY})
AROUND = path_of("around", sizes={"step": MANY, "prompt": MANY})
LIBRARY = path_of(
    "library",
    sizes={"step": MANY, "prompt": MANY},
    unmeasured={"step": range(193, sys.maxsize), "prompt": range(193, sys.maxsize)},
)
NARROW = path_of("narrow", sizes={"few": range(1, 9)}, unmeasured={"few": range(1, 9)})
WHOLE = path_of(
    "whole",
    sizes={"few": range(1, 9), "step": range(9, 17)},
    unmeasured={"few": range(9, 9), "step": range(9, 17)},
)
CLUSTERS = path_of(
    "clusters",
    sizes={"step": range(1, sys.maxsize)},
    unmeasured={"step": range(1, 97)},
    at_once=96,
)


def backend_of(*paths: ExecutionPath, tuning: TuningCache | None = None) -> PathBackend:
    info = BackendInfo("any")
    return PathBackend(LM(CONFIG), paths, lambda hidden: hidden, tuning=tuning, info=info)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of the paths of each comparison, of which the last one is the quickest."""
    found: list[list[str]] = []

    def last(runs: Sequence[Callable[[], object]], *, lasting: bool) -> int:
        found.append([run.args[0].name for run in runs])  # type: ignore[attr-defined]
        for run in runs:
            run()
        return len(runs) - 1

    monkeypatch.setattr(dispatch, "quickest_graph_of", last)
    return found


def test_powers_of_two_and_the_largest_are_timed() -> None:
    assert to_be_timed(buckets(192)) == [1, 2, 4, 8, 16, 32, 64, 128, 192]
    assert to_be_timed({512, 48, 64}) == [64, 512]
    assert to_be_timed([]) == []


@pytest.mark.parametrize(
    ("size", "path"),
    [
        (33, CHAIN),
        (64, CHAIN),
        (90, CHAIN),
        (91, AROUND),  # more than the root of 64 times 128
        (96, AROUND),
        (180, AROUND),
        (192, LIBRARY),
        (5000, LIBRARY),
    ],
)
def test_others_take_the_path_of_the_nearest_by_ratio(size: int, path: ExecutionPath) -> None:
    chosen = {256: LIBRARY, 64: CHAIN, 128: AROUND}
    assert nearest("step", chosen, size, CLUSTERS, CHAIN) is path


def test_few_rows_take_no_path_of_many() -> None:
    for path in (LIBRARY, AROUND, TO_HEAD):
        assert nearest("step", {64: path}, 32, CLUSTERS, CHAIN) is CHAIN
        assert nearest("step", {64: path}, 33, CLUSTERS, CHAIN) is path


def test_what_takes_turns_has_no_more_rows_than_were_timed() -> None:
    assert nearest("step", {64: CLUSTERS}, 97, CHAIN, CHAIN) is CHAIN
    assert nearest("step", {64: CLUSTERS}, 96, CHAIN, CHAIN) is CLUSTERS
    assert nearest("step", {128: CLUSTERS}, 120, CHAIN, CHAIN) is CLUSTERS
    assert nearest("step", {64: CLUSTERS, 256: CHAIN}, 97, LIBRARY, CHAIN) is CLUSTERS


def test_a_path_with_a_limit_takes_no_more_rows() -> None:
    chosen = {16: WHOLE, 32: CHAIN}
    for size, path in ((9, WHOLE), (16, WHOLE), (17, CHAIN)):
        assert nearest("step", chosen, size, CLUSTERS, CHAIN) is path
    assert nearest("step", {16: WHOLE}, 17, CLUSTERS, CHAIN) is CLUSTERS
    assert nearest("few", {4: WHOLE, 8: WHOLE}, 5, NARROW, CHAIN) is WHOLE


def test_nothing_was_timed() -> None:
    assert nearest("step", {}, 64, LIBRARY, CHAIN) is LIBRARY
    assert nearest("step", {64: CHAIN}, 0, LIBRARY, CHAIN) is LIBRARY


def test_unmeasured_the_last_path_that_claims_a_size_has_it() -> None:
    whole = path_of("whole", sizes=WHOLE.sizes, unmeasured=WHOLE.sizes)
    backend = backend_of(CHAIN, TO_HEAD, AROUND, LIBRARY, whole, CLUSTERS)
    taken = {rows: backend.path(*_step(backend, rows)) for rows in (0, 1, 8, 9, 16, 96, 97, 192)}
    assert taken == {
        **{0: CHAIN, 1: whole, 8: whole, 9: CLUSTERS, 16: CLUSTERS, 96: CLUSTERS},
        **{97: CHAIN, 192: CHAIN},
    }
    assert backend.path("step", 193) is LIBRARY
    assert backend.path("prompt", 192) is CHAIN and backend.path("prompt", 193) is LIBRARY
    narrow = backend_of(CHAIN, NARROW, WHOLE)
    assert [narrow.path(*_step(narrow, rows)) for rows in (8, 9, 17)] == [NARROW, WHOLE, CHAIN]


def _step(backend: PathBackend, rows: int) -> tuple[Workload, int]:
    return backend._kind_of_step(rows), rows


def test_who_competes(compared: list[list[str]]) -> None:
    """Of few rows kernels of a whole step alone, and nothing where there is only one path."""
    backend = backend_of(CHAIN, TO_HEAD, AROUND, LIBRARY, NARROW, WHOLE, CLUSTERS)
    backend.prepare([1, 8, 16, 24, 32, 64], [16, 64], [4])
    assert compared == [
        *[["narrow", "whole"]] * 2,
        ["chain", "whole", "clusters"],
        ["chain", "clusters"],
        ["chain", "to a head", "around", "library", "clusters"],
        ["chain", "around", "library"],
        ["clusters", "to a head"],
    ]
    assert backend.chosen == {
        "few": {1: WHOLE, 8: WHOLE},
        "step": {16: CLUSTERS, 32: CLUSTERS, 64: CLUSTERS},
        "prompt": {64: LIBRARY},
        "argmax": {64: TO_HEAD},
    }
    alone = backend_of(CHAIN, WHOLE)
    compared.clear()
    alone.prepare([1, 8, 32, 64], [64], [])
    assert not compared and not any(alone.chosen.values())


def test_a_head_that_finds_the_best_is_looked_for_behind_paths_to_logits(
    compared: list[list[str]],
) -> None:
    """A path that ends before its head takes no longer to the best tokens."""

    def bests(tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        return torch.zeros(len(tokens), 1, dtype=torch.int64)

    to_head = path_of("to a head", sizes=TO_HEAD.sizes, step_to_bests=bests)
    around = path_of("around", sizes={"step": MANY}, step_to_bests=bests)
    backend = backend_of(CHAIN, to_head, around)
    backend.prepare([16, 64], [], [])
    assert compared == [["chain", "to a head", "around"]]
    assert backend.chosen["argmax"] == {64: around}
    backend = backend_of(CHAIN, to_head, CLUSTERS)
    compared.clear()
    backend.prepare([16, 64], [], [])
    assert compared[-1] == ["clusters", "to a head"]
    assert [backend.step_to_bests(rows) is not None for rows in (16, 32, 33, 64)] == [
        *(False, False),
        *(True, True),
    ]
    backend.chosen["argmax"] = {64: CLUSTERS}  # whose logits a draw had better read
    assert backend.step_to_bests(64) is None


def test_what_is_read_takes_the_path_of_its_size() -> None:
    taken: list[tuple[str, int]] = []
    chain = path_of("chain", taken, sizes=CHAIN.sizes, unmeasured=CHAIN.unmeasured)
    whole = path_of("whole", taken, sizes=WHOLE.sizes, unmeasured=WHOLE.sizes)
    backend = backend_of(chain, whole)
    state = backend.model.new_state(20)
    for rows in (3, 16, 17):
        slots = torch.arange(rows, dtype=torch.int32)
        assert backend.step(slots, state, slots).shape == (rows, CONFIG.vocab_size)
    backend.prefill(int32([1, 2], "cpu"), int32([0, 2], "cpu"), state, int32([0], "cpu"))
    assert taken == [("whole", 3), ("whole", 16), ("chain", 17), ("chain", 2)]


def test_kernels_are_tuned_for_what_is_timed_and_for_what_is_taken(
    compared: list[list[str]],
) -> None:
    tuned: list[tuple[str, str, list[int]]] = []

    def tuning(name: str) -> Callable[[Workload, Collection[int]], None]:
        return lambda kind, sizes: tuned.append((name, kind, list(sizes)))

    around = path_of("around", sizes=AROUND.sizes, tune=tuning("around"))
    library = path_of("library", sizes=LIBRARY.sizes, tune=tuning("library"))
    backend = backend_of(CHAIN, around, library)
    backend.prepare([16, 48, 64], [64, 96], [])
    assert tuned == [
        *[("around", "step", [64]), ("library", "step", [64])],
        *[("around", "prompt", [64, 96]), ("library", "prompt", [64, 96])],
        *[("library", "step", [48, 64]), ("library", "prompt", [64, 96])],
    ]


def test_without_memory_to_be_timed_in_neighbours_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(runs: Sequence[object], *, lasting: bool) -> int:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(dispatch, "quickest_graph_of", no_memory)
    backend = backend_of(CHAIN, LIBRARY)
    backend.prepare([64], [64], [])
    assert not any(backend.chosen.values())
    assert backend.path("step", 64) is CHAIN


def test_what_was_measured_is_not_measured_again(
    compared: list[list[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "of this model.json"
    first = backend_of(CHAIN, LIBRARY, CLUSTERS, tuning=TuningCache(file))
    with caplog.at_level("INFO"):
        first.prepare([16, 64], [64], [])
        assert "3 by measuring, 0 from earlier measurements" in caplog.text and len(compared) == 3
        again = backend_of(CHAIN, LIBRARY, CLUSTERS, tuning=TuningCache(file))
        again.prepare([16, 64, 128], [64], [])
    assert "1 by measuring, 3 from earlier measurements" in caplog.text and len(compared) == 4
    assert again.chosen["step"] == {16: CLUSTERS, 64: CLUSTERS, 128: CLUSTERS}
    # Other competitors: what was said of those says nothing of these.
    other = backend_of(CHAIN, CLUSTERS, tuning=TuningCache(file))
    other.prepare([16, 64], [], [])
    assert len(compared) == 5


def test_rows_that_cannot_be_taken_say_why(caplog: pytest.LogCaptureFixture) -> None:
    def never() -> list[ExecutionPath]:
        raise AssertionError

    with caplog.at_level("INFO"):
        rows = [Row("a", None, lambda: [CHAIN]), Row("b", "too wide", never), Row("c", None, list)]
        usable = usable_paths(rows)
    assert usable.paths == [CHAIN]
    assert usable.told == (
        PathInfo("a", True),
        PathInfo("b", False, "too wide"),
        PathInfo("c", False, "no room on this device"),
    )
    assert [record.getMessage() for record in caplog.records] == [
        "execution path a: used",
        "execution path b: not used: too wide",
        "execution path c: not used: no room on this device",
    ]
