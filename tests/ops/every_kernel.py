"""Runs every CUDA kernel once on small tensors, for tools that watch memory.

``compute-sanitizer --tool memcheck python -m tests.ops.every_kernel``, and likewise with
``--tool racecheck`` and ``--tool synccheck``. Sequences are ragged: empty ones, ends of chunks, a
negative slot, a padding tail, many and few of them; dtypes, channel counts with and without
alignment, both layouts of linear_scan, forward and backward; draws with every set of parameters;
what stands between the library's products, in one turn of a block's threads and several; on Hopper
linear maps in every form of csrc/gemm/heuristics.h, whole steps and clustered ones.
"""

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from engine import ops
from engine.models.backends.cluster_decode import ClusterDecode
from engine.models.backends.eager import EagerBackend
from engine.models.backends.hopper import HopperBackend
from engine.models.loader import quantize_model
from engine.models.minrnn.config import MinRnnConfig
from engine.models.minrnn.lm import LM
from engine.ops.fused_norm import (
    added_rms_norm_,
    gated_rms_norm,
    normed_gelu_,
    normed_step_,
    normed_swiglu_,
    rms_norm,
    swiglu,
)
from engine.ops.gemm import (
    SQUARE_ROWS,
    best_of,
    linear_best,
    linear_convolve,
    linear_embed,
    linear_map,
    linear_residual_,
    linear_step,
    linear_swiglu,
)
from engine.ops.library import cuda_archs
from engine.ops.selective import pack_dt_weight, selected_step
from tests.ops.helpers import BOUND, CELL_OF, CELLS, given_options
from tests.ops.sampling_rows import PARAMETERS, rows_of

LENGTHS = {
    "ragged": [1, 300, 0, 128, 129, 64, 700],
    "one": [2300],
    "many": [7 * n % 5 * 40 for n in range(45)],
    "short": [7 * n % 23 for n in range(45)],
}
# Channels, inputs and numbers of tokens with which linear maps take each form, with every number of
# gates (tests/csrc/test_heuristics.py proves it): alone and in parts; wide ones.
MAPS = (
    (72, 200, (1, 9, 31)),
    (72, 1536, (7, 16, 20, 65)),
    (136, 1712, (67,)),
    (256, 80, (75,)),
    (328, 1032, (65,)),
    (448, 2568, (1453,)),
    (600, 776, (65,)),
    (768, 72, (34,)),
    (960, 680, (66,)),
    (960, 872, (34,)),
    (1536, 1032, (34,)),
    (1984, 72, (70,)),
    (2184, 1032, (65,)),
    (2240, 2568, (66,)),
    (4288, 2248, (66,)),
    (4416, 72, (34, 69)),
    (4608, 72, (66,)),
    (6400, 72, (67, 196)),
    (6464, 72, (204,)),
    (8576, 72, (66,)),
    (8704, 72, (33, 66)),
    (10176, 72, (260,)),
    (10592, 72, (193,)),
    (11328, 72, (130,)),
    (16904, 64, (1, 9, 31, 64, 65)),
)
# Likewise what sums in a fixed order alone take: parts in turn, small tiles with all inputs.
FIXED = (
    (768, 384, (33,)),
    (1088, 384, (2041,)),
    (1088, 1032, (65,)),
    (1088, 1536, (33,)),
    (1152, 768, (65,)),
    (1408, 384, (1038, 2041)),
    (1472, 384, (166, 367, 733)),
    (2176, 512, (33,)),
    (6200, 72, (31,)),
)
EPS = 1e-6
TAIL = 5
TAPS = 4


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def batch(lengths: list[int]) -> tuple[int, Tensor, Tensor]:
    """Tokens with the padding tail, cu_seqlens and slots, of which one is negative."""
    slots = list(range(len(lengths)))
    if len(lengths) > 3:
        slots[3] = -1
    ends = list(itertools.accumulate(lengths, initial=0))
    return (
        ends[-1] + TAIL,
        torch.tensor(ends, dtype=torch.int32, device="cuda"),
        torch.tensor(slots, dtype=torch.int32, device="cuda"),
    )


def serving(lengths: list[int], channels: int, dtype: torch.dtype) -> None:
    tokens, cu_seqlens, slots = batch(lengths)
    rows = len(lengths)
    state = random(rows, channels, dtype=torch.float32)
    inputs = random(rows, TAPS - 1, channels, dtype=torch.float32)
    weight, bias = random(channels, TAPS, dtype=dtype), random(channels, dtype=dtype)
    for silu in (False, True):
        x = random(tokens, channels, dtype=dtype)
        ops.conv_scan(x, weight, bias, cu_seqlens, inputs, slots, silu=silu)
        ops.conv_step(x[:rows], weight, None, inputs, slots, silu=silu)
    for cell, gates in CELLS.items():
        scan, step = getattr(ops, f"{cell}_scan"), getattr(ops, f"{cell}_step")
        options = given_options((BOUND,), channels, "cuda") if cell == "hgrn" else ()
        scan(random(tokens, gates * channels, dtype=dtype), cu_seqlens, state, slots, *options)
        step(random(rows, gates * channels, dtype=dtype), state, slots, *options)


def selective(lengths: list[int], channels: int, dtype: torch.dtype) -> None:
    """Every number of states that a thread has, states of four bytes and of two."""
    tokens, cu_seqlens, slots = batch(lengths)
    rows = len(lengths)
    for states, kept in itertools.product((1, 16, 17, 64, 200), (torch.float32, torch.bfloat16)):
        wide, chosen = random(tokens, 2 * channels, dtype=dtype), random(tokens, 2 * states)
        x, z = wide.split(channels, dim=1)
        dt, (b, c) = random(tokens, channels, dtype=dtype), chosen.to(dtype).split(states, dim=1)
        a, skip = -random(channels, states, dtype=torch.float32).exp(), random(channels)
        bias = random(channels, dtype=torch.float32)
        state = random(rows, channels, states).to(kept)
        given = (a, b, c, skip.to(dtype), bias)
        ops.selective_scan(x, dt, *given, z, cu_seqlens, state, slots)
        few = (a, b[:rows], c[:rows], skip.float(), bias)
        ops.selective_step(x[:rows], dt[:rows], *few, None, state, slots)


def ssd(lengths: list[int], heads: int, width: int, groups: int, dtype: torch.dtype) -> None:
    """Every form of Mamba-2's recurrence, states of four bytes and of two."""
    tokens, cu_seqlens, slots = batch(lengths)
    rows, limit = len(lengths), (0.0, float("inf"))
    for states, kept in itertools.product((17, 64, 128, 200), (torch.float32, torch.bfloat16)):
        parts = [heads * width, groups * states, groups * states, heads]
        x, b, c, dt = random(tokens, sum(parts), dtype=dtype).split(parts, dim=1)
        inputs = x.unflatten(1, (heads, width)), dt
        shared = [one.unflatten(1, (groups, states)) for one in (b, c)]
        a, skip = -random(heads, dtype=torch.float32).exp(), random(heads)
        bias = random(heads, dtype=torch.float32)
        state = random(rows, heads, width, states).to(kept)
        given = (a, *shared, skip.to(dtype), bias, limit)
        ops.ssd_scan(*inputs, *given, cu_seqlens, state, slots)
        few = (a, *(one[:rows] for one in shared), skip.float(), bias, limit)
        ops.ssd_step(*(one[:rows] for one in inputs), *few, state, slots)


def sru(lengths: list[int], channels: int, dtype: torch.dtype) -> None:
    """Every form, with gates that see the state and that do not; the gradients."""
    tokens, cu_seqlens, slots = batch(lengths)
    rows = len(lengths)
    state = random(rows, channels, dtype=torch.float32)
    for seen, highway, tanh in itertools.product((True, False), repeat=3):
        u = random(tokens, 3 * channels, dtype=dtype).requires_grad_()
        x = random(tokens, channels, dtype=dtype).requires_grad_() if highway else None
        v, bias = (random(2 * channels).float().requires_grad_() for _ in range(2))
        given = (v if seen else None, bias)
        with torch.no_grad():
            ops.sru_scan(u, x, *given, cu_seqlens, state, slots, 1.5, tanh)
            few = None if x is None else x[:rows]
            ops.sru_step(u[:rows], few, *given, state, slots, 1.5, tanh)
        h, last = ops.sru_scan_train(u, x, *given, cu_seqlens, state.clone(), 1.5, tanh)
        (h.sum() + last.sum()).backward()


def selected(rows: int, channels: int, rank: int) -> None:
    wide, chosen = random(rows, 2 * channels), random(rows, rank + 32)
    weight, a = pack_dt_weight(random(channels, rank)), -random(channels, 16).float().exp()
    slots = torch.arange(-1, rows - 1, dtype=torch.int32, device="cuda")
    for kept, eps in itertools.product((torch.float32, torch.bfloat16), (None, EPS)):
        state = random(rows, channels, 16).to(kept)
        given = (chosen, weight, a, random(channels), random(channels).float())
        selected_step(wide[:, :channels], *given, wide[:, channels:], state, slots, eps)
        selected_step(wide[:, :channels], *given, None, state, slots, eps)


def training(lengths: list[int], channels: int, dtype: torch.dtype) -> None:
    tokens, cu_seqlens, _ = batch(lengths)
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    for cell, gates in CELLS.items():
        scan = getattr(ops, f"{cell}_scan_train")
        pre = random(tokens, gates * channels, dtype=dtype).requires_grad_()
        h0 = random(len(lengths), channels, dtype=kept).requires_grad_()
        h, last = scan(pre, cu_seqlens, h0)
        (h.sum() + last.sum()).backward()


def linear(channels: int, dtype: torch.dtype, time_contiguous: bool, reverse: bool) -> None:
    def values() -> Tensor:
        if time_contiguous:
            return random(2, channels, 900, dtype=dtype).transpose(1, 2)
        return random(2, 900, channels, dtype=dtype)

    a, b = values().sigmoid().requires_grad_(), values().requires_grad_()
    ops.linear_scan(a, b, reverse=reverse).sum().backward()


def drawing(vocab: int, rows: int) -> None:
    """Many rows take smaller blocks and no copy in shared memory."""
    params = (PARAMETERS * rows)[:rows]
    for logits in (random(rows, vocab, dtype=torch.float32), torch.zeros(rows, vocab).cuda()):
        rows_of(params, "cuda").sample(logits)
        rows_of(params, "cuda").sample_best(best_of(logits))
        targets = torch.randint(vocab, (rows,), device="cuda")
        ops.target_logprobs(logits, targets)


def copying(count: int) -> None:
    words = torch.arange(count, dtype=torch.int32, device="cuda")
    host = torch.zeros(count, dtype=torch.int32, pin_memory=True)
    ops.copy_words_(host, words, 1, count // 2)
    ops.copy_words_(words, host)
    torch.cuda.synchronize()


def maps(channels: int, inputs: int, tokens: int, fixed: bool) -> None:
    """No tile divides the channels; a residual stream's are the next multiple of SQUARE_ROWS."""
    x = random(tokens, inputs)
    squares = None
    if inputs % SQUARE_ROWS == 0:
        squares = random(inputs // SQUARE_ROWS, tokens, dtype=torch.float32).square()
    weight, bias = random(channels, inputs), random(channels)
    linear_map(x, squares, EPS, weight, fixed_order=fixed)
    linear_map(x, squares, EPS, weight, bias, gelu=True, fixed_order=fixed)
    linear_map(x, None, EPS, weight, bias, logits=True, fixed_order=fixed)
    slots = torch.randperm(tokens + 2, device="cuda")[:tokens].to(torch.int32)
    slots[tokens // 2] = -1
    state = random(tokens + 2, channels, dtype=torch.float32)
    for gates, cell in CELL_OF.items():
        weight = random(gates * channels, inputs)
        linear_step(x, squares, EPS, weight, None, state, slots, cell, fixed_order=fixed)
        bias = random(gates * channels)
        linear_step(
            x, squares, EPS, weight, bias, state, slots, cell, True, cell == "mingru", fixed
        )
    weight = random(2 * channels, inputs)
    linear_swiglu(x, squares, EPS, weight, fixed_order=fixed)
    linear_swiglu(x, squares, EPS, weight, random(2 * channels), fixed)
    width = -(-channels // SQUARE_ROWS) * SQUARE_ROWS
    weight, state = random(3 * width, inputs), random(tokens + 2, width, dtype=torch.float32)
    bound = random(width, dtype=torch.float32).sigmoid()
    of_hgrn = state, slots, "hgrn", False, True, fixed
    linear_step(x, squares, EPS, weight, None, *of_hgrn)
    linear_step(x, squares, EPS, weight, random(3 * width), *of_hgrn, bound)
    norm = random(width)
    ids = torch.arange(-1, tokens - 1, dtype=torch.int32, device="cuda")
    linear_embed(ids, random(tokens, width), None)
    linear_embed(ids, random(tokens, width), None, squares=True)
    stream, _, _ = linear_embed(ids, random(tokens, width), norm)
    weight, bias = random(width, inputs), random(width)
    linear_residual_(x, weight, None, stream, None, fixed)
    linear_residual_(x, weight, None, stream, None, fixed, squares=True)
    linear_residual_(x, weight, bias, stream, norm, fixed, bias)
    of_x = random(-(-inputs // SQUARE_ROWS), tokens, dtype=torch.float32).square()
    linear_residual_(x, weight, bias, stream, None, fixed, None, True, of_x, EPS)
    if tokens <= 64 and not fixed:
        linear_residual_(x, weight, bias, stream.float(), norm)
        window, first = random(tokens + 2, 3, width - 4, dtype=torch.float32), 4
        taps = random(width - 4, 4)
        linear_convolve(x, squares, EPS, weight, None, taps, None, window, slots, first)
        of_taps = random(width - 4)
        linear_convolve(x, squares, EPS, weight, bias, taps, of_taps, window, slots, first)
    torch.cuda.synchronize()


def heads(rows: int, inputs: int, channels: int) -> None:
    """The last row of weight is padding."""
    x, weight = random(rows, inputs), random(channels, inputs)
    squares = random(-(-inputs // SQUARE_ROWS), rows, dtype=torch.float32).square()
    for bias in (None, random(channels)):
        for norm in (None, squares):
            linear_best(x, norm, EPS, weight, bias, channels - 1)


def normed(width: int, channels: int, cell: str) -> None:
    rows, gates = 5, CELLS[cell]
    x, ahead = random(rows, width), random(width)
    y, bias = random(rows, channels), random(channels)
    rms_norm(x, EPS, ahead)
    added_rms_norm_(x.float(), x, EPS, ahead)
    added_rms_norm_(x.clone(), None, EPS, ahead)
    normed_gelu_(x, EPS, y, bias, ahead)
    pre = random(rows, gates * channels)
    state = torch.zeros(rows, channels, device="cuda")
    slots = torch.tensor([2, -1, 0, rows, 4], dtype=torch.int32, device="cuda")
    normed_step_(x, EPS, pre, bias.repeat(gates), ahead, state, slots, cell)
    normed_step_(x, EPS, pre, None, None, state, slots, cell, linear_candidate=True)


def gated(width: int, channels: int) -> None:
    rows = 5
    x, weight = random(rows, width), random(channels)
    pre, state = random(rows, 3 * channels), torch.zeros(rows, channels, device="cuda")
    bound = torch.rand(channels, device="cuda")
    slots = torch.tensor([2, -1, 0, rows, 4], dtype=torch.int32, device="cuda")
    normed_step_(x, EPS, pre, None, None, state, slots, "hgrn")
    normed_step_(
        *(x, EPS, pre, random(3 * channels), random(width), state, slots, "hgrn"),
        lower_bound=bound,
        norm_weight=weight,
    )
    normed_swiglu_(x, EPS, random(rows, 2 * channels), random(2 * channels), random(width))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        pre = random(rows, 3 * channels, dtype=dtype)
        gated_rms_norm(random(rows, channels, dtype=dtype), pre[:, 2 * channels :], None, EPS)
        gated_rms_norm(
            random(rows, 2 * channels, dtype=dtype),
            pre[:, : 2 * channels],
            random(2 * channels, dtype=dtype),
            EPS,
            groups=2,
            gate_first=True,
        )
        gated_rms_norm(
            *(random(rows, channels, dtype=dtype), pre[:, 2 * channels :]),
            *(weight.to(dtype), EPS),
        )
        swiglu(random(rows, 2 * channels, dtype=dtype))


def whole_steps() -> None:
    """More channels than one unit for each block; a convolution; every cell."""
    for cell, linear in itertools.product(("mingru", "minlstm"), (False, True)):
        config = MinRnnConfig(
            cell=cell,
            vocab_size=1200,
            d_model=448,
            n_layers=2,
            expansion=3.0,
            conv_kernel=4,
            cell_bias=linear,
            head_bias=linear,
            candidate="linear" if linear else "g",
        )
        model = LM(config).to("cuda", torch.bfloat16)
        narrow = [EagerBackend(quantize_model(model, kind)) for kind in ("int8", "fp8")]
        models = HopperBackend(model), HopperBackend(model, deterministic=True), *narrow
        state = model.new_state(13)
        for step, batch in itertools.product(models, (1, 3, 8, 13)):
            slots = torch.arange(-1, batch - 1, dtype=torch.int32, device="cuda")
            step.step(slots + 5, state, slots)
    torch.cuda.synchronize()


def clustered_steps() -> None:
    """Both cells, with and without convolutions and MLPs; clusters with 8, 16 and (without both) 32
    sequences; a head and none."""
    base = MinRnnConfig(cell="mingru", vocab_size=300, d_model=384, n_layers=2, conv_kernel=4)
    for config in (
        base,
        replace(base, vocab_size=1300),
        replace(base, cell="minlstm", conv_kernel=0),
        replace(base, cell="minlstm", conv_kernel=3, mlp_ratio=0.0),
    ):
        model = LM(config).to("cuda", torch.bfloat16)
        state = model.new_state(200)
        clusters = ClusterDecode(model)
        for batch in (5, 100, 200):
            slots = torch.arange(-1, batch - 1, dtype=torch.int32, device="cuda")
            clusters.step(slots + 5, state, slots)
    torch.cuda.synchronize()


def gated_recurrences(lengths: list[int], units: int, dtype: torch.dtype) -> None:
    """GRU and LSTM; the weight in shared memory or not, as `units` says."""
    tokens, cu_seqlens, slots = batch(lengths)
    for gates, scan, step in (
        (3, ops.gru_scan, ops.gru_step),
        (4, ops.lstm_scan, ops.lstm_step),
    ):
        pre, weight = random(tokens, gates * units, dtype=dtype), random(gates * units, units)
        states = [random(len(lengths) + 1, units, dtype=torch.float32) for _ in range(gates - 2)]
        bias = random(gates * units, dtype=torch.float32)
        scan(pre, weight.to(dtype), bias, cu_seqlens, *states, slots)
        step(pre[: len(lengths)], pre[-len(lengths) :], *states, slots)


def main() -> None:
    torch.manual_seed(0)
    for lengths in LENGTHS.values():
        for channels, dtype in itertools.product(
            (72, 37), (torch.float32, torch.bfloat16, torch.float16)
        ):
            serving(lengths, channels, dtype)
            selective(lengths, channels, dtype)
            gated_recurrences(lengths, channels, dtype)
            ssd(lengths, 6, channels // 8, 3, dtype)
            ssd(lengths, 8, 64, 2, dtype)
            training(lengths, channels, dtype)
            sru(lengths, channels, dtype)
        training(lengths, 20, torch.float64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for lengths in ([3, 1], [2] * 20, [2] * 70):
            gated_recurrences(lengths, 1024, dtype)
            gated_recurrences(lengths, 2602, dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for time_contiguous, reverse in itertools.product((False, True), repeat=2):
            linear(40, dtype, time_contiguous, reverse)
    # Of steps a thread has several units of channels, then several rows too; of scans more states.
    selective([1] * 300, 72, torch.bfloat16)
    selective([1, 40, 0, 33] * 10, 8000, torch.bfloat16)
    sru([1, 40, 0, 33] * 10, 8000, torch.bfloat16)
    ssd([1, 129, 0, 300] * 10, 32, 128, 2, torch.bfloat16)
    ssd([1] * 300, 24, 64, 1, torch.bfloat16)
    for shape in ((2, 72, 8), (9, 37, 264), (40, 8000, 48)):
        selected(*shape)
    for vocab, rows in itertools.product((66, 5001, 32_000, 70_000), (72, 200)):
        drawing(vocab, rows)
    for count in (3, 300_000):  # threads have one word, or more
        copying(count)
    for (width, channels), cell in itertools.product(
        ((8, 8), (72, 200), (64, 16392), (9000, 72)), CELL_OF.values()
    ):
        normed(width, channels, cell)
        gated(width, channels)
    if torch.cuda.get_device_capability()[0] == 9 and "90a" in cuda_archs():
        for shapes, fixed in ((MAPS, False), (FIXED, True)):
            for channels, inputs, counts in shapes:
                for tokens in counts:
                    maps(channels, inputs, tokens, fixed)
        for shape in ((3, 72, 264), (300, 136, 17000), (300, 328, 17000)):
            heads(*shape)
        whole_steps()
        clustered_steps()
    torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main()
