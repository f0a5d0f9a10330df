"""Converts other projects' weights: from a state dict to a checkpoint folder.

engine/models/state_dicts.py reads files, a family knows its layouts, and `convert` here writes the
folder, completely or not at all.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.config import DtypeName, ModelConfig, Quantization
from engine.errors import CheckpointError, ConfigError
from engine.model_files import has_file, has_folder, read_through
from engine.models import registry
from engine.models.language_model import LanguageModel
from engine.models.loader import (
    CHAT,
    CONFIG,
    STARTS,
    load_model,
    quantize_model,
    quantized_config,
    save_model,
    with_generation_config,
)
from engine.models.quantize import NotFiniteError
from engine.models.state_dicts import read_state_dict
from engine.tokenizer_files import (
    TOKENIZER,
    TokenizerText,
    load_library,
    read_tokenizer,
    read_tokenizer_file,
)

__all__ = ["convert"]


def convert(
    source: Path,
    destination: Path,
    *,
    family: str | None = None,
    dtype: DtypeName | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    quantize: Quantization | None = None,
    tokenizer: Path | None = None,
    **options: Any,
) -> ModelConfig:
    """Write the checkpoint folder `destination` from a state dict, and return its config.

    A tokenizer beside the weights comes along, as a tokenizer.json. The end-of-text ids of a
    generation_config.json there go into config.json. The keyword arguments replace what the weights
    show (None), and are needed where the weights do not show it.

    Args:
        source: a .safetensors file, a file written by torch.save (read with weights_only: nothing
            else is unpickled), or a model folder, in minserve's form or a published one.
        destination: the folder to write; must not exist, or be empty.
        family: the family of the model; None: that of a folder's config.json, or the one that the
            names of a state dict's tensors show.
        dtype: type of the stored weights.
        eos_token_id: end-of-text ids.
        quantize: quantize the source's weights (before rounding to `dtype`), so that the folder is
            bitwise equal to the source quantised at load.
        tokenizer: a file to take instead of the source's tokenizer, which is not read
            (read_tokenizer_file).
        options: fields of the family's config that its weights do not show
            (Family.state_dict_options), such as normalize_gates=False for a minLSTM whose gates
            were not normalised. None: as the layout says.

    Raises:
        CheckpointError: the source is missing, damaged or of unknown layout, the tokenizer is
            broken or has ids beyond the model's vocabulary, or the destination is not empty.
        ConfigError: an argument that the model cannot have, or weights that are already quantised
            in another way. In both cases nothing is written.
    """
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise CheckpointError(f"{destination}: already exists; give a new or empty folder")
    options = {name: value for name, value in options.items() if value is not None}
    given = None if tokenizer is None else read_tokenizer_file(tokenizer)
    model, config = _read(source, family, options, dtype, quantize)
    folder = source if has_folder(source) else source.parent
    text = read_tokenizer(folder) if given is None else given
    if text is not None:
        load_library(text, config.vocab_size)  # its ids are the model's
    if folder != source and eos_token_id is None:
        config = with_generation_config(config, folder)
    fields: dict[str, Any] = {
        "dtype": dtype,
        "eos_token_id": eos_token_id if isinstance(eos_token_id, int | None) else (*eos_token_id,),
    }
    config = dataclasses.replace(
        config, **{name: value for name, value in fields.items() if value is not None}
    )
    target = quantized_config(config, quantize, source)
    if quantize is not None and target != config:
        try:
            model, config = quantize_model(model, quantize), target
        except NotFiniteError as error:
            raise CheckpointError(f"{source}: cannot be quantised: {error}") from error
    _write(destination, model, config, folder, text)
    return config


def _read(
    source: Path,
    family: str | None,
    options: dict[str, Any],
    dtype: DtypeName | None,
    quantize: Quantization | None,
) -> tuple[LanguageModel, ModelConfig]:
    """Return the model with values that were rounded at most once, to `dtype`.

    A file's are as stored, and not quantised; a folder's are quantised from the stored ones.
    """
    if has_folder(source):
        if not has_file(source / CONFIG):
            raise CheckpointError(
                f"{source}: a folder without {CONFIG}; give the file that has the state dict"
            )
        model, config = load_model(source, "cpu", dtype, quantize)
        if family not in (None, config.family):
            raise ConfigError(
                f"family is {family!r}; allowed: {config.family}, as {source / CONFIG} says",
                param="family",
            )
        registry.check_options(registry.family_of(config), options)
        return model, dataclasses.replace(config, **options)
    if has_file(source):
        read_through(source)
    try:
        stored = read_state_dict(source)
        its = registry.state_dict_family(stored, family)
        registry.check_options(its, options)
        config, weight_map = its.state_dict_layout(stored, options)
    except (CheckpointError, ConfigError) as error:
        if isinstance(error, ConfigError) and error.param in ("family", *options):
            raise  # an argument's error, not the file's
        raise CheckpointError(f"{source}: {error.message}") from error
    with torch.device("meta"):
        model = registry.build(config)
    weights = {
        name: weight_map.value(name, tensor.shape, stored.__getitem__)
        for name, tensor in model.state_dict().items()
    }
    model.load_state_dict(weights, assign=True)
    return model, config


def _write(
    destination: Path,
    model: LanguageModel,
    config: ModelConfig,
    source: Path,
    tokenizer: TokenizerText | None,
) -> None:
    partial = destination.parent / f".{destination.name}.{os.getpid()}.partial"
    try:
        partial.mkdir(parents=True)
        save_model(partial, model, config, config.dtype)
        for name in (*CHAT, STARTS):
            if has_file(source / name):
                shutil.copyfile(source / name, partial / name)
        if tokenizer is not None:
            (partial / TOKENIZER).write_text(tokenizer.text, encoding="utf-8")
        partial.rename(destination)
    except OSError as error:
        raise CheckpointError(f"{destination}: cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
