"""What of several ways is chosen by their times."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.models.backends import autotune as quickest


@pytest.mark.parametrize(
    ("times", "chosen"), [([3.0, 2.0, 1.0], 2), ([1.005, 1.0], 0), ([1.0, 0.9], 1)]
)
def test_the_quickest_is_chosen_and_of_equals_the_first(
    times: list[float], chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickest, "_times", lambda runs: times)
    assert quickest.quickest_of([]) == chosen


@pytest.mark.parametrize(
    ("times", "lasting", "chosen"),
    [
        ([0.9, 0.8, 0.7], {}, 2),  # short: as they are
        ([2.0, 1.9, 1.8], {0: 2.1, 1: 2.3, 2: 2.4}, 0),  # long: what lasts
        ([2.0, 1.9, 3.0], {0: 2.2, 1: 2.19}, 0),  # what is far behind is not looked at again
        ([3.0, 1.9, 3.0], {}, 1),
    ],
)
def test_what_takes_long_is_compared_under_a_load_that_lasts(
    times: list[float], lasting: dict[int, float], chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Graph:
        def __init__(self, number: int) -> None:
            self.number = number

        def replay(self) -> None:
            raise AssertionError

    graphs = [Graph(number) for number in range(len(times))]
    asked = {}

    def lasting_time(graph: Graph, about: float) -> float:
        asked[graph.number] = about
        return lasting[graph.number]

    monkeypatch.setattr(quickest, "_captured", lambda runs: graphs)
    monkeypatch.setattr(quickest, "_times", lambda runs: times)
    monkeypatch.setattr(quickest, "_lasting_time", lasting_time)
    assert quickest.quickest_graph_of([], lasting=True) == chosen
    assert asked == {number: times[number] for number in lasting}
    asked.clear()
    assert quickest.quickest_graph_of([], lasting=False) == times.index(min(times))
    assert not asked


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_only_what_an_algorithm_says_itself_is_passed_over(error: type[Exception]) -> None:
    def fails() -> None:
        raise error("no")

    with pytest.raises(error):
        quickest.works(fails)


@pytest.mark.parametrize("says", [True, False])
def test_what_the_device_says_later_counts(says: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not the call said something, too."""

    def run() -> None:
        if says:
            raise RuntimeError("status 13")

    def lost() -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    assert quickest.works(run) is not says
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert quickest.works(run) is not says
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(torch.AcceleratorError):
        quickest.works(run)


@pytest.mark.gpu
def test_times() -> None:
    x = torch.ones(2048, 2048, device="cuda")
    short, long = quickest._times([lambda: x.mul_(1), lambda: [x.mul_(1) for _ in range(20)]])
    assert 0 < short < long < 1000


@pytest.mark.gpu
@pytest.mark.parametrize("rounds", [1, 60])  # 60: more than a millisecond
def test_graphs_of_what_is_timed(rounds: int) -> None:
    x = torch.zeros(4096, 4096, device="cuda")

    def times(count: int) -> Callable[[], object]:
        return lambda: [x.add_(1) for _ in range(count * rounds)]

    assert quickest.quickest_graph_of([times(3), times(1), times(2)], lasting=True) == 1
    assert quickest.quickest_graph_of([times(1), times(3)], lasting=False) == 0
    if rounds > 1:
        assert quickest._times([times(1)])[0] > quickest._LONG
