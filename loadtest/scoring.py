"""Whether `/v1/score` gives the trainer's loss, over the last tenth of a text.

    python -m loadtest.scoring --data tinyshakespeare.txt

Asks a running server, and computes the loss with carried state in this process. Exit code 1 if they
differ by more than 0.001 nats per token.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.models.loader import load_model, resolve
from engine.training.evaluation import carried_loss
from loadtest.report import command_line, print_environment, save_json
from loadtest.with_httpx import httpx

ALLOWED = 1e-3  # nats per scored token


def main(argv: list[str] | None = None) -> int:
    """Return 1 if the two losses differ by more than ALLOWED, else 0."""
    options = command_line("scoring", __doc__)
    options.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the server")
    options.add_argument(
        "--data", type=Path, required=True, help="the text that the model was trained on"
    )
    options.add_argument(
        "--model", default=EngineConfig.model, help="the model that the server serves"
    )
    options.add_argument("--json", type=Path, help="write every figure to this file")
    args = options.parse_args(argv)
    text = args.data.read_text(encoding="utf-8")
    text = text[int(len(text) * 0.9) :]

    begin = time.perf_counter()
    response = httpx.post(f"{args.url}/v1/score", json={"texts": [text]}, timeout=600)
    response.raise_for_status()
    seconds = time.perf_counter() - begin
    result = response.json()["results"][0]
    served = -result["total_logprob"] / result["num_scored_tokens"]

    model, _ = load_model(resolve(args.model), torch.device("cpu"), "float32")
    ids = torch.tensor(result["token_ids"], dtype=torch.int32)
    trained = carried_loss(model, ids).per_token
    print_environment()
    print(
        f"{result['num_scored_tokens']} tokens: {served:.6f} nats per token through /v1/score "
        f"({seconds:.1f} s), {trained:.6f} by the trainer, state carried"
    )
    save_json(args.json, {"served": served, "trained": trained, "seconds": seconds})
    return 0 if abs(served - trained) <= ALLOWED else 1


if __name__ == "__main__":
    raise SystemExit(main())
