"""The models that `loadtest.engine` measures: sizes with random weights, bundled ones, folders.

Random weights are drawn on the device, so that 1.3 B of them take a moment. They are scaled so that
a model behaves like a trained one where it matters here: activations keep their size through 24
layers, logits are neither constant nor dominated by the token just read, and greedy decoding visits
many tokens.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.config import DtypeName, ModelConfig
from engine.models import loader, registry
from engine.models.hgrn.config import HgrnConfig
from engine.models.language_model import LanguageModel
from engine.models.mamba.config import MambaConfig
from engine.models.mamba2.config import Mamba2Config
from engine.models.minrnn.config import CellName, MinRnnConfig
from engine.models.program import Residual

#: Our own block. The name says the parameters with minGRU cells; minLSTM has a third gate.
MINRNN_SIZES: dict[str, dict[str, Any]] = {
    "6.3m": {"d_model": 384, "n_layers": 3, "expansion": 2.0, "vocab_size": 66},
    "25m": {  # half of it is the embedding and the head
        "d_model": 384,
        "n_layers": 6,
        "expansion": 2.0,
        "vocab_size": 32_000,
        "tie_embeddings": True,
    },
    "113m": {
        "d_model": 768,
        "n_layers": 12,
        "expansion": 1.5,
        "vocab_size": 32_000,
        "tie_embeddings": True,
    },
    "1.3b": {
        "d_model": 2048,
        "n_layers": 24,
        "expansion": 1.5,
        "vocab_size": 32_000,
        "tie_embeddings": True,
    },
}
#: HGRN of the widths of the published models (1.3 B: fla-hub/hgrn-1.3B), and one near 113m.
HGRN_SIZES: dict[str, dict[str, Any]] = {
    "hgrn-113m": {
        "d_model": 768,
        "n_layers": 12,
        "inner": 768,
        "mlp_hidden": 2176,
        "vocab_size": 32_000,
        "tie_embeddings": True,
    },
    "hgrn-1.3b": {
        "d_model": 2048,
        "n_layers": 24,
        "inner": 2048,
        "mlp_hidden": 5632,
        "vocab_size": 32_000,
    },
}
#: Mamba of the shapes of state-spaces/mamba-130m, mamba-1.4b and mamba-2.8b.
MAMBA_SIZES: dict[str, dict[str, Any]] = {
    name: {
        "d_model": width,
        "n_layers": layers,
        "inner": 2 * width,
        "state_size": 16,
        "dt_rank": width // 16,
        "vocab_size": 50_280,
    }
    for name, width, layers in (
        ("mamba-130m", 768, 24),
        ("mamba-1.4b", 2048, 48),
        ("mamba-2.8b", 2560, 64),
    )
}
#: Mamba-2 of the shapes of state-spaces/mamba2-130m and mamba2-1.3b.
MAMBA2_SIZES: dict[str, dict[str, Any]] = {
    name: {
        "d_model": width,
        "n_layers": layers,
        "heads": width // 32,
        "head_dim": 64,
        "state_size": 128,
        "vocab_size": 50_288,
    }
    for name, width, layers in (("mamba2-130m", 768, 24), ("mamba2-1.3b", 2048, 48))
}
SIZES = {**MINRNN_SIZES, **HGRN_SIZES, **MAMBA_SIZES, **MAMBA2_SIZES}
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Subject:
    """One model to measure; `size` is a key of SIZES, or None for a checkpoint."""

    name: str
    size: str | None
    folder: Path
    config: ModelConfig
    model: LanguageModel  # the same weights in plain modules, for limits and peers


def cells_of(size: str, asked: Sequence[CellName]) -> Sequence[str]:
    """Return the cells with which a size is measured: those asked for, or the only one it has."""
    return asked if size in MINRNN_SIZES else [size_config(size, "", "bfloat16").cell]


def size_config(size: str, cell: str, dtype: DtypeName) -> ModelConfig:
    """Return the config of a size. Raises KeyError for a name that is not in SIZES."""
    if size in HGRN_SIZES:
        return HgrnConfig(dtype=dtype, **SIZES[size])
    if size in MAMBA_SIZES:
        return MambaConfig(dtype=dtype, tie_embeddings=True, norm_eps=1e-5, **SIZES[size])
    if size in MAMBA2_SIZES:
        return Mamba2Config(dtype=dtype, tie_embeddings=True, norm_eps=1e-5, **SIZES[size])
    return MinRnnConfig(cell=cast("CellName", cell), dtype=dtype, mlp_ratio=4.0, **SIZES[size])


@torch.no_grad()
def random_model(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> LanguageModel:
    """Return a model with random weights, drawn on the device.

    Every linear map keeps the variance of its input; maps that end a residual branch divide it by
    the number of branches. Their rows have mean 0, because hidden states and GELU's outputs have a
    large common mean, which would otherwise give every token the same logits. What decides how
    long a state lasts in Mamba has its authors' initial values.
    """
    model = _meta(config).to(dtype).to_empty(device=device).eval()
    random = torch.Generator(device).manual_seed(seed)
    branches = sum(isinstance(one, Residual) for layer in model.program().layers for one in layer)
    for name, weight in model.named_parameters():
        if name.endswith(_STATE_SPACE):
            _initialize_state_space(name, weight, random)
            continue
        if weight.dim() == 1:
            weight.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            continue
        weight.normal_(generator=random)
        if name == "lower_bounds":
            continue
        if name == "embedding.weight":
            weight.mul_(config.d_model**-0.5 if config.tie_embeddings else 1.0)
            continue
        ends_branch = name.endswith(("out.weight", "out_proj.weight", "mlp.down.weight"))
        if ends_branch:
            weight.sub_(weight.mean(dim=1, keepdim=True))
        weight.mul_(1 / math.sqrt(weight.shape[1] * (branches if ends_branch else 1)))
    return model


# Names of the parameters of Mamba's and Mamba-2's recurrences that are not drawn as others are
_STATE_SPACE = (".A_log", ".D", ".dt_bias", ".dt_proj.bias")


def _initialize_state_space(name: str, weight: Tensor, random: torch.Generator) -> None:
    """Set A to -1 ... -N, of Mamba-2 between -1 and -16, D to 1 and dt between 0.001 and 0.1."""
    if name.endswith(".D"):
        weight.fill_(1.0)
        return
    if name.endswith(".A_log"):
        if weight.dim() == 2:
            weight.copy_(torch.arange(1, weight.shape[1] + 1).log().expand_as(weight))
        else:
            weight.uniform_(1.0, 16.0, generator=random).log_()
        return
    dt = torch.empty_like(weight, dtype=torch.float32)
    dt.uniform_(math.log(1e-3), math.log(0.1), generator=random).exp_()
    weight.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus


@contextmanager
def subject(name: str, cell: str, device: torch.device, dtype: DtypeName) -> Iterator[Subject]:
    """Yield the named model as a checkpoint folder, and in memory with weights of `dtype`.

    A folder that was made is removed at the end. A checkpoint keeps its own cell.

    Raises CheckpointError for a name that is neither a size nor a checkpoint.
    """
    if name not in SIZES:
        folder = loader.resolve(name)
        model, config = loader.load_model(folder, device, dtype)
        yield Subject(
            name, None, folder, dataclasses.replace(config, dtype=dtype or config.dtype), model
        )
        return
    config = size_config(name, cell, dtype)
    model = random_model(config, device, loader.DTYPES[dtype])
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    label = f"{name}-{cell}" if name in MINRNN_SIZES else name
    with tempfile.TemporaryDirectory(prefix="minserve-", dir=_room_for(2 * size)) as parent:
        folder = Path(parent) / label
        loader.save_model(folder, model, config, dtype)
        yield Subject(label, name, folder, config, model)


def _room_for(size: int) -> str | None:
    """Return a folder in memory if it has the room, since disks are slow; None: the default."""
    if _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > size:
        return str(_SHARED_MEMORY)
    return None


@dataclass(frozen=True)
class Work:
    """The least work of one decode step of a model."""

    parameters: int
    weight_bytes: int  # read once per step, whatever the batch: all but an untied embedding
    state_bytes: int  # of one sequence, read and written by each of its steps
    flops: int  # of the matrix products of one token, the head's included
    head_flops: int  # of these, the head's

    def step_bytes(self, batch: int) -> int:
        """Return the bytes of weights read, and of states read and written."""
        return self.weight_bytes + 2 * batch * self.state_bytes


def work(config: ModelConfig, dtype: torch.dtype, quantization: str | None = None) -> Work:
    """Return the work of a model of this config with weights of `dtype`, quantised or not."""
    full = _meta(config)
    parameters = sum(weight.numel() for weight in full.parameters())
    unread = 0 if config.tie_embeddings else full.embedding.weight.numel() * dtype.itemsize
    stored = full
    if quantization is not None:
        stored = _meta(dataclasses.replace(config, **cast(Any, {"quantization": quantization})))
    size = sum(_bytes(name, tensor, dtype) for name, tensor in stored.state_dict().items())
    head = config.vocab_size * config.d_model
    linear = sum(weight.numel() for weight in layer_matrices(full))
    return Work(
        parameters=parameters,
        weight_bytes=size - unread,
        state_bytes=config.state_bytes,
        flops=2 * (linear + head),
        head_flops=2 * head,
    )


def _meta(config: ModelConfig) -> LanguageModel:
    with torch.device("meta"):
        return registry.build(config)


def _bytes(name: str, tensor: Tensor, dtype: torch.dtype) -> int:
    """Return the bytes of a stored tensor, in a model whose plain weights are of `dtype`.

    Quantised weights and their scales keep their own types, and so do A, D and dt of Mamba.
    """
    plain = tensor.dtype == torch.float32 and not name.endswith(("scale", *_STATE_SPACE))
    return tensor.numel() * (dtype.itemsize if plain else tensor.dtype.itemsize)


def layer_matrices(model: LanguageModel) -> list[Tensor]:
    """Return the weights [out, in] of all linear maps except the head, in order of use."""
    return [module.weight for module in model.layers.modules() if isinstance(module, nn.Linear)]


def head_matrix(model: LanguageModel) -> Tensor:
    """Return the head's weights [vocab, d_model]."""
    return model.embedding.weight if model.head is None else model.head.weight
