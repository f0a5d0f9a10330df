"""The figures of one model in `loadtest.engine`, and what follows from them by arithmetic.

Every duration is in seconds. None is a figure that was not asked for or could not be measured, and
`notes` says why.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from loadtest.lm_models import Work


@dataclass
class Decode:
    """Decode steps of one batch, in seconds per step."""

    batch: int
    steps: int = 1  # of a round of the runner, as it was measured first
    greedy: float | None = None  # the runner, from a plan to the ids on the host
    sampled: float | None = None  # likewise, temperature 0.8 and top_p 0.9
    penalised: float | None = None  # likewise, with penalties
    reported: float | None = None  # likewise, with log-probabilities of each token and the 5 best
    reported_engine: float | None = None  # the whole engine with these
    engine: float | None = None  # the whole engine, greedy
    peer: float | None = None  # the same model in plain PyTorch, greedy
    package: float | None = None  # in the package that publishes such models, greedy
    gemm: float | None = None  # the bare matrix products
    default: float | None = None  # `greedy` of the same model where it is not deterministic
    notes: dict[str, str] = field(default_factory=dict)


@dataclass
class Prefill:
    """Reading one prompt of `tokens` tokens and sampling its first token."""

    tokens: int
    seconds: float | None = None
    next_step: float | None = None  # a decode step of the one sequence that has read them
    peer: float | None = None
    package: float | None = None  # the package that publishes such models
    gemm: float | None = None  # the bare matrix products, read in pieces as the runner does
    default: float | None = None  # `seconds` of the same model where it is not deterministic
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Agreement:
    """Whether ours and the peer compute the same, for tokens that ours sampled greedily.

    It counts how many are the peer's best tokens as well, and how far the logits of the others are
    below that, in standard deviations of the row's logits. More than `tolerance` is not rounding.
    """

    compared: int
    equal: int
    worst_gap: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.worst_gap <= self.tolerance


@dataclass
class ModelFigures:
    """One model with one type of weights on one device."""

    name: str
    size: str | None  # a key of lm_models.SIZES, None for checkpoints
    cell: str
    dtype: str
    quantization: str | None
    device: str  # "cuda" or "cpu"
    work: Work
    read_rate: float  # bytes per second
    step_tokens: int  # prompt tokens that the runner reads at once
    deterministic: bool = False
    package: str | None = None  # name of the package that is a peer
    decode: list[Decode] = field(default_factory=list)
    prefill: list[Prefill] = field(default_factory=list)
    agreement: Agreement | None = None
    remarks: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        how = "deterministic" if self.deterministic else None
        return ", ".join(filter(None, (self.name, self.dtype, self.quantization, how)))

    @property
    def gemm_rate(self) -> float | None:
        """FLOP per second of the best bare GEMM sequence; None without one."""
        rates = [self.decode_flops(row.batch) / row.gemm for row in self.decode if row.gemm]
        rates += [self.prefill_flops(row.tokens) / row.gemm for row in self.prefill if row.gemm]
        return max(rates, default=None)

    def decode_flops(self, batch: int) -> int:
        """Return the FLOP of one decode step."""
        return batch * self.work.flops

    def prefill_flops(self, tokens: int) -> int:
        """Return the FLOP of one prompt; only its last token needs the head."""
        return tokens * (self.work.flops - self.work.head_flops) + self.work.head_flops

    def decode_limit(self, batch: int) -> float:
        """Return the least seconds of a step: weights and states to move, products to compute."""
        read = self.work.step_bytes(batch) / self.read_rate
        return max(read, self.decode_flops(batch) / self.gemm_rate if self.gemm_rate else 0.0)

    def prefill_limit(self, tokens: int) -> float:
        """Return the least seconds of a prompt, each piece of which reads the weights."""
        pieces = -(-tokens // self.step_tokens)
        read = pieces * self.work.weight_bytes / self.read_rate
        return max(read, self.prefill_flops(tokens) / self.gemm_rate if self.gemm_rate else 0.0)

    def at_batch(self, batch: int) -> Decode | None:
        return next((row for row in self.decode if row.batch == batch), None)

    def as_json(self) -> dict[str, Any]:
        """Return every figure, with the limits that follow from them."""
        found = asdict(self)
        for row in found["decode"]:
            row["limit"] = self.decode_limit(row["batch"])
            row["step_bytes"] = self.work.step_bytes(row["batch"])
            row["flops"] = self.decode_flops(row["batch"])
        for row in found["prefill"]:
            row["limit"] = self.prefill_limit(row["tokens"])
            row["flops"] = self.prefill_flops(row["tokens"])
        return {**found, "gemm_rate": self.gemm_rate}
