"""The shapes that are measured, and how the command line writes them.

- `8x4096x2048`: sequences x tokens x channels.
- `varlen128x8192x2048`: 128 packed sequences with lengths drawn from 1 to 8,192 by a fixed seed.
- `126x16+1x1900in4096x1152`: 126 packed sequences of 16 tokens and one of 1,900 in a tensor of
  4,096 rows, as a round of prompts has them; the rows behind belong to no sequence.
- `16x768`: batch x width of a step or a head, or rows x vocabulary of draws.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

CUDA_SHAPES = [
    "8x4096x2048",
    "1x65536x768",
    "64x1024x1024",
    "1x8192x2048",
    "1x1048576x768",
    "varlen128x8192x2048",
]
# 10 GB of traffic in float32, measured with time contiguous only. The other shape at which time-
# contiguous scans are published, 768 rows of 65,536, is 1x65536x768.
CUDA_TIME_SHAPES = ["1x65536x13200"]
CPU_SHAPES = ["64x1024x1024", "1x65536x768", "varlen32x4096x1024"]
CPU_QUICK_SHAPES = ["16x1024x1024", "1x32768x768"]
STEP_BATCHES = [1, 16, 64, 256, 1024, 4096]
STEP_WIDTHS = [768, 2048, 8192]
CPU_STEP_BATCHES = [1, 64, 1024]
CPU_STEP_WIDTHS = [768, 2048]
DRAWS = ["1x32000", "16x32000", "64x32000", "256x32000", "1024x32000", "4096x32000"]
DRAWS += ["1024x128256", "1024x66"]
HEADS = [f"{rows}x{width}" for width in (768, 2048) for rows in (64, 128, 256, 512, 1024, 4096)]
# Of Mamba's models of 130 M, 1.4 B and 2.8 B.
SELECTIVE = [f"{scan}x{inner}" for inner in (1536, 4096, 5120) for scan in ("1x1024", "1x16384")]
SELECTIVE += ["16x1024x4096", "126x16+1x1900in4096x4096"]
SELECTIVE += [f"{batch}x{inner}" for inner in (1536, 4096, 5120) for batch in (1, 16, 64, 256)]
CPU_SELECTIVE = ["1x1024x1536", "4x128x1536", "1x1536", "16x1536"]
# Of layers of GRU, LSTM and SRU.
GATED = ["1x512x1024", "1x4096x1024", "64x512x1024", "64x4096x1024", "1x1024", "64x1024"]
CPU_GATED = ["1x512x1024", "64x512x1024", "1x1024", "64x1024"]
CPU_QUICK_GATED = ["1x512x1024", "1x1024", "64x1024"]
CPU_DRAWS = ["1x32000", "64x32000", "64x66"]


@dataclass(frozen=True)
class ScanShape:
    """The lengths of packed sequences, and the number of channels."""

    label: str
    lengths: tuple[int, ...]
    channels: int
    packed: bool  # lengths differ: no [batch, time, channels] tensor holds them
    behind: int = 0  # rows that are no sequence's, of a serving scan's tensors

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)

    @property
    def elements(self) -> int:
        """Numbers in one [tokens, channels] tensor."""
        return self.tokens * self.channels

    @property
    def uniform(self) -> tuple[int, int, int]:
        """(batch, time, channels) of a shape that is not packed."""
        return len(self.lengths), self.lengths[0], self.channels

    def cu_seqlens(self, device: torch.device) -> Tensor:
        edges = list(accumulate(self.lengths, initial=0))
        return torch.tensor(edges, dtype=torch.int32, device=device)


def parse_scan(label: str) -> ScanShape | None:
    """Return the scan shape that `label` names; None if it names a step.

    Raises ValueError for sequences that do not fit.
    """
    if match := re.fullmatch(r"(\d+x\d+(?:\+\d+x\d+)*)in(\d+)x(\d+)", label):
        runs = [map(int, run.split("x")) for run in match[1].split("+")]
        lengths = tuple(length for count, length in runs for _ in range(count))
        behind, channels = int(match[2]) - sum(lengths), int(match[3])
        if behind < 0:
            raise ValueError(f"shape {label!r}: the sequences have more tokens than the tensor")
        return ScanShape(label, lengths, channels, packed=True, behind=behind)
    match = re.fullmatch(r"(varlen)?(\d+)x(\d+)x(\d+)", label)
    if match is None:
        return None
    sequences, time, channels = (int(part) for part in match.groups()[1:])
    if match[1] is None:
        return ScanShape(label, (time,) * sequences, channels, packed=False)
    draw = random.Random(0)
    lengths = tuple(draw.randint(1, time) for _ in range(sequences))
    return ScanShape(label, lengths, channels, packed=True)


def parse_step(label: str) -> tuple[int, int] | None:
    """Return (batch, width) that `label` names; None if it names a scan."""
    match = re.fullmatch(r"(\d+)x(\d+)", label)
    return None if match is None else (int(match[1]), int(match[2]))


@dataclass(frozen=True)
class Selection:
    """The shapes to measure, by kind of operator.

    Scans are measured in both layouts, or with time contiguous only. Draws are rows x vocabulary,
    heads are rows x width. `selective_` shapes are those of Mamba's scans and steps, `gated_` those
    of GRU's, LSTM's and SRU's.
    """

    scans: tuple[ScanShape, ...]
    time_scans: tuple[ScanShape, ...]
    steps: tuple[tuple[int, int], ...]
    draws: tuple[tuple[int, int], ...]
    heads: tuple[tuple[int, int], ...]
    selective_scans: tuple[ScanShape, ...]
    selective_steps: tuple[tuple[int, int], ...]
    gated_scans: tuple[ScanShape, ...]
    gated_steps: tuple[tuple[int, int], ...]


def select(labels: list[str] | None, device: torch.device, quick: bool) -> Selection:
    """Return the named shapes, or the default ones. Raises ValueError for a malformed label."""
    if labels is None:
        if device.type == "cuda":
            scan_labels, time_labels = CUDA_SHAPES, CUDA_TIME_SHAPES
            batches, widths = STEP_BATCHES, STEP_WIDTHS
        else:
            scan_labels, time_labels = CPU_QUICK_SHAPES if quick else CPU_SHAPES, []
            batches, widths = CPU_STEP_BATCHES, CPU_STEP_WIDTHS
        step_labels = [f"{batch}x{width}" for width in widths for batch in batches]
        draw_labels = DRAWS if device.type == "cuda" else CPU_DRAWS
        selective_labels = SELECTIVE if device.type == "cuda" else CPU_SELECTIVE
        quick_or_not = CPU_QUICK_GATED if quick else CPU_GATED
        gated_labels = GATED if device.type == "cuda" else quick_or_not
        head_labels = HEADS
        labels = [*scan_labels, *step_labels]
    else:
        time_labels = [label for label in labels if label in CUDA_TIME_SHAPES]
        labels = [label for label in labels if label not in CUDA_TIME_SHAPES]
        draw_labels = head_labels = selective_labels = gated_labels = labels
    scans = [(label, parse_scan(label), parse_step(label)) for label in labels]
    for label, scan, step in scans:
        if scan is None and step is None:
            raise ValueError(
                f"shape {label!r} is neither 8x4096x2048, varlen128x8192x2048 nor"
                " 127x16in2048x1152 (scans) nor 16x768 (steps, draws, heads)"
            )
    return Selection(
        tuple(scan for _, scan, _ in scans if scan is not None),
        tuple(scan for scan in map(parse_scan, time_labels) if scan is not None),
        tuple(step for _, _, step in scans if step is not None),
        tuple(shape for shape in map(parse_step, draw_labels) if shape is not None),
        tuple(shape for shape in map(parse_step, head_labels) if shape is not None),
        tuple(shape for shape in map(parse_scan, selective_labels) if shape is not None),
        tuple(shape for shape in map(parse_step, selective_labels) if shape is not None),
        tuple(shape for shape in map(parse_scan, gated_labels) if shape is not None),
        tuple(shape for shape in map(parse_step, gated_labels) if shape is not None),
    )
