"""Whole models against the limits of the device and against the same model in PyTorch.

    python -m loadtest.engine                                        # on a GPU if there is one
    python -m loadtest.engine --device cpu --models 6.3m 113m --dtype bfloat16 float32
    python -m loadtest.engine --models 1.3b --cell minlstm --batch 1 64 1024 --only decode gemm
    python -m loadtest.engine --models 113m --quantize none int8 --json engine.json --png engine.png
    python -m loadtest.engine --deterministic --only decode prefill

Models: 6.3m, 25m, 113m, 1.3b, hgrn-113m, hgrn-1.3b, mamba-130m, mamba-1.4b, mamba-2.8b,
mamba2-130m and mamba2-1.3b with random weights, and checkpoint folders of weights that are not
quantised.

Parts, chosen with --only:
    decode     a step of the runner, from a plan to ids on the host, greedy: ms and tokens/s
    sampled    the same with temperature 0.8 and top_p 0.9
    penalised  sampled, with penalties
    reported   sampled, with log-probabilities
    engine     the whole engine: requests added, and stepped until all are done
    prefill    one prompt by its length, and what the next token costs after it
    gemm       the model's bare matrix products at each batch
    peer       the same weights in plain PyTorch, and in the published package, if it is installed:
               minGRU-pytorch for prompts (fp32), flash-linear-attention (fla) for HGRN, mamba_ssm
               for Mamba and Mamba-2 on a GPU, llama.cpp (CPU) or transformers for Mamba

Limits are measured in the same run: the bandwidth of a kernel that only reads, and the rate of the
bare products. A step takes at least the larger of two times: the bytes of its weights, read once,
and of its sequences' states, read and written, over the bandwidth; and its FLOP over the best rate
of the products. A model that fits in a cache may exceed the first.

The peer runs in a CUDA graph, on the CPU under torch.compile with frozen weights. It reads the
tokens that the engine draws, and each must be its own best token or within rounding of it.

The last table sets the figures against the project's bars: "pass" or "short".
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import torch

from engine import device as machine
from engine.config import DtypeName, EngineConfig
from engine.device import available_memory, resolve_device, usable_cpus
from engine.errors import EngineError
from engine.models import loader
from engine.models.minrnn.config import CellName
from loadtest.extra import exit_without
from loadtest.layers_timing import Budget
from loadtest.lm_bars import checks
from loadtest.lm_driving import load
from loadtest.lm_figures import ModelFigures
from loadtest.lm_limits import read_bandwidth
from loadtest.lm_measure import PARTS, Asked, fitting, measure, reason
from loadtest.lm_models import SIZES, Subject, cells_of, subject, work
from loadtest.lm_plots import engine_png
from loadtest.lm_tables import print_checks, print_model
from loadtest.peers.decoder import Mode
from loadtest.report import command_line, environment, print_environment, save_json
from loadtest.timing import release_memory

BATCHES = {"cuda": [1, 4, 16, 64, 256, 1024, 4096], "cpu": [1, 4, 16, 64, 256]}
PROMPTS = {"cuda": [128, 1024, 16_384, 131_072], "cpu": [128, 1024, 16_384]}
MODELS = {"cuda": ["6.3m", "113m", "1.3b"], "cpu": ["6.3m", "113m"]}


def _options() -> argparse.ArgumentParser:
    options = command_line("engine", __doc__)
    options.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    options.add_argument(
        "--models",
        nargs="+",
        help=f"{', '.join(SIZES)}, or folders (default: 6.3m, 113m, and on a GPU 1.3b)",
    )
    options.add_argument(
        "--cell",
        nargs="+",
        choices=get_args(CellName),
        default=["mingru"],
        help="cells of models with random weights (default: mingru)",
    )
    options.add_argument(
        "--dtype",
        nargs="+",
        choices=get_args(DtypeName),
        default=["bfloat16"],
        help="types of the weights (default: bfloat16)",
    )
    options.add_argument(
        "--quantize",
        nargs="+",
        choices=["none", "int8", "fp8"],
        default=["none"],
        help="weights unquantised and in 8 bits; put none first to compare the others with it",
    )
    options.add_argument(
        "--deterministic",
        action="store_true",
        help="measure each model a second time in deterministic mode, beside its default",
    )
    options.add_argument(
        "--state-dtype",
        choices=["auto", "float32", "bfloat16"],
        default="auto",
        help="type of the states where it can be chosen, as of minserve serve (default: auto)",
    )
    options.add_argument(
        "--batch", type=_count, nargs="+", help="numbers of sequences that decode together"
    )
    options.add_argument(
        "--prefill", "--prompt", type=_count, nargs="+", help="prompt lengths, tokens"
    )
    options.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        help="parts to measure (default: all)",
    )
    options.add_argument(
        "--peer",
        choices=["auto", *get_args(Mode)],
        default="auto",
        help="how PyTorch runs the same model; auto is graph on a GPU and compile on the CPU",
    )
    options.add_argument("--steps", type=_count, help="most decode steps in a round")
    options.add_argument("--threads", type=_count, help="CPU threads")
    options.add_argument(
        "--seconds",
        type=float,
        help="about how long one figure may take (default: 0.15 on a GPU, 0.5 on a CPU)",
    )
    options.add_argument(
        "--budget-seconds", type=float, help="start no measurement after this many seconds"
    )
    options.add_argument("--json", type=Path, help="write every figure to this file")
    options.add_argument("--png", type=Path, help="draw the figures to this file")
    return options


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return value


def main(argv: list[str] | None = None) -> int:
    options = _options()
    args = options.parse_args(argv)
    if args.png is not None:
        exit_without("matplotlib")
    try:
        device = resolve_device(args.device)
        with torch.no_grad():
            return _measure_all(args, device)
    except (EngineError, ValueError) as error:
        options.error(str(error))


def _measure_all(args: argparse.Namespace, device: torch.device) -> int:
    """Measure and print what the options name; return the exit code."""
    start = time.perf_counter()
    kind = device.type
    torch.manual_seed(0)
    torch.set_num_threads(args.threads or usable_cpus())
    jobs = list(_jobs(args, kind))
    peer = _peer_mode(args.peer, kind)
    print_environment()
    rate = read_bandwidth(device)
    print(
        f"{machine.describe(device)}, {torch.get_num_threads()} threads: reading memory "
        f"{rate / 1e9:,.1f} GB/s"
    )
    asked = Asked(
        parts=args.only,
        batches=sorted(set(args.batch or BATCHES[kind])),
        prompts=sorted(set(args.prefill or PROMPTS[kind])),
        seconds=args.seconds or (0.15 if kind == "cuda" else 0.5),
        steps=args.steps,
        peer=peer,
    )
    models: list[ModelFigures] = []
    failed = 0
    data: dict[str, Any] = {
        "environment": environment(),
        "device": machine.describe(device),
        "read_bytes_per_second": rate,
        "peer": asked.peer,
    }
    kinds = len(args.quantize) * (2 if args.deterministic else 1)
    shares = _shares(args.budget_seconds, len(jobs) * kinds)
    for name, cell, dtype in jobs:
        with subject(name, cell, device, dtype) as one:
            for figures in _each_kind(args, asked, one, dtype, device, rate, shares):
                models.append(figures)
                print_model(figures)
                failed += not (figures.decode or figures.prefill)
                data["models"] = [figures.as_json() for figures in models]
                save_json(args.json, data)  # what follows may take the process down
    found = checks(models)
    data["checks"] = [check.as_json() for check in found]
    save_json(args.json, data)
    if found:
        print_checks(found)
    short = sum(not check.passes for check in found)
    seconds = time.perf_counter() - start
    print(f"{len(found) - short} bars passed, {short} fall short; {seconds:.0f} s")
    if args.png is not None:
        engine_png(args.png, data)
    return 1 if failed else 0


def _peer_mode(name: str, kind: str) -> Mode:
    modes: dict[str, Mode] = {mode: mode for mode in get_args(Mode)}
    modes["auto"] = "graph" if kind == "cuda" else "compile"
    if name == "graph" and kind != "cuda":
        raise ValueError("--peer graph needs a GPU; the CPU has eager and compile")
    return modes[name]


def _jobs(args: argparse.Namespace, kind: str) -> Iterator[tuple[str, str, DtypeName]]:
    """Yield each model once per type, and the sizes once per cell too.

    Raises CheckpointError for a name that is neither a size nor a checkpoint, and ValueError for a
    checkpoint of quantised weights, with which peers cannot compute.
    """
    for name in args.models or MODELS[kind]:
        if name not in SIZES and loader.load_config(loader.resolve(name)).quantization is not None:
            raise ValueError(f"{name}: is quantised; name the checkpoint that it was made from")
        cells = cells_of(name, args.cell) if name in SIZES else args.cell[:1]
        for cell in cells:
            for dtype in args.dtype:
                yield name, cell, dtype


def _shares(seconds: float | None, count: int) -> Iterator[Budget]:
    """Yield a budget for each of `count` models when its turn comes.

    Each gets an equal share of what is left, so that later models get what a quick one did not use.
    """
    end = time.perf_counter() + (seconds or 0)
    for turns in range(count, 0, -1):
        yield Budget(None if seconds is None else (end - time.perf_counter()) / turns)


def _each_kind(
    args: argparse.Namespace,
    asked: Asked,
    one: Subject,
    dtype: DtypeName,
    device: torch.device,
    rate: float,
    shares: Iterator[Budget],
) -> Iterator[ModelFigures]:
    """Yield the figures of a model for each kind of weights, in the order of the options.

    Each kind is measured by default and, if asked for, in deterministic mode.
    """
    plain: ModelFigures | None = None
    default: ModelFigures | None = None
    hows = (False, True) if args.deterministic else (False,)
    states = _states(args, one)
    for name, deterministic in itertools.product(args.quantize, hows):
        quantization = None if name == "none" else name
        figures = ModelFigures(
            name=one.name,
            size=one.size,
            cell=one.config.cell,
            dtype=dtype,
            quantization=quantization,
            device=device.type,
            work=work(one.config.with_state_dtype(states), loader.DTYPES[dtype], quantization),
            read_rate=rate,
            step_tokens=0,
            deterministic=deterministic,
        )
        if states != "auto":
            figures.remarks.append(f"states in {states}")
        try:
            known = default if deterministic else plain
            _run(args, asked, one, figures, device, next(shares), known)
        except Exception as failure:  # a model that does not load or fit ends no other's figures
            figures.remarks.append(f"not measured: {reason(failure)}")
        default = default if deterministic else figures
        plain = plain if quantization or deterministic else figures
        yield figures
        release_memory(device)


def _states(args: argparse.Namespace, one: Subject) -> str:
    """Return the type of the model's states as asked for; "auto" where there is no choice."""
    return str(args.state_dtype) if hasattr(one.config, "state_dtype") else "auto"


def _run(
    args: argparse.Namespace,
    asked: Asked,
    one: Subject,
    figures: ModelFigures,
    device: torch.device,
    budget: Budget,
    known: ModelFigures | None,
) -> None:
    """Load the model that `figures` describe and measure it."""
    free = available_memory(device)
    batches = fitting(asked.batches, figures, one.config.vocab_size, free)
    if not batches:
        raise ValueError("no batch fits in memory")
    left_out = sorted(set(asked.batches) - set(batches))
    if left_out:
        figures.remarks.append(f"batches that do not fit in half of the memory: {left_out}")
    config = EngineConfig(
        model=str(one.folder),
        quantize=figures.quantization or "none",
        device=str(device),
        dtype=figures.dtype,
        max_slots=max(batches),
        share_slots=0,
        host_state_bytes=0,
        threads=args.threads,
        deterministic=figures.deterministic,
        state_dtype=_states(args, one),
    )
    runner = load(config, batches)
    figures.step_tokens = runner.config.max_step_tokens or 1
    measure(figures, runner, one.model, asked, budget, known=known)


if __name__ == "__main__":
    raise SystemExit(main())
