"""fetch_: what arrives on the host, and what is zero afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.ops.fetch import fetch_, reference
from tests.ops.helpers import DEVICES


def words_on(device: str, count: int) -> tuple[Tensor, Tensor]:
    """Some words, and memory of the host for them."""
    generator = torch.Generator().manual_seed(count)
    words = torch.randint(-(2**31), 2**31 - 1, (count,), generator=generator).int()
    host = torch.full((count,), 7, dtype=torch.int32, pin_memory=device == "cuda")
    return words.to(device), host


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [0, 1, 3, 256, 257, 34 * 4096, 1_000_003])
def test_words_arrive_and_some_become_zero(count: int, device: str) -> None:
    memory, host = words_on(device, count)
    for first, zeros in ((0, 0), (count // 3, count // 2), (0, count), (count, 0)):
        memory, _ = words_on(device, count + 1)
        words = memory[1:]  # at a multiple of four bytes
        expected, left = reference(words, first, zeros)
        before = memory[0].item()
        fetch_(words, host, first, zeros)
        if device == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(host, expected)
        assert torch.equal(words, left) and memory[0].item() == before


@pytest.mark.gpu
def test_a_graph_of_it_replays_and_an_event_tells_when_it_is_there() -> None:
    words, host = words_on("cuda", 5000)
    fetch_(words, host)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        words += 1
        fetch_(words, host, 10, 5)
    words.copy_(torch.arange(5000))
    torch.cuda._sleep(20_000_000)
    graph.replay()
    there = torch.cuda.Event()
    there.record()
    there.synchronize()
    assert torch.equal(host, torch.arange(1, 5001, dtype=torch.int32))
    graph.replay()
    torch.cuda.synchronize()
    assert host[10:15].tolist() == [1] * 5 and host[15] == 17


@pytest.mark.parametrize("device", DEVICES)
def test_what_does_not_fit_is_refused(device: str) -> None:
    words, host = words_on(device, 8)
    for bad, message in (
        ((words.long(), host), "words must be contiguous int32"),
        ((words.view(2, 4), host), "words must be"),
        ((words[::2], host[:4]), "words must be"),
        ((words, host[:7]), r"host must be contiguous int32 \[8\] on the CPU"),
        ((words, host.float()), "host must be"),
        ((words, host, 3, 6), "zeros must be among the 8 words, got 6 from 3 on"),
        ((words, host, -1, 2), "zeros must be"),
        ((words, host, 0, -1), "zeros must be"),
        ((words, host, 9, 0), "zeros must be"),
    ):
        with pytest.raises(RuntimeError, match=message):
            fetch_(*bad)
    if device == "cuda":
        with pytest.raises(RuntimeError, match="host must be pinned memory"):
            fetch_(words, torch.zeros(8, dtype=torch.int32))
        with pytest.raises(RuntimeError, match="host must be"):
            fetch_(words, words.clone())
        fetch_(words, host)  # the device is well
        torch.cuda.synchronize()
    assert torch.equal(host, words.cpu() if device == "cuda" else torch.full_like(host, 7))


def test_opcheck() -> None:  # not on a GPU: it copies what it is given, and not to pinned memory
    torch.library.opcheck(torch.ops.minserve.fetch_.default, (*words_on("cpu", 8), 2, 3))
