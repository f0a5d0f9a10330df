"""ModelConfig (what every model has) and EngineConfig (how one engine runs); both frozen.

A value that is out of range, has the wrong type or contradicts another one raises ConfigError,
which names the field and says what is allowed. This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, cast, get_args

from engine.errors import ConfigError
from engine.state_spec import StateDtypeName, StateSpec, bytes_of, hidden_bytes_of

DtypeName = Literal["float32", "bfloat16", "float16"]
StateSync = Literal["write", "fsync"]
Quantization = Literal["int8", "fp8"]  # fp8: e4m3

# Token interval at which the scans combine carries, counted from where a call starts reading a
# sequence. Cutting prompts at its multiples leaves every bit of the result unchanged. It equals
# kScanChunk of the C++ operators; engine.ops refuses to load a library with another value.
SCAN_CHUNK = 128

MOST_ENGINES = 256  # the most engines of one server
# The usual `max_slots` and `share_slots`: as many, where their states fit (engine/slot_choice.py).
SLOTS, SHARE_SLOTS = 256, 64
# Environment variable in which a server gives its engine processes the URL of their state store.
STORE_VARIABLE = "MINSERVE_ENGINE_STATE_STORE"
MOST_TTL = 1e9  # the longest lifetime of a kept state, in seconds

# `model_type` of a config.json in minserve's form
OWN_MODEL_TYPE = "minserve"

MOST_WIDTH = 2**17  # the largest d_model
MOST_INNER = 2**20  # the most channels of a recurrence
MOST_EOS_IDS = 128  # the most end-of-text tokens of one model


def check(condition: bool, field: str, value: object, allowed: str) -> None:
    """Raise a ConfigError that names the field and says what is allowed, unless `condition`."""
    if not condition:
        raise ConfigError(f"{field} is {value!r}; allowed: {allowed}", param=field)


def is_integer(value: object) -> bool:
    """Return whether `value` is an int, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether `value` is a finite number, and not a bool."""
    return is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def check_integers(config: object, *table: tuple[str, int, int, bool]) -> None:
    """Check fields that must be integers.

    Each row of `table`: field name, least value, largest value, whether None is allowed as well.
    """
    for name, least, most, optional in table:
        value = getattr(config, name)
        check(
            (optional and value is None) or (is_integer(value) and least <= value <= most),
            name,
            value,
            f"an integer from {least} to {most}",
        )


def check_state_dtype(dtype: object, values: int) -> None:
    """Check the type of a state tensor of so many values."""
    allowed = '"float32"' if values % 2 else '"float32" or "bfloat16"'  # whole words of 32 bits
    check(
        dtype == "float32" or (dtype == "bfloat16" and not values % 2),
        "state_dtype",
        dtype,
        allowed,
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ABC):
    """What the engine needs to know of a language model of any family.

    A family's own config (engine/models/<family>/config.py) adds the fields of its layers. Raises
    ConfigError for values that no model can have.
    """

    family: ClassVar[str]  # name of the folder in engine/models

    cell: str  # name of the recurrence
    vocab_size: int
    d_model: int
    n_layers: int
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    # Token ids that end a text. The first one also begins it. A list in config.json.
    eos_token_id: int | tuple[int, ...] | None = None
    dtype: DtypeName = "bfloat16"  # type of the stored weights that are not quantised
    # Format of the weight matrices, with one scale per row (engine/models/quantize.py). A tied
    # embedding counts as a matrix. None: not quantised.
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        check_integers(
            self,
            ("vocab_size", 1, 2**24, False),
            ("d_model", 1, MOST_WIDTH, False),
            ("n_layers", 1, 4096, False),
        )
        check(
            is_number(self.norm_eps) and 0 < self.norm_eps < 1,
            "norm_eps",
            self.norm_eps,
            "a number between 0 and 1",
        )
        for flag in dataclasses.fields(self):
            if flag.type == "bool":
                value = getattr(self, flag.name)
                check(isinstance(value, bool), flag.name, value, "true or false")
        check(
            self.dtype in get_args(DtypeName),
            "dtype",
            self.dtype,
            '"float32", "bfloat16" or "float16"',
        )
        check(
            self.quantization is None or self.quantization in get_args(Quantization),
            "quantization",
            self.quantization,
            'null, "int8" or "fp8"',
        )
        if isinstance(self.eos_token_id, list):  # JSON has no tuples
            object.__setattr__(self, "eos_token_id", tuple(self.eos_token_id))
        ids = self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)
        check(
            self.eos_token_id is None
            or (1 <= len(ids) <= MOST_EOS_IDS and all(map(self._has, ids))),
            "eos_token_id",
            list(ids) if isinstance(self.eos_token_id, tuple) else self.eos_token_id,
            f"null, an integer from 0 to {self.vocab_size - 1},"
            f" or a list of 1 to {MOST_EOS_IDS} such integers",
        )

    def with_state_dtype(self, dtype: str) -> ModelConfig:
        """Return the config of the model with states in another type; "auto" changes nothing.

        Families whose states may be bfloat16 have a field `state_dtype`. Raises ConfigError for the
        others.
        """
        if dtype == "auto":
            return self
        if any(field.name == "state_dtype" for field in dataclasses.fields(self)):
            changed: dict[str, Any] = {"state_dtype": dtype}
            return dataclasses.replace(self, **changed)
        allowed = f'"auto" or "float32" for models of the family {self.family}'
        check(dtype == "float32", "state_dtype", dtype, allowed)
        return self

    def _has(self, token: object) -> bool:
        """Return whether `token` is a valid token id."""
        return is_integer(token) and 0 <= token < self.vocab_size  # type: ignore[operator]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All end-of-text ids without duplicates; the first one is used where only one can be."""
        if self.eos_token_id is None:
            return ()
        if isinstance(self.eos_token_id, int):
            return (self.eos_token_id,)
        return tuple(dict.fromkeys(self.eos_token_id))

    @property
    def embedding_width(self) -> int:
        """Width of the embedding and of the first layer's input; d_model if it is tied."""
        return self.d_model

    @property
    @abstractmethod
    def state(self) -> tuple[StateSpec, ...]:
        """The tensors of a sequence's state, in the order in which they are packed."""

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state, which does not depend on its length."""
        return bytes_of(self.state)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make a config from the object in a config.json of minserve's form. Raises ConfigError."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known - {"model_type", "family"})
        if unknown:
            raise ConfigError(
                f"unknown field {unknown[0]!r}; known fields: {', '.join(sorted(known))}",
                param=unknown[0],
            )
        kind = values.get("model_type", OWN_MODEL_TYPE)
        check(kind == OWN_MODEL_TYPE, "model_type", kind, f'"{OWN_MODEL_TYPE}"')
        for field in dataclasses.fields(cls):
            if field.default is dataclasses.MISSING and field.name not in values:
                raise ConfigError(f"required field {field.name!r} is missing", param=field.name)
        return cls(**{name: value for name, value in values.items() if name in known})

    def to_dict(self) -> dict[str, Any]:
        """Return the config as the object of a config.json in minserve's form."""
        return {"model_type": OWN_MODEL_TYPE, "family": self.family, **dataclasses.asdict(self)}

    def save(self, path: Path) -> None:
        """Write the config as a config.json in minserve's form."""
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How one engine runs; raises ConfigError for bad values.

    None means that a value is chosen for the device (engine.device.resolve).
    """

    model: str = "library-mingru"  # a bundled name, a folder or a Hugging Face repo id
    device: str = "auto"  # "auto", "cpu", "cuda" or "cuda:N"
    dtype: str = "auto"  # or "auto": as stored, if the device computes in that type
    # quantisation at load: "int8", "fp8", or "none" (the checkpoint as it is)
    quantize: str = "none"
    # type of recurrent states: "float32", "bfloat16" (Mamba), or "auto" (the model's own: float32)
    state_dtype: str = "auto"
    # Sequences that run at once. None = 256, or as many as fit in memory.
    max_slots: int | None = None
    max_step_tokens: int | None = None  # prompt tokens read in one step
    max_waiting: int = 4096  # waiting requests; more are refused
    max_waiting_tokens: int = 2**26  # prompt tokens of waiting requests; more are refused
    # State pool rows on the device for cached and kept states. None = 64, or as many as fit.
    share_slots: int | None = None
    # Bytes of host memory for cached and kept states without a pool row; None = a quarter of the
    # free memory, at most 4 GiB. Allocated as needed.
    host_state_bytes: int | None = None
    # Folder for files of kept states, which then survive a restart; None = memory only.
    state_folder: str | None = None
    # URL of the store of kept states that several servers share (engine/cache/shared/redis_url.py),
    # in place of a folder of this server; it may contain a password. None = no such store.
    state_store: str | None = dataclasses.field(default=None, repr=False)
    # When a state counts as stored: once its file is written ("write") or synced ("fsync").
    state_sync: str = "write"
    # the most bytes of state files; 0 = no files, states stay in memory
    disk_state_bytes: int = 2**36
    # bytes of cached states in the folder, beside the kept ones; 0 = none
    disk_cache_bytes: int = 0
    state_ttl: float = 86400.0  # seconds after its last use until a kept state expires
    max_states: int = 2**17  # kept states of one owner; more are refused
    # CPU threads of the engine; None = its share of the CPUs that the container may use
    threads: int | None = None
    cuda_graphs: bool = True
    # Make logits bitwise independent of the batch and of where the prompt is split.
    deterministic: bool = False
    # Where GPU autotuning results are kept for the next start: "auto" (the user's cache folder),
    # "off" (nowhere) or a folder.
    tuning_cache: str = "auto"
    # Number of engines of one server, all with the same model. Other limits are per engine.
    engines: int = 1
    rank: int = 0  # index of this engine, from 0; on GPUs also its device number

    def of_rank(self, rank: int) -> EngineConfig:
        """Return the config of another engine of the same server. Raises ConfigError."""
        return dataclasses.replace(self, rank=rank)

    @property
    def quantization(self) -> Quantization | None:
        """`quantize` as an optional: None for "none"."""
        return None if self.quantize == "none" else cast(Quantization, self.quantize)

    def __post_init__(self) -> None:
        check(
            self.device in ("auto", "cpu", "cuda")
            or (self.device.startswith("cuda:") and self.device[5:].isdigit()),
            "device",
            self.device,
            '"auto", "cpu", "cuda" or "cuda:N"',
        )
        check(
            is_integer(self.engines) and 1 <= self.engines <= MOST_ENGINES,
            "engines",
            self.engines,
            f"an integer from 1 to {MOST_ENGINES}",
        )
        check(
            is_integer(self.rank) and 0 <= self.rank < self.engines,
            "rank",
            self.rank,
            f"an integer from 0 to {self.engines - 1}",
        )
        check(
            self.engines == 1 or self.device in ("auto", "cpu", "cuda", f"cuda:{self.rank}"),
            "device",
            self.device,
            '"auto", "cpu" or "cuda" with several engines, each of which uses its own GPU',
        )
        check(
            self.dtype == "auto" or self.dtype in get_args(DtypeName),
            "dtype",
            self.dtype,
            '"auto", "float32", "bfloat16" or "float16"',
        )
        check(
            self.quantize == "none" or self.quantize in get_args(Quantization),
            "quantize",
            self.quantize,
            '"none", "int8" or "fp8"',
        )
        check(
            self.state_dtype == "auto" or self.state_dtype in get_args(StateDtypeName),
            "state_dtype",
            self.state_dtype,
            '"auto", "float32" or "bfloat16"',
        )
        check(bool(self.model), "model", self.model, "a bundled name, a folder or a hub id")
        check_integers(
            self,
            ("max_slots", 1, 2**20, True),
            ("max_step_tokens", 1, 2**24, True),
            ("max_waiting", 0, 2**31, False),
            ("max_waiting_tokens", 1, 2**40, False),
            ("share_slots", 0, 2**20, True),
            ("host_state_bytes", 0, 2**60, True),
            ("disk_state_bytes", 0, 2**60, False),
            ("disk_cache_bytes", 0, 2**60, False),
            ("max_states", 0, 2**40, False),
            ("threads", 1, 2**24, True),
        )
        check(
            is_number(self.state_ttl) and 0 < self.state_ttl <= MOST_TTL,
            "state_ttl",
            self.state_ttl,
            f"a number of seconds above 0, at most {MOST_TTL:g}",
        )
        check(
            self.state_folder is None or bool(self.state_folder),
            "state_folder",
            self.state_folder,
            "a folder",
        )
        check(
            self.state_sync in get_args(StateSync),
            "state_sync",
            self.state_sync,
            '"write" or "fsync"',
        )
        check(
            not self.disk_cache_bytes or self.state_folder is not None,
            "disk_cache_bytes",
            self.disk_cache_bytes,
            "0 without a state_folder",
        )
        check(
            isinstance(self.deterministic, bool),
            "deterministic",
            self.deterministic,
            "true or false",
        )
        check(
            isinstance(self.tuning_cache, str) and bool(self.tuning_cache),
            "tuning_cache",
            self.tuning_cache,
            '"auto", "off" or a folder',
        )
        check(
            not self.deterministic
            or self.max_step_tokens is None
            or self.max_step_tokens >= SCAN_CHUNK,
            "max_step_tokens",
            self.max_step_tokens,
            f"at least {SCAN_CHUNK} with deterministic, which cuts prompts at its multiples",
        )


def host_rows(config: EngineConfig, *, state_bytes: int, d_model: int) -> int:
    """Return how many states, each with a hidden state, fit in the chosen `host_state_bytes`."""
    return (config.host_state_bytes or 0) // (state_bytes + hidden_bytes_of(d_model))
