"""ModelConfig (a checkpoint's config.json) and EngineConfig (how one engine runs); both frozen.

A value that is out of range, of the wrong type or in contradiction to another raises ConfigError,
which names the field and says what is allowed. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from engine.errors import ConfigError

CellName = Literal["mingru", "minlstm"]
Candidate = Literal["g", "linear"]
DtypeName = Literal["float32", "bfloat16", "float16"]
StateSync = Literal["write", "fsync"]
Quantization = Literal["int8", "fp8"]  # fp8: e4m3

# The scans combine carries at multiples of this many tokens, counted from where a call starts
# reading a sequence; prompt chunks that end at such multiples leave every bit as it would be. It is
# the operators' kScanChunk: engine.ops does not load a library that has another one.
SCAN_CHUNK = 128

MOST_ENGINES = 256  # of one server
MOST_TTL = 1e9  # seconds that a kept state may be asked to stay

MOST_EOS_IDS = 128  # tokens that end a text of one model


def _check(condition: bool, field: str, value: object, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"{field} is {value!r}; allowed: {allowed}", param=field)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return (_is_int(value) or isinstance(value, float)) and math.isfinite(value)  # type: ignore[arg-type]


def _check_integers(config: object, *table: tuple[str, int, int, bool]) -> None:
    """Each row: a field, the least and the most that it may be, and whether None is allowed too."""
    for name, least, most, optional in table:
        value = getattr(config, name)
        _check(
            (optional and value is None) or (_is_int(value) and least <= value <= most),
            name,
            value,
            f"an integer from {least} to {most}",
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of one language model (see engine/models/minrnn/lm.py for what each field builds).

    Raises ConfigError for values that no model can have.
    """

    cell: CellName
    vocab_size: int
    d_model: int
    n_layers: int
    expansion: float = 2.0  # inner width = int(d_model * expansion)
    out_projection: bool = True  # inner -> d_model; may be False only where they are equal
    conv_kernel: int = 0  # causal depthwise-separable convolution before the cell; 0 = none
    mlp_ratio: float = 4.0  # hidden width = int(d_model * mlp_ratio); 0 = no MLP
    cell_bias: bool = False  # of the gate and candidate projection
    out_bias: bool = False  # of the out projection
    mlp_bias: bool = True
    conv_bias: bool = True
    head_bias: bool = False
    candidate: Candidate = "g"
    normalize_gates: bool = True  # minLSTM: f' + i' = 1
    learned_initial_state: bool = False  # h_0 = g(parameter) instead of 0
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    # What ends a text, each by itself; the first one also begins it. A list in the file.
    eos_token_id: int | tuple[int, ...] | None = None
    dtype: DtypeName = "bfloat16"  # of the stored weights, of those that are not quantised
    # Of the matrices, one scale per row (engine/models/quantize.py); a tied embedding is one of
    # them.
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        _check(self.cell in get_args(CellName), "cell", self.cell, '"mingru" or "minlstm"')
        _check_integers(
            self,
            ("vocab_size", 1, 2**24, False),
            ("d_model", 1, 2**17, False),
            ("n_layers", 1, 4096, False),
            ("conv_kernel", 0, 256, False),
        )
        _check(self.conv_kernel != 1, "conv_kernel", 1, "0 (none) or at least 2")
        for name, least_number in (("expansion", 1e-3), ("mlp_ratio", 0.0)):
            value = getattr(self, name)
            _check(
                _is_number(value) and least_number <= value <= 1024,
                name,
                value,
                f"a number from {least_number} to 1024",
            )
        _check(self.inner >= 1, "expansion", self.expansion, "d_model * expansion of at least 1")
        _check(
            _is_number(self.norm_eps) and 0 < self.norm_eps < 1,
            "norm_eps",
            self.norm_eps,
            "a number between 0 and 1",
        )
        for flag in dataclasses.fields(self):
            if flag.type == "bool":
                value = getattr(self, flag.name)
                _check(isinstance(value, bool), flag.name, value, "true or false")
        _check(self.candidate in get_args(Candidate), "candidate", self.candidate, '"g", "linear"')
        _check(
            self.dtype in get_args(DtypeName),
            "dtype",
            self.dtype,
            '"float32", "bfloat16" or "float16"',
        )
        _check(
            self.quantization is None or self.quantization in get_args(Quantization),
            "quantization",
            self.quantization,
            'null, "int8" or "fp8"',
        )
        _check(
            self.out_projection or self.inner == self.d_model,
            "out_projection",
            self.out_projection,
            "true, unless expansion is 1",
        )
        if isinstance(self.eos_token_id, list):  # as JSON has it
            object.__setattr__(self, "eos_token_id", tuple(self.eos_token_id))
        ids = self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)
        _check(
            self.eos_token_id is None
            or (1 <= len(ids) <= MOST_EOS_IDS and all(map(self._has, ids))),
            "eos_token_id",
            list(ids) if isinstance(self.eos_token_id, tuple) else self.eos_token_id,
            f"null, an integer from 0 to {self.vocab_size - 1},"
            f" or a list of 1 to {MOST_EOS_IDS} such integers",
        )

    def _has(self, token: object) -> bool:
        """Whether it is a token's id."""
        return _is_int(token) and 0 <= token < self.vocab_size  # type: ignore[operator]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All of them, each once; the first one stands for them where there can be only one."""
        if self.eos_token_id is None:
            return ()
        if isinstance(self.eos_token_id, int):
            return (self.eos_token_id,)
        return tuple(dict.fromkeys(self.eos_token_id))

    @property
    def inner(self) -> int:
        """Channels of the recurrence."""
        return int(self.d_model * self.expansion)

    @property
    def gates(self) -> int:
        """Pre-activations per channel: minGRU k, v; minLSTM f, i, v."""
        return 2 if self.cell == "mingru" else 3

    @property
    def mlp_hidden(self) -> int:
        return int(self.d_model * self.mlp_ratio)

    @property
    def conv_shape(self) -> tuple[int, int, int] | None:
        """Of the inputs that a sequence's state holds: layers, taps - 1, d_model."""
        if not self.conv_kernel:
            return None
        return self.n_layers, self.conv_kernel - 1, self.d_model

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state: fp32, whatever its length."""
        conv = (self.conv_kernel - 1) * self.d_model if self.conv_kernel else 0
        return 4 * self.n_layers * (self.inner + conv)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """The config that a config.json's object describes. Raises ConfigError."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known - {"model_type"})
        if unknown:
            raise ConfigError(
                f"unknown field {unknown[0]!r}; known fields: {', '.join(sorted(known))}",
                param=unknown[0],
            )
        kind = values.get("model_type", "minserve")
        _check(kind == "minserve", "model_type", kind, '"minserve"')
        missing = [
            name for name in ("cell", "vocab_size", "d_model", "n_layers") if name not in values
        ]
        if missing:
            raise ConfigError(f"required field {missing[0]!r} is missing", param=missing[0])
        return cls(**{name: value for name, value in values.items() if name in known})

    @classmethod
    def load(cls, path: Path) -> ModelConfig:
        """Reads a config.json. Raises ConfigError, with the path in front of what is wrong."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: not valid JSON: {error}") from error
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: must hold a JSON object")
        try:
            return cls.from_dict(values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.message}", param=error.param) from error

    def save(self, path: Path) -> None:
        """Writes config.json."""
        text = json.dumps({"model_type": "minserve", **dataclasses.asdict(self)}, indent=2)
        path.write_text(text + "\n", encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How one engine runs. None means: chosen for the device (see `Engine`). Raises ConfigError."""

    model: str = "shakespeare-mingru"  # a bundled name, a folder or a Hugging Face repo id
    device: str = "auto"  # "auto", "cpu", "cuda" or "cuda:N"
    dtype: str = "auto"  # or "auto": as stored, where the device computes with that
    quantize: str = "none"  # at load: a Quantization, or "none" (the checkpoint as it is)
    max_slots: int = 256  # sequences that run at once
    max_step_tokens: int | None = None  # prompt tokens read in one step
    max_waiting: int = 4096  # waiting requests; one more is refused
    max_waiting_tokens: int = 2**26  # prompt tokens of waiting requests; likewise
    share_slots: int = 64  # rows of the state pool, on the device, for cached and kept states
    # Bytes of main memory for cached and kept states that have no such row; None = a quarter of
    # what is free, at most 4 GiB. Taken as it is needed.
    host_state_bytes: int | None = None
    # Where kept states lie as files too, so that they survive a restart; None = nowhere.
    state_folder: str | None = None
    # What "stored there" means: the file is written ("write"), or is on the disk itself ("fsync").
    state_sync: str = "write"
    disk_state_bytes: int = 2**36  # that the files there may have; 0 = none, states are in memory
    disk_cache_bytes: int = 0  # of cached states there, beside the kept ones; 0 = none
    state_ttl: float = 86400.0  # seconds after its last use that a kept state is forgotten
    max_states: int = 2**17  # kept states of one owner; more are refused
    # CPU threads of the engine; None = its part of what the container may use
    threads: int | None = None
    cuda_graphs: bool = True
    # A sequence's logits are the same bits in any company and wherever its prompt is split.
    deterministic: bool = False
    # Where what autotuning measured on a GPU is kept for the next start: "auto" (the user's cache
    # folder), "off" (nowhere) or a folder.
    tuning_cache: str = "auto"
    # One server may have several engines, which serve the same model; all else here is each one's.
    engines: int = 1
    rank: int = 0  # of this one among them, from 0; on GPUs its device's number too

    def of_rank(self, rank: int) -> EngineConfig:
        """Another one's, of the same server. Raises ConfigError."""
        return dataclasses.replace(self, rank=rank)

    @property
    def quantization(self) -> Quantization | None:
        """`quantize`, None for "none"."""
        return None if self.quantize == "none" else cast(Quantization, self.quantize)

    def __post_init__(self) -> None:
        _check(
            self.device in ("auto", "cpu", "cuda")
            or (self.device.startswith("cuda:") and self.device[5:].isdigit()),
            "device",
            self.device,
            '"auto", "cpu", "cuda" or "cuda:N"',
        )
        _check(
            _is_int(self.engines) and 1 <= self.engines <= MOST_ENGINES,
            "engines",
            self.engines,
            f"an integer from 1 to {MOST_ENGINES}",
        )
        _check(
            _is_int(self.rank) and 0 <= self.rank < self.engines,
            "rank",
            self.rank,
            f"an integer from 0 to {self.engines - 1}",
        )
        _check(
            self.engines == 1 or self.device in ("auto", "cpu", "cuda", f"cuda:{self.rank}"),
            "device",
            self.device,
            '"auto", "cpu" or "cuda" with several engines, of which each has a GPU of its own',
        )
        _check(
            self.dtype == "auto" or self.dtype in get_args(DtypeName),
            "dtype",
            self.dtype,
            '"auto", "float32", "bfloat16" or "float16"',
        )
        _check(
            self.quantize == "none" or self.quantize in get_args(Quantization),
            "quantize",
            self.quantize,
            '"none", "int8" or "fp8"',
        )
        _check(bool(self.model), "model", self.model, "a bundled name, a folder or a hub id")
        _check_integers(
            self,
            ("max_slots", 1, 2**20, False),
            ("max_step_tokens", 1, 2**24, True),
            ("max_waiting", 0, 2**31, False),
            ("max_waiting_tokens", 1, 2**40, False),
            ("share_slots", 0, 2**20, False),
            ("host_state_bytes", 0, 2**60, True),
            ("disk_state_bytes", 0, 2**60, False),
            ("disk_cache_bytes", 0, 2**60, False),
            ("max_states", 0, 2**40, False),
            ("threads", 1, 2**24, True),
        )
        _check(
            _is_number(self.state_ttl) and 0 < self.state_ttl <= MOST_TTL,
            "state_ttl",
            self.state_ttl,
            f"a number of seconds above 0, at most {MOST_TTL:g}",
        )
        _check(
            self.state_folder is None or bool(self.state_folder),
            "state_folder",
            self.state_folder,
            "a folder",
        )
        _check(
            self.state_sync in get_args(StateSync),
            "state_sync",
            self.state_sync,
            '"write" or "fsync"',
        )
        _check(
            not self.disk_cache_bytes or self.state_folder is not None,
            "disk_cache_bytes",
            self.disk_cache_bytes,
            "0 without a state_folder",
        )
        _check(
            isinstance(self.deterministic, bool),
            "deterministic",
            self.deterministic,
            "true or false",
        )
        _check(
            isinstance(self.tuning_cache, str) and bool(self.tuning_cache),
            "tuning_cache",
            self.tuning_cache,
            '"auto", "off" or a folder',
        )
        _check(
            not self.deterministic
            or self.max_step_tokens is None
            or self.max_step_tokens >= SCAN_CHUNK,
            "max_step_tokens",
            self.max_step_tokens,
            f"at least {SCAN_CHUNK} with deterministic: prompts are split at its multiples",
        )


def host_rows(config: EngineConfig, *, state_bytes: int, vocab_size: int) -> int:
    """How many states, with the logits after them, `host_state_bytes`, which is chosen, holds."""
    return (config.host_state_bytes or 0) // (state_bytes + 4 * vocab_size)
