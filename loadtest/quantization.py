"""What 8-bit weights cost: test losses and size of a model as stored, in int8 and in fp8.

    python -m loadtest.quantization --data tinyshakespeare.txt --model my-model

The losses are the trainer's two, over the last tenth of the text: in windows that each start at
the initial state, and with the state carried through. Quantised models use the activations that
`minserve serve` would choose on the device. The weights' error is the root mean square error of all
quantised matrices relative to them; beside it stands the error with scales from each row's largest
magnitude. Exit code 1 if a quantised model's loss changes by 0.01 nats per token or more.
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


def measure(
    folder: Path, name: str, ids: Tensor, kind: Quantization | None, dtype: DtypeName
) -> Row:
    """Measure a model; `ids` [tokens] is the test text, on the device that computes."""
    model, _ = load_model(folder, ids.device, dtype, kind)
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
    )


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
    print(f"largest change by quantisation: {worst:.4f} nats per token (allowed: {ALLOWED})")
    save_json(args.json, {"device": str(device), "rows": [asdict(row) for row in rows]})
    return 0 if worst < ALLOWED else 1


if __name__ == "__main__":
    raise SystemExit(main())
