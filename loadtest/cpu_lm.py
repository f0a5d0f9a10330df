"""The packed CPU model against the machine's limits and torch.compile.

    python -m loadtest.cpu_lm --threads 2 --models 113M mamba-130M mamba2-130M --weights int8

Prints tokens/s of whole decode steps (no sampling) and of prefills, for float32, bfloat16 and int8
weights. Beside each stands its share of what the machine gives in the same run: bytes of weights
per second against a plain read of memory, FLOP/s against torch's own matrix product. `--peer` adds
the same model in plain PyTorch under torch.compile with frozen weights, which takes minutes to
compile, of minGRU models. Weights and texts are random.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterable
from functools import partial
from time import perf_counter
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from engine import device
from engine.config import ModelConfig
from engine.models import registry
from engine.models.backends.cpu import CpuBackend
from engine.models.hgrn.config import HgrnConfig
from engine.models.language_model import LanguageModel
from engine.models.loader import quantize_model
from engine.models.mamba.config import MambaConfig
from engine.models.mamba2.config import Mamba2Config
from engine.models.minrnn.config import MinRnnConfig
from engine.models.minrnn.lm import LM, Layer
from engine.ops import cpu_isa
from loadtest.report import command_line, median

_CPU = torch.device("cpu")
MODELS: dict[str, ModelConfig] = {
    "6.3M": MinRnnConfig(cell="mingru", vocab_size=66, d_model=384, n_layers=3),
    "113M": MinRnnConfig(
        cell="mingru",
        vocab_size=32000,
        d_model=768,
        n_layers=12,
        expansion=1.5,
        tie_embeddings=True,
    ),
    # as many weights as 113M
    "hgrn-113M": HgrnConfig(
        cell="hgrn",
        vocab_size=32000,
        d_model=768,
        n_layers=12,
        inner=768,
        mlp_hidden=2176,
        tie_embeddings=True,
    ),
    # of the shape of state-spaces/mamba-130m
    "mamba-130M": MambaConfig(
        cell="mamba",
        vocab_size=50280,
        d_model=768,
        n_layers=24,
        inner=1536,
        state_size=16,
        dt_rank=48,
        tie_embeddings=True,
    ),
    # of the shape of state-spaces/mamba2-130m
    "mamba2-130M": Mamba2Config(
        cell="mamba2",
        vocab_size=50288,
        d_model=768,
        n_layers=24,
        heads=24,
        head_dim=64,
        state_size=128,
        tie_embeddings=True,
    ),
}
KINDS = ("bfloat16", "float32", "int8")  # int8 weights with bfloat16 activations


def build(size: str, kind: str) -> LanguageModel:
    """Return a random model with weights of `kind`."""
    torch.manual_seed(0)
    model = registry.build(MODELS[size]).eval()
    if kind != "float32":
        model = model.bfloat16()
    return quantize_model(model, "int8") if kind == "int8" else model


_BEST = False  # the quickest call counts, not the median


def seconds_of(call: Callable[[], object], budget: float) -> float:
    """Return the seconds of a call, as a median; with --best, of the quickest call.

    There are two warm-up calls, then calls for `budget` seconds, at least five.
    """
    call()
    call()
    samples: list[float] = []
    end = perf_counter() + budget
    while perf_counter() < end or len(samples) < 5:
        start = perf_counter()
        call()
        samples.append(perf_counter() - start)
    return min(samples) if _BEST else median(samples)


def read_rate(budget: float) -> float:
    """Return the bytes per second at which all threads read memory in large pages.

    The packed weights are in such pages. The quickest of torch's reductions counts.
    """
    size = 1 << 28
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    values = torch.frombuffer(pages, dtype=torch.float32).fill_(1.0)
    half = values[: size // 8], values[size // 8 :]
    return size / min(seconds_of(values.sum, budget), seconds_of(lambda: torch.dot(*half), budget))


def product_rate(dtype: torch.dtype, budget: float) -> float:
    """Return the floating-point operations per second of torch's product of large matrices."""
    a, b = torch.randn(2, 2048, 2048).to(dtype).unbind()
    return float(2 * 2048**3 / seconds_of(lambda: torch.mm(a, b), budget))


def packed_rows(
    size: str, kind: str, batches: list[int], prompt: int, budget: float
) -> list[dict[str, object]]:
    """Return one row per batch for decode steps, and one for the prefill."""
    model = CpuBackend(build(size, kind), take=True)
    config = model.config
    inner_weights = model.parameters_count - config.vocab_size * config.d_model
    rows: list[dict[str, object]] = []
    for batch in batches:
        state = model.new_state(batch)
        tokens = torch.randint(0, config.vocab_size, (batch,))
        slots = torch.arange(batch, dtype=torch.int32)
        seconds = seconds_of(partial(model.step, tokens, state, slots), budget)
        operations = 2 * batch * (inner_weights + config.vocab_size * config.d_model)
        rows.append(
            _row(size, kind, "packed", batch, batch / seconds, seconds)
            | {"read": model.weight_bytes / seconds, "operations": operations / seconds}
        )
    if prompt:
        state, bounds = model.new_state(1), torch.tensor([0, prompt], dtype=torch.int32)
        tokens = torch.randint(0, config.vocab_size, (prompt,))
        slot = torch.zeros(1, dtype=torch.int32)
        seconds = seconds_of(lambda: model.prefill(tokens, bounds, state, slot), budget)
        rows.append(
            _row(size, kind, "packed", f"prefill {prompt}", prompt / seconds, seconds)
            | {"operations": 2 * prompt * inner_weights / seconds}
        )
    return rows


def peer_rows(
    size: str, kind: str, batches: list[int], prompt: int, budget: float
) -> list[dict[str, object]]:
    """Return the rows of `packed_rows` for plain PyTorch under torch.compile with freezing."""
    from torch._inductor import config as inductor

    inductor.freezing = True
    rows: list[dict[str, object]] = []
    model = cast("LM", build(size, kind))
    config = model.config
    for batch in batches:
        step = torch.compile(plain_step(model), dynamic=False)
        tokens = torch.randint(0, config.vocab_size, (batch,))
        states = [torch.zeros(batch, config.inner) for _ in range(config.n_layers)]
        seconds = seconds_of(partial(step, tokens, states), budget)
        rows.append(_row(size, kind, "torch.compile", batch, batch / seconds, seconds))
    if prompt:
        run = torch.compile(plain_matrices(model), dynamic=False)
        x = torch.randn(prompt, config.d_model, dtype=model.activations)
        seconds = seconds_of(lambda: run(x), budget)
        name = f"prefill {prompt}"
        rows.append(_row(size, kind, "torch.compile", name, prompt / seconds, seconds))
    return rows


def plain_step(model: LM) -> Callable[[Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]]:
    """Return one step of a minGRU in torch's operators.

    It takes tokens [batch] and states [batch, inner] of every layer, and returns logits and the
    next states as new tensors, which the compiler handles best.
    """

    @torch.no_grad()
    def step(tokens: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        x = functional.embedding(tokens, model.embedding.weight)
        after = []
        for layer, state in zip(cast("Iterable[Layer]", model.layers), states, strict=True):
            k, v = layer.cell.gates(layer.cell_norm(x)).float().chunk(2, dim=-1)
            after.append(torch.lerp(state, torch.where(v >= 0, v + 0.5, v.sigmoid()), k.sigmoid()))
            x = x + layer.cell.out(after[-1].to(x.dtype))
            if layer.mlp is not None:
                x = x + layer.mlp(x)
        head = model.embedding if model.head is None else model.head
        return functional.linear(model.last_norm(x), head.weight).float(), after

    return step


def plain_matrices(model: LM) -> Callable[[Tensor], Tensor]:
    """Return a prefill without embedding and recurrences: x [tokens, d_model] -> the same.

    This is less than the peer has to do.
    """

    @torch.no_grad()
    def run(x: Tensor) -> Tensor:
        for layer in cast("Iterable[Layer]", model.layers):
            k, v = layer.cell.gates(layer.cell_norm(x)).chunk(2, dim=-1)
            x = x + layer.cell.out(k.sigmoid() * v)
            if layer.mlp is not None:
                x = x + layer.mlp(x)
        normed = model.last_norm(x)
        return normed

    return run


def _row(
    size: str, kind: str, what: str, batch: int | str, rate: float, seconds: float
) -> dict[str, object]:
    return {
        "model": size,
        "weights": kind,
        "what": what,
        "batch": batch,
        "tokens/s": round(rate),
        "ms": round(seconds * 1e3, 3),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = command_line("cpu_lm", __doc__)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=list(MODELS),
        default=list(MODELS),
        help="models to measure (default: all)",
    )
    parser.add_argument(
        "--weights",
        nargs="+",
        choices=KINDS,
        default=list(KINDS),
        help="kinds of weights (default: all)",
    )
    parser.add_argument(
        "--batches",
        nargs="+",
        type=int,
        default=[1, 16, 64],
        help="sequences of a step (default: 1 16 64)",
    )
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prefill, 0 for none")
    parser.add_argument("--threads", type=int, default=device.usable_cpus(), help="CPU threads")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of each measurement")
    parser.add_argument("--peer", action="store_true", help="measure torch.compile too")
    parser.add_argument("--best", action="store_true", help="print the quickest calls, not medians")
    given = parser.parse_args(arguments)
    global _BEST
    _BEST = given.best
    torch.set_num_threads(given.threads)
    print(
        f"{device.describe(_CPU)}, {given.threads} threads, {cpu_isa()}, "
        f"torch {torch.__version__}, {'quickest calls' if _BEST else 'medians'}"
    )
    for size in given.models:
        for kind in given.weights:
            read = read_rate(given.seconds / 2)
            product = product_rate(
                torch.float32 if kind == "float32" else torch.bfloat16, given.seconds / 2
            )
            rows = packed_rows(size, kind, given.batches, given.prompt, given.seconds)
            if given.peer and kind != "int8" and isinstance(MODELS[size], MinRnnConfig):
                rows += peer_rows(size, kind, given.batches, given.prompt, given.seconds)
            print(f"memory {read / 1e9:.1f} GB/s, product {product / 1e9:.0f} GFLOP/s")
            for row in rows:
                share = {
                    f"of {limit}": round(float(value) / bound, 3)
                    for limit, value, bound in (
                        ("memory", row.pop("read", None), read),
                        ("product", row.pop("operations", None), product),
                    )
                    if isinstance(value, float)
                }
                print(json.dumps(row | share))


if __name__ == "__main__":
    main()
