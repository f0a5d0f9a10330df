"""Model folders in the form in which other projects publish them, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from minGRU_pytorch.minLM import minLM
from safetensors.torch import save_file
from torch import Tensor, nn

Weights = dict[str, Tensor]

VOCAB, WIDTH, DEPTH = 37, 24, 2
EPS = float(torch.finfo(torch.float32).eps)  # torch.nn.RMSNorm's own choice in float32


def min_lm(seed: int = 0, **options: Any) -> minLM:
    """A random minLM of minGRU-pytorch, its norms' weights too."""
    torch.manual_seed(seed)
    sizes = {"num_tokens": VOCAB, "dim": WIDTH, "depth": DEPTH, "ff_mult": 2, **options}
    model = minLM(**sizes).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.RMSNorm):
                module.weight.add_(0.3 * torch.randn(WIDTH))
                module.eps = EPS
    return model


def published_weights(model: minLM, prefix: str = "model.") -> Weights:
    return {prefix + name: tensor.clone() for name, tensor in model.state_dict().items()}


def write_config(folder: Path, **values: Any) -> None:
    """The config.json of the hub's MinGRULMForCausalLM."""
    known = {
        "architectures": ["MinGRULMForCausalLM"],
        "model_type": "mingru",
        "auto_map": {"AutoModelForCausalLM": "modeling.MinGRULMForCausalLM"},
        "vocab_size": VOCAB,
        "dim": WIDTH,
        "depth": DEPTH,
        "ff_mult": 2,
        "eos_token_id": 3,
    }
    told = {name: value for name, value in {**known, **values}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(told))


def write_single(folder: Path, weights: Weights) -> None:
    save_file(weights, folder / "model.safetensors")


def _halves(weights: Weights) -> list[Weights]:
    names = sorted(weights)
    middle = len(names) // 2
    return [{name: weights[name] for name in part} for part in (names[:middle], names[middle:])]


def _index(folder: Path, name: str, files: dict[str, Weights]) -> None:
    where = {tensor: file for file, part in files.items() for tensor in part}
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def write_sharded(folder: Path, weights: Weights) -> None:
    files = {f"model-{i}-of-2.safetensors": part for i, part in enumerate(_halves(weights))}
    for name, part in files.items():
        save_file(part, folder / name)
    _index(folder, "model.safetensors.index.json", files)


def write_bin(folder: Path, weights: Weights) -> None:
    torch.save(weights, folder / "pytorch_model.bin")


def write_old_bin(folder: Path, weights: Weights) -> None:
    """As torch before 1.6 wrote it: no zip file, so it cannot be mapped into memory."""
    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def write_sharded_bin(folder: Path, weights: Weights) -> None:
    files = {f"pytorch_model-{i}-of-2.bin": part for i, part in enumerate(_halves(weights))}
    for name, part in files.items():
        torch.save(part, folder / name)
    _index(folder, "pytorch_model.bin.index.json", files)


def write_pth(folder: Path, weights: Weights) -> None:
    torch.save(weights, folder / "weights.pth")


def write_nested_pt(folder: Path, weights: Weights) -> None:
    """A training script's checkpoint of a model within DistributedDataParallel."""
    wrapped = {"module." + name: tensor for name, tensor in weights.items()}
    torch.save({"state_dict": wrapped, "step": 7, "lr": 0.1}, folder / "last.pt")


FORMATS = {
    write.__name__.removeprefix("write_"): write
    for write in (
        write_single, write_sharded, write_bin, write_old_bin, write_sharded_bin, write_pth,
        write_nested_pt,
    )
}  # fmt: skip


def write_folder(folder: Path, model: minLM | None = None, **config: Any) -> minLM:
    """A whole published folder, in one safetensors file; returns the package's model."""
    folder.mkdir(parents=True, exist_ok=True)
    model = min_lm() if model is None else model
    write_config(folder, **config)
    write_single(folder, published_weights(model))
    return model
