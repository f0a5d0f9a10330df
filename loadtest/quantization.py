"""What 8-bit weights and 16-bit states cost: test losses, and the size of a model as stored.

    python -m loadtest.quantization --data tinyshakespeare.txt --model my-model

The losses are the trainer's two, over the last tenth of the text: in windows that each start at
the initial state, and with the state carried through. Quantised models use the activations that
`minserve serve` would choose on the device. The weights' error is the root mean square error of all
quantised matrices relative to them; beside it stands the error with scales from each row's largest
magnitude. A model whose states may be bfloat16 (`--state-dtype`) is measured with both types, also
token by token, when a state is rounded after each. Exit code 1 if a quantised model's loss changes
by 0.01 nats per token or more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.config import DtypeName, Quantization
from engine.device import resolve_device, resolve_dtype
from engine.models.language_model import LanguageModel
from engine.models.loader import load_config, load_model, resolve
from engine.models.quantize import dequantize, quantize
from engine.models.quantized import quantized_matrices
from engine.training.data import Part, split
from engine.training.evaluation import carried_loss, windows_loss
from engine.training.recipe import Recipe
from loadtest.report import command_line, print_environment, print_table, save_json
from service.terminal.text import load_tokenizer

ALLOWED = 0.01  # nats per token, of either loss
STREAMS, MOST_STEPS = 64, 2048  # of the loss token by token


@dataclass(frozen=True)
class Row:
    """One way to store a model's weights; losses are in nats per token."""

    model: str
    weights: str
    activations: str
    bytes: int  # of all weights and scales
    windows: float
    carried: float
    error: float | None  # of quantised weights, relative
    plain_error: float | None  # with scales from the largest magnitude
    states: str | None = None  # their type, where it can be chosen
    stepped: float | None = None  # the loss token by token, in pieces that start at initial states


def measure(
    folder: Path,
    name: str,
    ids: Tensor,
    kind: Quantization | None,
    dtype: DtypeName,
    states: str = "auto",
) -> Row:
    """Measure a model; `ids` [tokens] is the test text, on the device that computes.

    With a type of `states` given, also token by token.
    """
    model, _ = load_model(folder, ids.device, dtype, kind, state_dtype=states)
    errors = (None, None) if kind is None else _weight_errors(folder, model, kind)
    return Row(
        model=name,
        weights=kind or dtype,
        activations=dtype,
        bytes=sum(tensor.nbytes for tensor in model.state_dict().values()),
        windows=windows_loss(model, ids, window=Recipe.window, batch=Recipe.batch).per_token,
        carried=carried_loss(model, ids).per_token,
        error=errors[0],
        plain_error=errors[1],
        states=None if states == "auto" else states,
        stepped=None if states == "auto" else stepped_loss(model, ids),
    )


@torch.no_grad()
def stepped_loss(model: LanguageModel, ids: Tensor) -> float:
    """Return the loss in nats per token when decode steps read the text, in STREAMS pieces."""
    length = min(len(ids) // STREAMS, MOST_STEPS + 1)
    if length < 2:
        raise ValueError(f"the text has fewer than {2 * STREAMS} tokens")
    pieces = ids[: STREAMS * length].view(STREAMS, length)
    state = model.new_state(STREAMS)
    slots = torch.arange(STREAMS, dtype=torch.int32, device=ids.device)
    total = torch.zeros((), dtype=torch.float64, device=ids.device)
    for at in range(length - 1):
        hidden = model.step(pieces[:, at].int().contiguous(), state, slots)
        total += functional.cross_entropy(
            model.logits(hidden).float(), pieces[:, at + 1].long(), reduction="sum"
        )
    return float(total) / (STREAMS * (length - 1))


def _weight_errors(folder: Path, model: LanguageModel, kind: Quantization) -> tuple[float, float]:
    """Return the relative errors of the model's quantised matrices, and of abs-max scales."""
    exact = load_model(folder, "cpu", "float32")[0].state_dict()
    quantized = model.state_dict()
    total = error = plain = 0.0
    for weight, scale in quantized_matrices(model).items():
        wanted = exact[weight].double()
        total += float(wanted.square().sum())
        got = dequantize(quantized[weight].cpu(), quantized[scale].cpu())
        error += float((got - wanted).square().sum())
        simple = dequantize(*quantize(exact[weight], kind, headroom=(1.0,)))
        plain += float((simple - wanted).square().sum())
    return math.sqrt(error / total), math.sqrt(plain / total)


def _test_ids(data: Path, folder: Path) -> Tensor:
    """Return the last tenth of the text's token ids, by which the trainer chooses."""
    vocab = load_config(folder).vocab_size
    ids = load_tokenizer(folder, vocab).encode(data.read_text(encoding="utf-8"), marks=False)
    return split(Part(np.asarray(ids)), window=Recipe.window).valid.to("cpu")


def _change(loss: float, exact: float) -> str:
    return f"{loss:.4f} ({loss - exact:+.4f})"


def _report(rows: Sequence[Row]) -> None:
    exact = rows[0]
    columns = ["weights", "activations", "MB", "windows, nats", "carried, nats", "error, abs-max's"]
    print_table(
        f"{exact.model}: nats per token (change)",
        columns,
        [
            [
                row.weights,
                row.activations,
                f"{row.bytes / 1e6:.2f}",
                _change(row.windows, exact.windows),
                _change(row.carried, exact.carried),
                "" if row.error is None else f"{row.error:.3%}, {row.plain_error:.3%}",
            ]
            for row in rows
        ],
    )


def _report_states(rows: Sequence[Row]) -> None:
    exact = rows[0]
    print_table(
        f"{exact.model}, weights {exact.weights}: nats per token by the type of states (change)",
        ["states", "carried", "token by token"],
        [
            [
                str(row.states),
                _change(row.carried, exact.carried),
                _change(cast("float", row.stepped), cast("float", exact.stepped)),
            ]
            for row in rows
        ],
    )


def main(argv: list[str] | None = None) -> int:
    options = command_line("quantization", __doc__)
    options.add_argument(
        "--data", type=Path, required=True, help="the text that the models were trained on"
    )
    options.add_argument(
        "--model",
        nargs="+",
        required=True,
        help="folders of weights that are not quantised",
    )
    options.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    options.add_argument("--json", type=Path, help="write every figure to this file")
    args = options.parse_args(argv)
    device = resolve_device(args.device)
    torch.set_float32_matmul_precision("highest")
    print_environment()
    rows: list[Row] = []
    worst = 0.0
    for name in args.model:
        folder = resolve(name)
        if load_config(folder).quantization is not None:
            options.error(f"{name}: is quantised; name the checkpoint that it was made from")
        ids = _test_ids(args.data, folder).to(device)
        chosen = cast(DtypeName, resolve_dtype("auto", device, load_config(folder).dtype))
        exact = measure(folder, name, ids, None, "float32")
        found = [exact, measure(folder, name, ids, None, "bfloat16")]
        for kind in get_args(Quantization):
            row = measure(folder, name, ids, kind, chosen)
            changes = (row.windows - exact.windows, row.carried - exact.carried)
            worst = max(worst, *(abs(change) for change in changes))
            found.append(row)
        _report(found)
        rows += found
        if hasattr(load_config(folder), "state_dtype"):
            both = [
                measure(folder, name, ids, None, chosen, one) for one in ("float32", "bfloat16")
            ]
            _report_states(both)
            rows += both
    print(f"largest change by quantisation: {worst:.4f} nats per token (allowed: {ALLOWED})")
    save_json(args.json, {"device": str(device), "rows": [asdict(row) for row in rows]})
    return 0 if worst < ALLOWED else 1


if __name__ == "__main__":
    raise SystemExit(main())
