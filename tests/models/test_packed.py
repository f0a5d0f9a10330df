"""CpuBackend against the model's equations in float64, and what it promises about bits."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from engine.config import SCAN_CHUNK
from engine.models.backends.cpu import CpuBackend, pack_matrix, supports
from engine.models.hgrn.config import HgrnConfig
from engine.models.hgrn.lm import HgrnLM
from engine.models.language_model import LanguageModel
from engine.models.mamba.config import MambaConfig
from engine.models.mamba.lm import MambaLM
from engine.models.mamba2.config import Mamba2Config
from engine.models.mamba2.lm import Mamba2LM
from engine.models.minrnn.lm import LM
from engine.models.state import ModelState
from tests.models import reference
from tests.models.variants import PACKED_VARIANTS, build, config_of, int32, relative_error

FP32 = 1e-5
BF16 = 3e-2  # products of bfloat16 activations, against float64 on the same weights


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


class _Int8(nn.Module):
    """A linear map or embedding with an int8 matrix and a scale per row."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        scale = weight.float().abs().amax(1).clamp(min=1e-12) / 127
        self.weight = nn.Parameter(
            (weight.float() / scale[:, None]).round().to(torch.int8), requires_grad=False
        )
        self.register_buffer("scale", scale)
        self.bias = bias

    def dequantized(self) -> Tensor:
        scale = self.scale
        assert isinstance(scale, Tensor)
        return self.weight.double() * scale.double()[:, None]


def quantized(model: LanguageModel) -> tuple[LanguageModel, dict[str, Tensor]]:
    """`model` with int8 matrices, and the weights that it then stands for, float64."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if name.endswith(("x_proj", "dt_proj")):  # which keep the type of the other weights
            continue
        if isinstance(module, nn.Linear | nn.Embedding):
            parent = model.get_submodule(name.rpartition(".")[0])
            bias = getattr(module, "bias", None)
            setattr(parent, name.rpartition(".")[2], _Int8(module.weight.detach(), bias))
    weights = {name: tensor.detach().double() for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, _Int8):
            weights[f"{name}.weight"] = module.dequantized()
    return model, weights


def random_tokens(vocab: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))


def stepped(packed: CpuBackend, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
    """tokens [batch, time] -> logits [batch, time, vocab]."""
    return torch.stack([packed.step(column, state, slots) for column in tokens.unbind(1)], 1)


def prefilled(packed: CpuBackend, tokens: Tensor, state: ModelState, slot: int) -> Tensor:
    bounds = int32([0, tokens.numel()])
    return packed.logits(packed.prefill(tokens, bounds, state, int32([slot])))


def wide(options: dict[str, object]) -> LanguageModel:
    """A model of several panels, groups and blocks of steps, none of which it fills evenly."""
    torch.manual_seed(3)
    model: LanguageModel
    if options.get("family") == "hgrn":
        widths: dict[str, object] = {"d_model": 301, "inner": 511, "mlp_hidden": 371}
        model = hgrn({"vocab_size": 211, **widths, **options})
    elif options.get("family") == "mamba":
        widths = {"d_model": 301, "inner": 511, "dt_rank": 19}
        model = mamba({"vocab_size": 211, **widths, **options})
    elif options.get("family") == "mamba2":
        widths = {"d_model": 301, "heads": 6, "head_dim": 85}
        model = mamba2({"vocab_size": 211, **widths, **options})
    else:
        shape = {"d_model": 301, "vocab_size": 211, "expansion": 1.7, "mlp_ratio": 2.3}
        model = LM(config_of({**shape, **options})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "lower_bounds")):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def hgrn(options: dict[str, object]) -> HgrnLM:
    """A random model of the family hgrn whose every parameter matters."""
    shape = {"vocab_size": 29, "d_model": 20, "n_layers": 3, "inner": 28, "mlp_hidden": 37}
    values = {"cell": "hgrn", **shape, **options}
    del values["family"]
    model = HgrnLM(HgrnConfig(**values)).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name == "lower_bounds":
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def mamba(options: dict[str, object]) -> MambaLM:
    """A random model of the family mamba whose every parameter matters."""
    shape = {"vocab_size": 29, "d_model": 20, "n_layers": 3, "inner": 28, "dt_rank": 3}
    values = {**shape, "state_size": 16, **options}
    del values["family"]
    model = MambaLM(MambaConfig(**values)).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias", "A_log", "D")):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def mamba2(options: dict[str, object]) -> Mamba2LM:
    """A random model of the family mamba2 whose every parameter matters."""
    shape = {"vocab_size": 29, "d_model": 20, "n_layers": 3, "heads": 4, "head_dim": 7}
    values = {**shape, "state_size": 16, **options}
    del values["family"]
    model = Mamba2LM(Mamba2Config(**values)).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias", "A_log", "D")):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def plain_logits(model: LanguageModel, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """What the model in plain torch computes in float64 with these weights."""
    plain = copy.deepcopy(model).double()
    plain.load_state_dict(weights, strict=False)  # scales of int8 matrices are in the weights
    with torch.no_grad():
        logits: Tensor = plain(tokens)
    return logits


def same_rows(state: ModelState, rows: list[int], other: ModelState, others: list[int]) -> bool:
    """Whether all tensors of the state have the same bits in these rows."""
    return all(
        torch.equal(tensor[:, rows], other[name][:, others]) for name, tensor in state.named.items()
    )


@pytest.mark.parametrize("options", PACKED_VARIANTS)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int8-bfloat16"])
def test_both_reads_follow_the_equations(options: dict[str, object], kind: str) -> None:
    model = build(options)
    if kind.endswith("bfloat16"):
        model = model.bfloat16()
    weights = dict(model.state_dict())
    if kind.startswith("int8"):
        model, weights = quantized(model)
    config = model.config
    tokens = random_tokens(config.vocab_size, 2, 9)
    expected = torch.stack([reference.logits(config, weights, row) for row in tokens])
    packed = CpuBackend(model)
    state = packed.new_state(4)
    by_step = stepped(packed, tokens, state, int32([3, 1]))
    other = packed.new_state(4)
    by_prompt = torch.stack([prefilled(packed, row, other, 2 * i) for i, row in enumerate(tokens)])
    tolerance = BF16 if kind.endswith("bfloat16") else FP32
    assert by_step.dtype == by_prompt.dtype == torch.float32
    assert relative_error(by_step, expected) < tolerance
    assert relative_error(by_prompt, by_step) < FP32
    assert relative_error(other["cell"][:, [0, 2]], state["cell"][:, [3, 1]]) < FP32


@pytest.mark.parametrize(
    "options",
    [
        {"family": "hgrn"},
        {"family": "hgrn", "conv_kernel": 4},
        {"family": "hgrn", "conv_kernel": 8, "lower_bounds": False, "tie_embeddings": True},
        {"cell": "hgrn", "conv_kernel": 3},
        {"cell": "hgrn", "expansion": 1.0, "out_projection": False, "cell_bias": True},
        {"cell": "hgrn", "out_bias": True, "lower_bounds": False, "tie_embeddings": True},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int8-bfloat16"])
def test_hgrn_as_in_plain_torch(options: dict[str, object], kind: str) -> None:
    torch.manual_seed(0)
    model = hgrn(options) if "family" in options else build(options)
    if kind.endswith("bfloat16"):
        model = model.bfloat16()
    given, weights = model, dict(model.state_dict())
    if kind.startswith("int8"):
        given, weights = quantized(model)
    tokens = random_tokens(model.config.vocab_size, 2, 19)
    expected = plain_logits(model, weights, tokens)
    packed = CpuBackend(given)
    state, other = packed.new_state(4), packed.new_state(4)
    by_step = stepped(packed, tokens, state, int32([3, 1]))
    by_prompt = torch.stack([prefilled(packed, row, other, 2 * i) for i, row in enumerate(tokens)])
    tolerance = BF16 if kind.endswith("bfloat16") else FP32
    assert relative_error(by_step, expected) < tolerance
    assert relative_error(by_prompt, by_step) < FP32
    for name, tensor in state.named.items():
        assert relative_error(other[name][:, [0, 2]], tensor[:, [3, 1]]) < FP32


@pytest.mark.parametrize(
    "options",
    [
        {"family": "mamba"},
        {"family": "mamba", "selection_norm_eps": 1e-6, "tie_embeddings": True},
        {"family": "mamba", "selection_norm_eps": 1e-2, "state_size": 5, "dt_rank": 1},
        {"family": "mamba", "bias": True, "conv_bias": False, "conv_kernel": 2},
        {"family": "mamba", "conv_kernel": 8, "state_size": 17, "inner": 64, "dt_rank": 33},
        {"family": "mamba", "state_size": 1, "inner": 7, "n_layers": 1},
        {"family": "mamba", "residual_in_fp32": False},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int8-bfloat16"])
def test_mamba_as_in_plain_torch(options: dict[str, object], kind: str) -> None:
    torch.manual_seed(0)
    model = mamba(options)
    if kind.endswith("bfloat16"):
        model = model.bfloat16()
    given: LanguageModel = model
    weights = dict(model.state_dict())
    if kind.startswith("int8"):
        given, weights = quantized(model)
    tokens = random_tokens(29, 2, 19)
    expected = plain_logits(model, weights, tokens)
    packed = CpuBackend(given)
    state, other = packed.new_state(4), packed.new_state(4)
    by_step = stepped(packed, tokens, state, int32([3, 1]))
    by_prompt = torch.stack([prefilled(packed, row, other, 2 * i) for i, row in enumerate(tokens)])
    tolerance = BF16 if kind.endswith("bfloat16") else FP32
    assert relative_error(by_step, expected) < tolerance
    assert relative_error(by_prompt, by_step) < FP32
    for name, tensor in state.named.items():
        assert relative_error(other[name][:, [0, 2]], tensor[:, [3, 1]]) < FP32


@pytest.mark.parametrize(
    "options",
    [
        {"family": "mamba2"},
        {"family": "mamba2", "groups": 2, "tie_embeddings": True},
        {"family": "mamba2", "groups": 4, "state_size": 5, "head_dim": 3, "least_dt": 0.02},
        {"family": "mamba2", "bias": True, "conv_bias": False, "conv_kernel": 2, "most_dt": 0.05},
        {"family": "mamba2", "conv_kernel": 8, "state_size": 130, "heads": 2, "head_dim": 80},
        {"family": "mamba2", "state_size": 1, "heads": 7, "head_dim": 1, "n_layers": 1},
        {"family": "mamba2", "heads": 33, "head_dim": 4, "groups": 3},
        {"family": "mamba2", "residual_in_fp32": False, "norm_eps": 1e-2},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int8-bfloat16"])
def test_mamba2_as_in_plain_torch(options: dict[str, object], kind: str) -> None:
    torch.manual_seed(0)
    model = mamba2(options)
    if kind.endswith("bfloat16"):
        model = model.bfloat16()
    given: LanguageModel = model
    weights = dict(model.state_dict())
    if kind.startswith("int8"):
        given, weights = quantized(model)
    tokens = random_tokens(29, 2, 39)  # blocks of 16 and of 7
    expected = plain_logits(model, weights, tokens)
    packed = CpuBackend(given)
    state, other = packed.new_state(4), packed.new_state(4)
    by_step = stepped(packed, tokens, state, int32([3, 1]))
    by_prompt = torch.stack([prefilled(packed, row, other, 2 * i) for i, row in enumerate(tokens)])
    # A step adds up in another order than a block, and with bfloat16 weights activations are
    # rounded behind it.
    tolerance = BF16 if kind.endswith("bfloat16") else FP32
    assert relative_error(by_step, expected) < tolerance
    assert relative_error(by_prompt, expected) < tolerance
    for name, tensor in state.named.items():
        assert relative_error(other[name][:, [0, 2]], tensor[:, [3, 1]]) < tolerance


@pytest.mark.parametrize("options", [{}, {"groups": 3, "state_size": 5, "bias": True}])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8-bfloat16"])
def test_splits_of_mamba2_s_prompts_at_blocks_change_no_bit(
    options: dict[str, object], kind: str, threads: Callable[[int], None]
) -> None:
    model = wide({"family": "mamba2", **options})
    if kind.endswith("bfloat16"):
        model = model.bfloat16()
    if kind.startswith("int8"):
        model, _ = quantized(model)
    packed, tokens = CpuBackend(model), random_tokens(211, 2 * SCAN_CHUNK + 40)
    state = packed.new_state(1)
    threads(1)
    expected = prefilled(packed, tokens, state, 0)
    for count, cuts in ((1, [SCAN_CHUNK]), (2, []), (2, [16, 48]), (3, [SCAN_CHUNK, 256])):
        threads(count)
        other = packed.new_state(1)
        parts = [prefilled(packed, part, other, 0) for part in tokens.tensor_split(cuts)]
        assert torch.equal(torch.cat(parts), expected)
        assert same_rows(other, [0], state, [0])


@pytest.mark.parametrize("options", [{}, {"selection_norm_eps": 1e-6, "state_size": 5}])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8-bfloat16"])
def test_no_split_of_mamba_s_prompts_changes_a_bit(options: dict[str, object], kind: str) -> None:
    """Its recurrence goes from token to token, and steps do what prompts do."""
    model = wide({"family": "mamba", **options})
    if kind.endswith("bfloat16"):
        model = model.bfloat16()
    if kind.startswith("int8"):
        model, _ = quantized(model)
    packed, tokens = CpuBackend(model), random_tokens(211, 190)
    state = packed.new_state(1)
    expected = prefilled(packed, tokens, state, 0)
    for cuts in ([1], [2, 3, 70], [128], [129, 189]):
        other = packed.new_state(1)
        parts = [prefilled(packed, part, other, 0) for part in tokens.tensor_split(cuts)]
        assert torch.equal(torch.cat(parts), expected)
        assert same_rows(other, [0], state, [0])
    steps, few = packed.new_state(1), tokens[None, :40]
    assert torch.equal(stepped(packed, few, steps, int32([0]))[0], expected[:40])


@pytest.mark.parametrize(
    "options",
    [
        {"family": "mamba", "inner": 510},
        {"family": "mamba", "inner": 510, "state_size": 5},
        {"family": "mamba2"},
        {"family": "mamba2", "state_size": 5, "groups": 2},
    ],
)
def test_states_in_bfloat16_are_rounded_at_the_end(options: dict[str, object]) -> None:
    """A call computes what it does from the same states in fp32."""
    exact = CpuBackend(wide(options))
    packed = CpuBackend(wide({**options, "state_dtype": "bfloat16"}))
    tokens = random_tokens(211, 60)
    wide_states, narrow = exact.new_state(3), packed.new_state(3)
    assert narrow["ssm"].dtype == torch.bfloat16

    def check(read: Callable[[CpuBackend, ModelState], Tensor]) -> None:
        wide_states["ssm"].copy_(narrow["ssm"])
        assert torch.equal(read(packed, narrow), read(exact, wide_states))
        assert torch.equal(narrow["ssm"], wide_states["ssm"].bfloat16())
        assert torch.equal(narrow["conv"], wide_states["conv"])

    bounds, slots = int32([0, 30, 31, 51]), int32([2, 0, -1])
    check(lambda backend, state: backend.prefill(tokens[:51], bounds, state, slots)[:31])
    check(lambda backend, state: prefilled(backend, tokens[51:], state, 2))
    check(lambda backend, state: backend.step(tokens[:1], state, int32([1])))
    check(lambda backend, state: backend.step(tokens[:6], state, int32([2, 0, -1, -1, 1, -1]))[:2])


@pytest.mark.parametrize("eps", [1e-2, 1e-6])
def test_the_gated_norm_of_states_near_zero(eps: float) -> None:
    """There its epsilon counts."""
    torch.manual_seed(0)
    model = hgrn({"family": "hgrn", "norm_eps": eps})
    with torch.no_grad():
        for layer in model.layers:
            layer.gates.weight[: model.config.inner] *= 1e-3
    tokens = random_tokens(model.config.vocab_size, 1, 9)
    packed = CpuBackend(model)
    got = stepped(packed, tokens, packed.new_state(1), int32([0]))
    assert relative_error(got, plain_logits(model, dict(model.state_dict()), tokens)) < FP32


@pytest.mark.parametrize(
    "options",
    [
        {"cell": "mingru"},
        {"cell": "mingru", "conv_kernel": 4, "tie_embeddings": True},
        {"family": "hgrn"},
        {"family": "hgrn", "conv_kernel": 4},
        {"family": "mamba"},
        pytest.param(
            {"family": "mamba", "selection_norm_eps": 1e-6, "state_size": 5, "bias": True},
            marks=pytest.mark.slow,
        ),
        {"family": "mamba2"},
        pytest.param(
            {"family": "mamba2", "groups": 3, "state_size": 5, "bias": True},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"cell": "hgrn", "expansion": 1.0, "out_projection": False, "conv_kernel": 3},
            marks=pytest.mark.slow,
        ),
        {"cell": "minlstm", "mlp_ratio": 0.0, "head_bias": True},
        pytest.param(
            {"cell": "minlstm", "expansion": 1.0, "out_projection": False, "conv_kernel": 3},
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int8-bfloat16"])
def test_a_row_has_the_same_bits_in_every_company(
    options: dict[str, object], kind: str, threads: Callable[[int], None]
) -> None:
    """Batch sizes, slots, padding rows and threads: no bit of logits or state differs."""
    model = wide(options)
    if kind.endswith("bfloat16"):
        model = model.bfloat16()
    if kind.startswith("int8"):
        model, _ = quantized(model)
    packed = CpuBackend(model)
    rows = 131  # blocks of many, and beside them one, two or three
    tokens = random_tokens(packed.config.vocab_size, rows, 3)
    threads(1)
    alone = packed.new_state(rows)
    expected = torch.cat(
        [stepped(packed, tokens[row : row + 1], alone, int32([row])) for row in range(rows)]
    )
    assert expected.isfinite().all()
    several = (1, 3, 17, 70, rows)  # as the threads share the work
    for count, batches in (
        (1, (1, 2, 3, 4, 5, 7, 12, 16, 17, 33, 47, 49, 70, 129, 130, rows)),
        (2, several),
        (3, several),
    ):
        threads(count)
        for batch in batches:
            state = packed.new_state(rows + 5)
            slots = torch.randperm(rows + 5, generator=torch.Generator().manual_seed(batch))
            slots = slots[:batch].to(torch.int32)
            got = stepped(packed, tokens[:batch], state, slots)
            assert torch.equal(got, expected[:batch])
            assert same_rows(state, slots.tolist(), alone, list(range(batch)))


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_subnormal_numbers_have_the_same_bits_in_every_company(kind: str) -> None:
    """Instruction sets differ in whether such weights and products count."""
    model = wide({"cell": "mingru", "tie_embeddings": False})
    with torch.no_grad():
        assert model.head is not None
        model.head.weight[::2] *= 1e-36  # some of these are, and many of their products
    packed = CpuBackend(model.bfloat16() if kind == "bfloat16" else model)
    tokens = random_tokens(211, 20, 3)
    together = packed.new_state(20)
    expected = stepped(packed, tokens, together, int32(list(range(20))))
    tiny = expected[..., ::2]
    assert tiny.abs().max() < 1e-34 and (tiny != 0).any()
    for first, last in [(0, 1), (1, 3), (3, 6), (6, 20)]:
        state = packed.new_state(20)
        slots = list(range(first, last))
        got = stepped(packed, tokens[first:last], state, int32(slots))
        assert torch.equal(got, expected[first:last])
        assert torch.equal(state["cell"][:, slots], together["cell"][:, slots])


@pytest.mark.parametrize(
    "options",
    [
        {"cell": "mingru"},
        {"cell": "minlstm"},
        {"family": "hgrn"},
        {"family": "mamba", "selection_norm_eps": 1e-6},
        {"family": "mamba2", "groups": 2},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prompt_has_the_same_bits_in_every_company(
    options: dict[str, object], dtype: torch.dtype
) -> None:
    packed = CpuBackend(wide({**options, "conv_kernel": 4}).to(dtype))
    lengths = [1, 130, 7, 64]
    prompts = [random_tokens(211, length, seed=length) for length in lengths]
    together = packed.new_state(9)
    bounds = int32([0, *torch.tensor(lengths).cumsum(0).tolist()])
    slots = [8, 0, 3, 4]
    hidden = packed.prefill(torch.cat(prompts), bounds, together, int32(slots)).split(lengths)
    for prompt, slot, got in zip(prompts, slots, hidden, strict=True):
        alone = packed.new_state(1)
        expected = packed.prefill(prompt, int32([0, len(prompt)]), alone, int32([0]))
        assert torch.equal(got, expected)
        assert same_rows(together, [slot], alone, [0])


@pytest.mark.parametrize(
    "options",
    [
        *(
            {**one, "conv_kernel": conv}
            for one in ({"cell": "mingru"}, {"family": "hgrn"})
            for conv in (0, 3)
        ),
        {"family": "mamba"},
        {"family": "mamba2", "groups": 2},
    ],
)
def test_padding_of_prompts_changes_nothing(
    options: dict[str, object], threads: Callable[[int], None]
) -> None:
    """Sequences that are empty or have no slot, and tokens behind the last one."""
    packed = CpuBackend(wide(options))
    tokens = random_tokens(211, 160)
    bounds, slots = int32([0, 3, 3, 10, 152]), int32([2, 1, -1, 0])
    alone = packed.new_state(3)
    expected = [
        packed.prefill(tokens[begin:end], int32([0, end - begin]), alone, int32([slot]))
        for begin, end, slot in ((0, 3, 2), (10, 152, 0))
    ]
    for count in (1, 2, 3):
        threads(count)
        state = packed.new_state(3)
        hidden = packed.prefill(tokens, bounds, state, slots)
        assert torch.equal(hidden[:3], expected[0])
        assert torch.equal(hidden[10:152], expected[1])
        assert same_rows(state, [0, 1, 2], alone, [0, 1, 2])


@pytest.mark.parametrize(
    "model",
    [
        *(partial(build, {"cell": "mingru", "conv_kernel": conv}) for conv in (0, 3)),
        *(partial(hgrn, {"family": "hgrn", "conv_kernel": conv}) for conv in (0, 3)),
        partial(mamba, {"family": "mamba", "bias": True}),
        partial(mamba2, {"family": "mamba2", "bias": True}),
    ],
)
def test_a_padding_row_changes_nothing(model: Callable[[], LanguageModel]) -> None:
    packed = CpuBackend(model())
    state, expected = packed.new_state(3), packed.new_state(3)
    tokens = random_tokens(29, 1)
    wanted = packed.step(tokens, expected, int32([1]))
    padded = torch.tensor([-7, int(tokens), 2**40])  # nobody reads the token of a padding row
    got = packed.step(padded, state, int32([-1, 1, -3]))
    assert torch.equal(got[1], wanted[0])
    assert same_rows(state, [0, 1, 2], expected, [0, 1, 2])


def test_int32_and_int64_tokens_and_a_view_of_a_pool() -> None:
    packed = CpuBackend(build({"cell": "minlstm", "conv_kernel": 3}))
    pool = packed.new_state(10)
    assert pool.get("conv") is not None
    part = ModelState({name: tensor[:, 2:8] for name, tensor in pool.named.items()})
    whole = packed.new_state(6)
    tokens = random_tokens(29, 3)
    got = packed.step(tokens.int(), part, int32([0, 4, 5]))
    assert torch.equal(got, packed.step(tokens, whole, int32([0, 4, 5])))
    assert torch.equal(pool["cell"][:, 2:8], whole["cell"])
    assert torch.equal(pool["cell"][:, :2], packed.new_state(2)["cell"])


def test_an_empty_batch() -> None:
    packed = CpuBackend(build({"cell": "mingru"}))
    none = torch.zeros(0, dtype=torch.int64)
    assert packed.step(none, packed.new_state(1), int32([])).shape == (0, 29)
    assert packed.prefill(none, int32([0]), packed.new_state(1), int32([])).shape == (0, 20)
    assert packed.logits(torch.zeros(0, 20)).shape == (0, 29)


def test_gelu_over_its_whole_range() -> None:
    model = build({"cell": "mingru", "mlp_ratio": 50.0, "n_layers": 1})
    with torch.no_grad():
        model.layers[0].mlp.up.bias.copy_(torch.linspace(-16, 16, 1000))
        model.layers[0].mlp.up.weight.mul_(0.1)
        model.layers[0].mlp.down.weight.mul_(20)
    tokens = random_tokens(29, 1, 3)
    packed = CpuBackend(model)
    got = stepped(packed, tokens, packed.new_state(1), int32([0]))[0]
    expected = reference.logits(model.config, dict(model.state_dict()), tokens[0])
    assert relative_error(got, expected) < FP32


def test_packing_moves_the_weights_when_asked() -> None:
    model = build({"cell": "mingru", "conv_kernel": 3, "tie_embeddings": True})
    kept = CpuBackend(model)
    assert sum(weight.numel() for weight in model.parameters()) == kept.parameters_count
    taken = CpuBackend(copy.deepcopy(model), take=True)
    tokens = random_tokens(29, 2)
    a = kept.step(tokens, kept.new_state(2), int32([0, 1]))
    assert torch.equal(a, taken.step(tokens, taken.new_state(2), int32([0, 1])))
    state_space = mamba({"family": "mamba"}), mamba2({"family": "mamba2"})
    for given in (model, hgrn({"family": "hgrn"}), *state_space):
        CpuBackend(given, take=True)
        assert sum(weight.numel() for weight in given.parameters()) == 0


def test_pack_matrix_keeps_every_number_once() -> None:
    weight = torch.arange(2 * 40 * 5, dtype=torch.float32).view(80, 5) + 1
    packed = pack_matrix(weight, gates=2)
    assert packed.numel() == 6 * 16 * 5  # two gates of three panels
    assert sorted(packed[packed != 0].tolist()) == weight.flatten().tolist()


def test_packing_does_not_import_the_compiler() -> None:
    """Some operators on the meta device do, and a start would take seconds longer."""
    code = """
import sys, torch
from engine.models import loader
from engine.models.backends.cpu import CpuBackend
model, _ = loader.load_model(loader.resolve("shakespeare-mingru"), "cpu", None, "int8")
CpuBackend(model, take=True)
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_models_that_cannot_be_packed() -> None:
    assert supports(build({"cell": "mingru"}).double()) == "weights are torch.float64"
    assert supports(build({"cell": "mingru"}).half()) == "weights are torch.float16"
    assert supports(build({"cell": "mingru"})) is None
    assert supports(hgrn({"family": "hgrn", "conv_kernel": 8})) is None
    long = hgrn({"family": "hgrn", "conv_kernel": 9})
    assert supports(long) == "convolutions between gates and recurrence of more than 8 taps"
    other = hgrn({"family": "hgrn"})
    other.layers[1].gated_norm.eps = 1e-3
    assert supports(other) == "norms of different epsilons"
    assert supports(mamba({"family": "mamba", "conv_kernel": 8})) is None
    long_of_mamba = mamba({"family": "mamba", "conv_kernel": 9})
    assert supports(long_of_mamba) == "convolutions of more than 8 taps"
    unlike = mamba({"family": "mamba"})
    unlike.layers[2].selection_norm_eps = 1e-6
    assert supports(unlike) == "layers differ in the recurrence"
    unlike = mamba({"family": "mamba"})
    unlike.layers[1].norm.eps = 1e-3
    assert supports(unlike) == "norms of different epsilons"
    assert supports(mamba2({"family": "mamba2", "conv_kernel": 8, "state_size": 1024})) is None
    long_of_mamba2 = mamba2({"family": "mamba2", "conv_kernel": 9})
    assert supports(long_of_mamba2) == "convolutions of more than 8 taps"
    many = mamba2({"family": "mamba2", "state_size": 1025})
    assert supports(many) == "more than 1,024 states"
    unlike_of_mamba2 = mamba2({"family": "mamba2"})
    unlike_of_mamba2.layers[1].dt_limit = (0.0, 0.1)
    assert supports(unlike_of_mamba2) == "layers differ in the recurrence"
    unlike_of_mamba2 = mamba2({"family": "mamba2"})
    unlike_of_mamba2.layers[1].gated_norm.eps = 1e-3
    assert supports(unlike_of_mamba2) == "norms of different epsilons"
    with pytest.raises(ValueError, match="float32, bfloat16 or int8"):
        CpuBackend(build({"cell": "mingru"}).half())
    model, _ = quantized(build({"cell": "mingru"}))
    model.layers[0].cell.gates.weight[0, 0] = -128
    with pytest.raises(ValueError, match="-127 to 127"):
        CpuBackend(model)


@pytest.mark.parametrize(
    ("tokens", "slots", "message"),
    [
        ([29], [0], r"tokens\[0\] is 29; allowed: 0 to 28"),
        ([-1], [0], r"tokens\[0\] is -1"),
        ([1], [2], "slots"),
        ([1, 2], [0], "slots"),
    ],
)
def test_bad_tokens_and_slots_raise(tokens: list[int], slots: list[int], message: str) -> None:
    packed = CpuBackend(build({"cell": "mingru"}))
    with pytest.raises(RuntimeError, match=message):
        packed.step(torch.tensor(tokens), packed.new_state(2), int32(slots))


def test_state_of_another_model_raises() -> None:
    packed = CpuBackend(build({"cell": "mingru"}))
    other = CpuBackend(build({"cell": "mingru", "conv_kernel": 3}))
    token, slot = torch.tensor([1]), int32([0])
    with pytest.raises(RuntimeError, match="conv must be given"):
        other.step(token, packed.new_state(1), slot)
    with pytest.raises(RuntimeError, match="cell must be"):
        packed.step(token, ModelState({"cell": torch.zeros(2, 1, 31)}), slot)
    with pytest.raises(RuntimeError, match="hidden must be"):
        packed.logits(torch.zeros(1, 21))
    with pytest.raises(RuntimeError, match="tokens must be int32 or int64"):
        packed.step(torch.tensor([1.0]), packed.new_state(1), slot)


def test_state_of_another_mamba_model_raises() -> None:
    packed = CpuBackend(mamba({"family": "mamba"}))
    token, slot = torch.tensor([1]), int32([0])
    state = packed.new_state(1)
    with pytest.raises(RuntimeError, match=r"cell must be \[layers, slots, inner, states\]"):
        packed.step(token, ModelState({**state.named, "ssm": state["ssm"][..., :5]}), slot)
    apart = ModelState({**state.named, "ssm": state["ssm"].mT.contiguous().mT})
    with pytest.raises(RuntimeError, match=r"rows \[inner, states\] must be contiguous"):
        packed.step(token, apart, slot)
    with pytest.raises(RuntimeError, match="conv must be given"):
        packed.step(token, ModelState({"ssm": state["ssm"]}), slot)
    with pytest.raises(RuntimeError, match="i_conv and f_conv must not be given"):
        given = packed._weights, packed._plan, state["ssm"], state["conv"], state["conv"]
        torch.ops.minserve.lm_step(token, slot, *given)


def test_state_of_another_mamba2_model_raises() -> None:
    packed = CpuBackend(mamba2({"family": "mamba2"}))
    token, slot = torch.tensor([1]), int32([0])
    state = packed.new_state(1)
    ssm, conv = state["ssm"], state["conv"]
    for given in (ssm[..., :5], ssm.flatten(2, 3)):
        with pytest.raises(
            RuntimeError, match=r"cell must be \[layers, slots, heads, head_dim, states\]"
        ):
            packed.step(token, ModelState({"ssm": given, "conv": conv}), slot)
    for apart in (ssm.mT.contiguous().mT, ssm.transpose(2, 3).contiguous().transpose(2, 3)):
        with pytest.raises(RuntimeError, match=r"rows \[heads, head_dim, states\] must be"):
            packed.step(token, ModelState({"ssm": apart, "conv": conv}), slot)
    with pytest.raises(RuntimeError, match=r"conv must be \[layers, slots, taps - 1, channels\]"):
        packed.step(token, ModelState({"ssm": ssm, "conv": conv[..., :28]}), slot)


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (1, 1025, "1025 states; allowed: 1 to 1024"),
        (2, 3, "28 channels of 3 heads of 7"),
        (4, 3, "3 groups of 4 heads"),
        (11, 29, "29 channels of 4 heads of 7"),
    ],
)
def test_a_plan_of_mamba2_must_fit_together(position: int, value: int, message: str) -> None:
    packed = CpuBackend(mamba2({"family": "mamba2"}))
    packed._plan[position] = value
    with pytest.raises(RuntimeError, match=message):
        packed.step(torch.tensor([1]), packed.new_state(1), int32([0]))


@pytest.mark.parametrize(
    ("model", "any_numbers"),
    [
        (partial(build, {"cell": "mingru"}), (6,)),
        (partial(hgrn, {"family": "hgrn", "conv_kernel": 3}), (6,)),
        (partial(mamba, {"family": "mamba"}), (4, 6)),
        (partial(mamba2, {"family": "mamba2"}), (5, 6, 8)),
    ],
)
def test_a_plan_that_leads_out_of_the_weights_raises(
    model: Callable[[], LanguageModel], any_numbers: tuple[int, ...]
) -> None:
    packed = CpuBackend(model())
    weights, plan = packed._weights, packed._plan
    state = [None if name is None else packed.new_state(1)[name] for name in packed._states]
    call = torch.ops.minserve.lm_step
    arguments = torch.tensor([1]), int32([0])
    for position in range(plan.numel()):
        changed = plan.clone()
        changed[position] = 2**40
        if position in any_numbers:  # epsilons and limits of time steps
            continue
        with pytest.raises(RuntimeError, match="plan"):
            call(*arguments, weights, changed, *state)
    with pytest.raises(RuntimeError, match="too early"):
        call(*arguments, weights, plan[:-1], *state)
    with pytest.raises(RuntimeError, match="too many"):
        call(*arguments, weights, torch.cat([plan, plan[:1]]), *state)
    with pytest.raises(RuntimeError, match="plan"):
        call(*arguments, weights[:-64], plan, *state)


def test_calls_from_several_threads_at_once(threads: Callable[[int], None]) -> None:
    """Each call has a team of its own, and none waits for threads that another call holds."""
    packed = CpuBackend(wide({"cell": "minlstm"}))
    tokens = random_tokens(211, 4, 20)
    threads(2)
    expected = stepped(packed, tokens, packed.new_state(4), int32([0, 1, 2, 3]))

    def run(row: int) -> Tensor:
        torch.set_num_threads(3)  # more threads in all than most machines have
        return stepped(packed, tokens[row : row + 1], packed.new_state(1), int32([0]))

    with ThreadPoolExecutor(4) as pool:
        for row, got in enumerate(pool.map(run, range(4), timeout=60)):
            assert torch.equal(got, expected[row : row + 1])


@pytest.mark.parametrize(
    "options",
    [
        *(
            {"cell": cell, "mlp_ratio": ratio}
            for cell in ("mingru", "minlstm")
            for ratio in (2.3, 20.0)
        ),
        *({"family": "hgrn", "mlp_hidden": hidden} for hidden in (371, 6000)),
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8-bfloat16"])
def test_splits_at_chunk_multiples_change_no_bit(options: dict[str, object], kind: str) -> None:
    """With MLPs of short rows, and of rows that a cache has few of."""
    model = wide({**options, "conv_kernel": 3})
    if kind.endswith("bfloat16"):
        model = model.bfloat16()
    if kind.startswith("int8"):
        model, _ = quantized(model)
    packed = CpuBackend(model)
    tokens = random_tokens(211, 2 * SCAN_CHUNK + 40)
    state = packed.new_state(1)
    expected = prefilled(packed, tokens, state, 0)
    for first in (SCAN_CHUNK, 2 * SCAN_CHUNK):
        other = packed.new_state(1)
        parts = [prefilled(packed, part, other, 0) for part in tokens.tensor_split([first])]
        assert torch.equal(torch.cat(parts), expected)
        assert same_rows(other, [0], state, [0])
