"""`minserve inspect`: says what a model folder holds and needs, without reading its weights."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch

from engine.config import DtypeName, EngineConfig, ModelConfig
from engine.device import describe, resolve_device, resolve_dtype
from engine.errors import DeviceError
from engine.models.backends import fused_gemm, hopper
from engine.models.backends.selector import copy_wanted, explain_backend
from engine.models.language_model import LanguageModel
from engine.models.loader import is_published, load_config, outline_model, resolve
from engine.models.weight_files import weight_files
from engine.slot_choice import with_slots
from engine.state_spec import hidden_bytes_of
from engine.tokenizer_files import read_tokenizer
from service.text.tokenizer import Tokenizer


def inspect_model(asked: EngineConfig) -> dict[str, Any]:
    """Return the facts about a model as the engine would run it with this config.

    Raises EngineError for a model that cannot be loaded or a tokenizer that cannot be read.
    """
    folder = resolve(asked.model)
    stored_config = load_config(folder)
    device, missing = _device(asked.device)
    served = resolve_dtype(asked.dtype, device, stored_config.dtype)
    model, config, stored = outline_model(
        folder, cast(DtypeName, served), asked.quantization, state_dtype=asked.state_dtype
    )
    types = Counter(one.dtype for one in stored.values())
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    # on the device the hidden state is of the activations' type, in main memory fp32
    row = config.state_bytes + hidden_bytes_of(config.d_model)
    copy = 0 if missing else copy_wanted(model, device)
    fitting = with_slots(
        asked,
        torch.device("cpu") if missing else device,
        state_bytes=config.state_bytes,
        weight_bytes=weights,
    )
    slots, share_slots = fitting.max_slots, fitting.share_slots
    assert slots is not None and share_slots is not None
    return {
        "folder": str(folder),
        "form": "published" if is_published(folder) else "minserve",
        "family": config.family,
        "cell": config.cell,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "layers": config.n_layers,
        "d_model": config.d_model,
        "embedding_width": config.embedding_width,
        "vocab_size": config.vocab_size,
        "tied_head": config.tie_embeddings,
        "eos_token_ids": list(config.eos_token_ids),
        "files": [path.name for path in weight_files(folder)],
        "stored_dtypes": dict(types.most_common()),
        "dtype": served,
        "quantization": config.quantization,
        "tokenizer": _tokenizer(folder, config),
        "state": [
            {"name": one.name, "shape": list(one.full_shape), "dtype": one.dtype}
            for one in config.state
        ],
        "state_bytes": config.state_bytes,
        "device": device.type if missing else str(device),
        "device_name": None if missing else describe(device),
        "device_missing": missing,
        "backend": None if missing else asdict(explain_backend(model, device)),
        "on_hopper": _on_hopper(model),
        "memory": {
            "weights": weights,
            "copy_in_16_bits": copy,
            "states": (slots + 1) * config.state_bytes,
            "share_rows": share_slots * row,
            "total": weights + copy + (slots + 1) * config.state_bytes
            + share_slots * row,
        },
        "max_slots": slots,
        "share_slots": share_slots,
    }  # fmt: skip


def _device(name: str) -> tuple[torch.device, str | None]:
    """Return the device, and why it cannot be used here; None if it can."""
    try:
        return resolve_device(name), None
    except DeviceError as error:
        return torch.device(name), error.message


def _on_hopper(model: LanguageModel) -> str:
    """Return what is known of the fused kernels of Hopper GPUs without such a GPU."""
    reason = fused_gemm.refuses_model(model)
    return "the fused kernels run it" if reason is None else f"no fused kernels: {reason}"


def _tokenizer(folder: Path, config: ModelConfig) -> dict[str, Any] | None:
    read = read_tokenizer(folder)
    if read is None:
        return None
    tokenizer = Tokenizer.of(read, config.vocab_size)
    return {"file": read.path.name, "type": tokenizer.type, "tokens": tokenizer.vocab_size}


def shown(report: dict[str, Any]) -> str:
    """Return the facts as lines of text."""
    tokenizer, memory = report["tokenizer"], report["memory"]
    stored = ", ".join(f"{count} {name}" for name, count in report["stored_dtypes"].items())
    served = report["dtype"]
    if report["quantization"]:
        served += f", matrices {report['quantization']}"
    lines = {
        "folder": f"{report['folder']} ({report['form']} form)",
        "family": report["family"],
        "cell": report["cell"],
        "parameters": f"{report['parameters']:,}",
        "layers": f"{report['layers']} of width {report['d_model']}"
        + (f", on an embedding of width {report['embedding_width']}"
           if report["embedding_width"] != report["d_model"] else ""),
        "vocabulary": f"{report['vocab_size']:,} tokens"
        + (", the head is the embedding" if report["tied_head"] else ""),
        "end of text": ", ".join(map(str, report["eos_token_ids"])) or "-",
        "tokenizer": "none: token ids only"
        if tokenizer is None
        else f"{tokenizer['file']} ({tokenizer['type']}), {tokenizer['tokens']:,} tokens",
        "weights stored": f"{stored} tensors in {', '.join(report['files'])}",
        "weights served": served,
        "state": f"{report['state_bytes']:,} bytes a sequence: "
        + ", ".join(f"{one['name']} {one['dtype']} {one['shape']}" for one in report["state"]),
        "device": report["device"] + (f": {report['device_name'] or report['device_missing']}"),
        **_backend_lines(report),
        "memory": f"{_megabytes(memory['total'])} MB: weights {_megabytes(memory['weights'])}"
        + (f" (and {_megabytes(memory['copy_in_16_bits'])} for a copy in 16 bits, if twice as much"
           " is free)" if memory["copy_in_16_bits"] else "")
        + f", {report['max_slots']} running sequences {_megabytes(memory['states'])},"
        f" {report['share_slots']} cached or kept states {_megabytes(memory['share_rows'])}",
    }  # fmt: skip
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


def _backend_lines(report: dict[str, Any]) -> dict[str, str]:
    if report["backend"] is None:
        return {"backend": f"unknown here; on a Hopper GPU: {report['on_hopper']}"}
    name, copy = report["backend"]["name"], report["memory"]["copy_in_16_bits"]
    if copy:
        name += (
            f", or {hopper.BACKEND} on a copy of the weights in 16 bits ({_megabytes(copy)} MB),"
            " which is made if twice as much is free"
        )
    lines = {"backend": name}
    for path in report["backend"]["paths"]:
        lines[f"  {path['name']}"] = "used" if path["used"] else f"not used: {path['reason']}"
    return lines


def _megabytes(count: int) -> str:
    return f"{math.ceil(count / 1e5) / 10:,.1f}"
