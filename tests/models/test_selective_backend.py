"""SelectiveBackend computes what the model does, within the rounding of bfloat16."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from engine.config import SCAN_CHUNK, ModelConfig
from engine.models import registry
from engine.models.backends import dispatch, selective
from engine.models.backends.selective import SelectiveBackend
from engine.models.backends.selector import explain_backend, select_backend
from engine.models.language_model import LanguageModel
from engine.models.mamba.config import MambaConfig
from engine.models.mamba2.config import Mamba2Config
from tests.models.variants import int32, relative_error

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")

_BASE = MambaConfig(vocab_size=300, d_model=128, n_layers=3, inner=256, state_size=16, dt_rank=8)
_SSD = Mamba2Config(
    vocab_size=300, d_model=128, n_layers=3, heads=8, head_dim=64, state_size=64, groups=1
)
CONFIGS = {
    "mamba": _BASE,
    "no multiple of 64": dataclasses.replace(_BASE, d_model=96, inner=192),
    "biases": dataclasses.replace(_BASE, bias=True, conv_bias=False),
    "two taps": dataclasses.replace(_BASE, conv_kernel=2),
    "narrow residual stream": dataclasses.replace(_BASE, residual_in_fp32=False),
    "falcon-mamba": dataclasses.replace(_BASE, selection_norm_eps=1e-6, dt_rank=264),
    "bfloat16 states": dataclasses.replace(_BASE, state_dtype="bfloat16"),
    "large": dataclasses.replace(
        _BASE, vocab_size=50_280, d_model=768, n_layers=2, inner=1536, dt_rank=48
    ),
    "mamba-2 by tokens": dataclasses.replace(_SSD, head_dim=24, state_size=20, groups=2),
    "mamba-2": dataclasses.replace(_SSD, groups=2, bias=True),
    "mamba-2, bfloat16 states": dataclasses.replace(_SSD, state_dtype="bfloat16"),
    "mamba-2, large": dataclasses.replace(
        _SSD, vocab_size=50_280, d_model=768, n_layers=2, heads=24, state_size=128
    ),
}


def build(config: ModelConfig) -> LanguageModel:
    torch.manual_seed(1)
    model = registry.build(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(CUDA, torch.bfloat16)


def exact_of(model: LanguageModel) -> LanguageModel:
    """The same weights, rounded as they are, computed with in fp32."""
    exact = registry.build(model.config.with_state_dtype("float32"))
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    return exact.to(CUDA).eval()


def random_tokens(count: int, vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (count,), dtype=torch.int32, device=CUDA)


@pytest.mark.parametrize("path", [0, 1])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_model(
    name: str, path: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(CONFIGS[name])
    exact, backend = exact_of(model), select_backend(model, CUDA)
    assert isinstance(backend, SelectiveBackend)
    assert explain_backend(model, CUDA) == backend.info
    if path >= len(backend.paths):
        pytest.skip("one path on this GPU")
    chosen = backend.paths[path]
    monkeypatch.setattr(
        dispatch,
        "quickest_graph_of",
        lambda ways, lasting: min(path, len(ways) - 1),
    )
    backend.prepare([1, 40, 64], [64, 512], [1, 40])
    bounds = int32([0, 1, 1, 151, 451, 491], "cuda")  # the fourth is padding, as is the tail
    slots, rows = int32([5, 0, 2, -1, 1], "cuda"), 70
    prompt = random_tokens(512, model.config.vocab_size)
    ours, theirs = model.new_state(rows), exact.new_state(rows)
    assert chosen.prefill is not None
    hidden = chosen.prefill(prompt, bounds, ours, slots)
    wanted = exact.logits(exact.prefill(prompt, bounds, theirs, slots))
    kept = torch.cat([torch.arange(151), torch.arange(451, 491)]).cuda()
    assert relative_error(backend.logits(hidden)[kept], wanted[kept]) < 0.05
    for batch in (1, 3, 40, 64):
        each = torch.arange(batch, dtype=torch.int32, device=CUDA)
        each[batch // 2] = -1 if batch > 1 else 0
        tokens = random_tokens(batch, model.config.vocab_size)
        got = chosen.step(tokens, ours, each)
        expected = exact.logits(exact.step(tokens, theirs, each))
        real = each >= 0
        assert relative_error(got[real], expected[real]) < 0.05, batch
    for state, tensor in theirs.named.items():
        assert relative_error(ours[state].float(), tensor.float()) < 0.1


@pytest.mark.parametrize("name", CONFIGS)
def test_deterministic_rows_do_not_depend_on_others(name: str) -> None:
    model = build(CONFIGS[name])
    if selective.supports(model, CUDA, deterministic=True) is not None:
        pytest.skip("sums in a fixed order are for Hopper")
    backend = select_backend(model, CUDA, deterministic=True)
    assert isinstance(backend, SelectiveBackend)
    lengths = [SCAN_CHUNK + 7, 1, 300, 40]
    texts = [random_tokens(length, model.config.vocab_size) for length in lengths]
    bounds = int32([0, *torch.tensor(lengths).cumsum(0).tolist()], "cuda")
    together = model.new_state(8)
    slots = int32([3, 0, 6, 1], "cuda")
    hidden = backend.prefill(torch.cat(texts), bounds, together, slots)
    step = backend.step(torch.full((4,), 7, dtype=torch.int32, device=CUDA), together, slots)
    for index, text in enumerate(texts):
        alone, slot = model.new_state(1), int32([0], "cuda")
        first, last = int(bounds[index]), int(bounds[index + 1])
        cuts = [text] if len(text) <= SCAN_CHUNK else [text[:SCAN_CHUNK], text[SCAN_CHUNK:]]
        if "bfloat16 states" in name:  # rounded at the end of every call
            cuts = [text]
        parts = [backend.prefill(cut, int32([0, len(cut)], "cuda"), alone, slot) for cut in cuts]
        assert torch.equal(torch.cat(parts), hidden[first:last])
        assert torch.equal(
            backend.logits(parts[-1]), backend.logits(hidden[last - len(parts[-1]) : last])
        )
        token = torch.full((1,), 7, dtype=torch.int32, device=CUDA)
        assert torch.equal(backend.step(token, alone, slot)[0], step[index])
        for state, tensor in alone.named.items():
            assert torch.equal(tensor[:, 0], together[state][:, slots[index]])


def test_graphs_replay_steps_of_other_sequences() -> None:
    model = build(_BASE)
    backend = select_backend(model, CUDA)
    state, tokens = model.new_state(9), random_tokens(3, 300)
    slots = int32([4, -1, 0], "cuda")
    backend.step(tokens, state, slots)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backend.step(tokens, state, slots)
    tokens.copy_(random_tokens(3, 300))
    slots.copy_(int32([2, 4, -1], "cuda"))
    before = {name: tensor.clone() for name, tensor in state.named.items()}
    graph.replay()
    replayed = captured.clone()
    for name, tensor in state.named.items():
        tensor.copy_(before[name])
    assert torch.equal(backend.step(tokens, state, slots)[:2], replayed[:2])
