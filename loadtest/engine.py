"""The whole engine step against the memory limit and against the same model in plain PyTorch.

Decode: tokens per second and milliseconds per step by batch size, greedy. The limit is the time
to read the weights once at the copy rate of the same run. The peer is `peers/torch_lm.py`, in a
CUDA graph where there is a GPU. Prefill: tokens per second of one prompt by its length.

    python -m loadtest.engine --model shakespeare-mingru --batch 1 16 256
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from engine import checkpoint
from engine.config import DtypeName, EngineConfig
from engine.messages import Request, SamplingParams, pack_ids
from engine.plan import Admission, DecodeRow, Plan, PrefillChunk
from engine.runner import Runner
from loadtest.peers.torch_lm import decode_step
from loadtest.report import median, print_environment, print_table, save_json
from loadtest.timing import copy_bandwidth

WARM = 5


def _admit(runner: Runner, batch: int, prompt: list[int]) -> None:
    request = Request(
        id=0, prompt=pack_ids(prompt), sampling=SamplingParams(temperature=0, max_tokens=1 << 20)
    )
    runner.run(Plan(admit=[Admission(request, key, key, None, 0) for key in range(batch)]))


def _release(runner: Runner, batch: int) -> None:
    runner.run(Plan(release=list(range(batch))))


def _median_seconds(call: Callable[[], object], repeat: int) -> float:
    for _ in range(WARM):
        call()
    samples = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return median(samples)


def measure_decode(runner: Runner, batch: int, repeat: int) -> float:
    """Median seconds of a decode step of `batch` sequences, results on the host."""
    _admit(runner, batch, [0])
    tokens = [0] * batch
    position = 0

    def step() -> None:
        nonlocal tokens, position
        position += 1
        plan = Plan(decode=[DecodeRow(key, key, tokens[key], position) for key in range(batch)])
        tokens = [sampled.token for sampled in runner.run(plan).sampled]

    seconds = _median_seconds(step, repeat)
    _release(runner, batch)
    return seconds


def measure_prefill(runner: Runner, length: int, repeat: int) -> float:
    """Median seconds to read one prompt of `length` tokens and draw its first token."""
    ids = array("i", torch.randint(runner.info.vocab_size - 1, (length,)).tolist())
    budget = runner.config.max_step_tokens or length

    def read() -> None:
        _admit(runner, 1, [0])
        for start in range(0, length, budget):
            piece = ids[start : start + budget]
            last = start + budget >= length
            runner.run(Plan(prefill=[PrefillChunk(0, 0, start, piece, None, 0, last)]))
        _release(runner, 1)

    return _median_seconds(read, repeat)


def measure_peer(runner: Runner, batch: int, repeat: int) -> float:
    """Median seconds of the same step in plain PyTorch, its greedy tokens on the host."""
    device = torch.device(runner.info.device)
    model, _ = checkpoint.load_model(
        Path(runner.info.folder), device, cast(DtypeName, runner.config.dtype)
    )
    step = decode_step(model, batch)
    tokens = torch.zeros(batch, dtype=torch.int64, device=device)
    if device.type != "cuda":

        def run() -> None:
            tokens.copy_(step(tokens))
            tokens.tolist()

        return _median_seconds(run, repeat)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            tokens.copy_(step(tokens))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens.copy_(step(tokens))

    def replay() -> None:
        graph.replay()
        tokens.tolist()

    return _median_seconds(replay, repeat)


def main(argv: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--model", default="shakespeare-mingru", help="bundled name or folder")
    options.add_argument("--device", default="auto")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    options.add_argument("--prompt", type=int, nargs="+", default=[128, 1024, 16384])
    options.add_argument("--repeat", type=int, default=50)
    options.add_argument("--json", type=Path)
    args = options.parse_args(argv)
    runner = Runner(
        EngineConfig(
            model=args.model, device=args.device, dtype=args.dtype, max_slots=max(args.batch)
        )
    )
    runner.warm_up()
    device = torch.device(runner.info.device)
    bandwidth = copy_bandwidth(device, 2**30 if device.type == "cuda" else 2**27)
    weight_bytes = runner.info.parameters * getattr(torch, runner.info.dtype).itemsize
    limit = weight_bytes / bandwidth
    print_environment()
    print(
        f"{runner.info.name}: {runner.info.parameters:,} weights, {runner.info.dtype}; copy "
        f"{bandwidth / 1e9:.0f} GB/s; reading the weights takes at least {1000 * limit:.4f} ms"
    )
    data: dict[str, Any] = {"model": runner.info.name, "copy_bytes_per_second": bandwidth}
    data["decode"], data["prefill"] = [], []
    rows = []
    for batch in args.batch:
        ours = measure_decode(runner, batch, args.repeat)
        peer = measure_peer(runner, batch, args.repeat)
        data["decode"].append({"batch": batch, "seconds": ours, "peer_seconds": peer})
        rows.append(
            [
                str(batch),
                f"{1000 * ours:.3f}",
                f"{batch / ours:,.0f}",
                f"{limit / ours:.0%}",
                f"{batch / peer:,.0f}",
                f"{peer / ours:.2f}",
            ]
        )
    print_table(
        "decode, greedy",
        ["batch", "ms/step", "tokens/s", "of limit", "PyTorch tokens/s", "times PyTorch"],
        rows,
    )
    rows = []
    for length in args.prompt:
        seconds = measure_prefill(runner, length, max(3, args.repeat // 10))
        data["prefill"].append({"tokens": length, "seconds": seconds})
        rows.append([str(length), f"{1000 * seconds:.2f}", f"{length / seconds:,.0f}"])
    print_table("prefill of one prompt", ["tokens", "ms", "tokens/s"], rows)
    save_json(args.json, data)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
