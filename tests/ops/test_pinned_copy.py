"""copy_words_: what arrives in either direction, and what is zero afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.ops.pinned_copy import copy_words_, reference
from tests.ops.helpers import DEVICES


def words(count: int, device: str, dtype: torch.dtype = torch.int32) -> Tensor:
    """Random ones, in pinned memory where `device` is "pinned"."""
    generator = torch.Generator().manual_seed(count)
    info = torch.iinfo(dtype)
    numbers = torch.randint(info.min, info.max, (count,), generator=generator, dtype=dtype)
    return numbers.pin_memory() if device == "pinned" else numbers.to(device)


@pytest.mark.parametrize(
    ("to", "source"),
    [
        ("cpu", "cpu"),
        *(
            pytest.param(*ways, marks=pytest.mark.gpu)
            for ways in (("pinned", "cuda"), ("cuda", "pinned"), ("cuda", "cuda"))
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("count", [0, 1, 3, 256, 257, 34 * 4096, 1_000_003])
def test_words_arrive_and_some_become_zero(
    count: int, dtype: torch.dtype, to: str, source: str
) -> None:
    for first, zeros in ((0, 0), (count // 3, count // 2), (0, count), (count, 0)):
        memory, place = words(count + 1, source, dtype), words(count + 2, to, dtype)
        given, got = memory[1:], place[1 : count + 1]  # at a multiple of their size alone
        around = memory[0].item(), place[0].item(), place[-1].item()
        expected, left = reference(given, first, zeros)
        copy_words_(got, given, first, zeros)
        if "cuda" in (to, source):
            torch.cuda.synchronize()
        assert torch.equal(got.cpu(), expected.cpu())
        assert torch.equal(given, left)
        assert around == (memory[0].item(), place[0].item(), place[-1].item())


@pytest.mark.gpu
def test_a_graph_of_it_replays_and_an_event_tells_when_it_is_there() -> None:
    numbers, host = words(5000, "cuda"), words(5000, "pinned")
    copy_words_(host, numbers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers += 1
        copy_words_(host, numbers, 10, 5)
    numbers.copy_(torch.arange(5000))
    torch.cuda._sleep(20_000_000)
    graph.replay()
    there = torch.cuda.Event()
    there.record()
    there.synchronize()
    assert torch.equal(host, torch.arange(1, 5001, dtype=torch.int32))
    graph.replay()
    torch.cuda.synchronize()
    assert host[10:15].tolist() == [1] * 5 and host[15] == 17


@pytest.mark.gpu
def test_the_host_is_read_when_it_is_the_turn_of_the_copy() -> None:
    host, numbers = words(300, "pinned"), torch.zeros(300, dtype=torch.int32, device="cuda")
    copy_words_(numbers, host)  # loads the kernel
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)
    copy_words_(numbers, host)
    host.fill_(5)
    assert numbers.tolist() == [5] * 300


@pytest.mark.parametrize("device", DEVICES)
def test_what_does_not_fit_is_refused(device: str) -> None:
    source, to = words(8, device), words(9, "pinned" if device == "cuda" else device)[:8]
    both = words(12, device)
    before = to.clone()
    for bad, message in (
        ((to, source.float()), "source must be contiguous int32 or int64"),
        ((to, source.view(2, 4)), "source must be"),
        ((to[:4], source[::2]), "source must be"),
        ((to[:7], source), r"to must be contiguous \[8\] of source's dtype"),
        ((to.long(), source), "to must be"),
        ((to.view(2, 4), source), "to must be"),
        ((words(16, "cpu")[::2], source), "to must be"),
        ((source, source), "to must not share memory"),
        ((both[:8], both[4:]), "to must not share memory"),
        ((to, source, 3, 6), "zeros must be among the 8 of source, got 6 from 3 on"),
        ((to, source, -1, 2), "zeros must be"),
        ((to, source, 0, -1), "zeros must be"),
        ((to, source, 9, 0), "zeros must be"),
    ):
        with pytest.raises(RuntimeError, match=message):
            copy_words_(*bad)
    if device == "cuda":
        pageable = torch.zeros(8, dtype=torch.int32)
        with pytest.raises(RuntimeError, match="to must be pinned memory or on the device"):
            copy_words_(pageable, source)
        with pytest.raises(RuntimeError, match="source must be pinned memory or on the device"):
            copy_words_(source, pageable)
        torch.cuda.synchronize()  # the device is well
    assert torch.equal(to, before)


def test_opcheck() -> None:  # not on a GPU: it copies what it is given, and not to pinned memory
    operator = torch.ops.minserve.copy_words_.default
    torch.library.opcheck(operator, (words(8, "cpu"), words(8, "cpu"), 2, 3))
