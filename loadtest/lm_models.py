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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.config import DtypeName
from engine.models import loader
from engine.models.minrnn.config import CellName, MinRnnConfig
from engine.models.minrnn.lm import LM

#: The name says the parameters with minGRU cells; minLSTM has a third gate and so a few more.
SIZES: dict[str, dict[str, Any]] = {
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
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Subject:
    """One model to measure; `size` is a key of SIZES, or None for a checkpoint."""

    name: str
    size: str | None
    folder: Path
    config: MinRnnConfig
    model: LM  # the same weights in plain modules, for limits and peers


def size_config(size: str, cell: CellName, dtype: DtypeName) -> MinRnnConfig:
    """Return the config of a size. Raises KeyError for a name that is not in SIZES."""
    return MinRnnConfig(cell=cell, dtype=dtype, mlp_ratio=4.0, **SIZES[size])


@torch.no_grad()
def random_model(
    config: MinRnnConfig, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> LM:
    """Return a model with random weights, drawn on the device.

    Every linear map keeps the variance of its input; maps that end a residual branch divide it by
    the number of branches. Their rows have mean 0, because hidden states and GELU's outputs have a
    large common mean, which would otherwise give every token the same logits.
    """
    with torch.device("meta"):
        model = LM(config)
    model = model.to(dtype).to_empty(device=device).eval()
    random = torch.Generator(device).manual_seed(seed)
    branches = config.n_layers * sum((True, config.mlp_hidden > 0, config.conv_kernel > 0))
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            weight.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            continue
        weight.normal_(generator=random)
        if name == "embedding.weight":
            weight.mul_(config.d_model**-0.5 if config.tie_embeddings else 1.0)
            continue
        ends_branch = name.endswith(("cell.out.weight", "mlp.down.weight"))
        if ends_branch:
            weight.sub_(weight.mean(dim=1, keepdim=True))
        weight.mul_(1 / math.sqrt(weight.shape[1] * (branches if ends_branch else 1)))
    return model


@contextmanager
def subject(name: str, cell: CellName, device: torch.device, dtype: DtypeName) -> Iterator[Subject]:
    """Yield the named model as a checkpoint folder, and in memory with weights of `dtype`.

    A folder that was made is removed at the end. A checkpoint keeps its own cell.

    Raises CheckpointError for a name that is neither a size nor a checkpoint, and ValueError for a
    checkpoint of quantised weights, with which peers cannot compute.
    """
    if name not in SIZES:
        folder = loader.resolve(name)
        if getattr(loader.load_config(folder), "quantization", None) is not None:
            raise ValueError(f"{name}: is quantised; name the checkpoint it was made from")
        model, config = loader.load_model(folder, device, dtype)
        if not isinstance(config, MinRnnConfig) or not isinstance(model, LM):
            raise ValueError(f"{name}: is of the family {config.family!r}; allowed: minrnn")
        yield Subject(
            name, None, folder, dataclasses.replace(config, dtype=dtype or config.dtype), model
        )
        return
    config = size_config(name, cell, dtype)
    model = random_model(config, device, loader.DTYPES[dtype])
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    label = f"{name}-{cell}"
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


def work(config: MinRnnConfig, dtype: torch.dtype, quantization: str | None = None) -> Work:
    """Return the work of a model of this config with weights of `dtype`, quantised or not.

    Raises ValueError if this version does not know the quantisation.
    """
    full = _meta(config)
    parameters = sum(weight.numel() for weight in full.parameters())
    unread = 0 if config.tie_embeddings else full.embedding.weight.numel() * dtype.itemsize
    stored = full
    if quantization is not None:
        if "quantization" not in {field.name for field in dataclasses.fields(config)}:
            raise ValueError("this version of the engine does not quantise weights")
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


def _meta(config: MinRnnConfig) -> LM:
    with torch.device("meta"):
        return LM(config)


def _bytes(name: str, tensor: Tensor, dtype: torch.dtype) -> int:
    """Return the bytes of a stored tensor, in a model whose plain weights are of `dtype`.

    Quantised weights and their scales keep their own types.
    """
    plain = tensor.dtype == torch.float32 and not name.endswith("scale")
    return tensor.numel() * (dtype.itemsize if plain else tensor.dtype.itemsize)


def layer_matrices(model: LM) -> list[Tensor]:
    """Return the weights [out, in] of all linear maps except the head, in order of use."""
    return [module.weight for module in model.layers.modules() if isinstance(module, nn.Linear)]


def head_matrix(model: LM) -> Tensor:
    """Return the head's weights [vocab, d_model]."""
    return model.embedding.weight if model.head is None else model.head.weight
