"""Whether texts change under load: many concurrent clients against each client alone.

    python -m loadtest.agreement --data tinyshakespeare.txt --clients 64

Asks a running server for greedy texts. Without `--deterministic`, matrix products may round
differently with the number of rows, so a text may differ where its two best tokens were nearly
tied. The tool prints the margin between them at each first difference. Exit code 1 if a text
differs.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from loadtest.prompts import Prompts
from loadtest.report import command_line, print_environment, save_json
from loadtest.with_httpx import httpx


async def _answer(client: httpx.AsyncClient, prompt: str, tokens: int) -> dict[str, Any]:
    body = {
        "prompts": [prompt],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
    }
    response = await client.post("/v1/generate", json=body)
    response.raise_for_status()
    result: dict[str, Any] = response.json()["results"][0]
    return result


def first_difference(alone: dict[str, Any], together: dict[str, Any]) -> tuple[int, float] | None:
    """Return where two answers first differ; None if they are equal.

    The result is (position, margin of the two best log-probabilities there when asked alone).
    """
    pairs = zip(alone["token_ids"], together["token_ids"], strict=True)
    for position, (one, other) in enumerate(pairs):
        if one != other:
            best = sorted(alone["logprobs"]["top_logprobs"][position].values(), reverse=True)
            return position, best[0] - best[1]
    return None


async def run(args: argparse.Namespace) -> dict[str, Any]:
    prompts = Prompts(args.data, args.min_prompt, args.max_prompt, args.seed)
    texts = [prompts.draw() for _ in range(args.clients)]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=args.url, timeout=600.0, limits=limits) as client:
        alone = [await _answer(client, text, args.max_tokens) for text in texts]
        together = await asyncio.gather(*(_answer(client, text, args.max_tokens) for text in texts))
    differing = [
        found
        for one, other in zip(alone, together, strict=True)
        if (found := first_difference(one, other)) is not None
    ]
    drift = max(
        (
            abs(a - b)
            for one, other in zip(alone, together, strict=True)
            if first_difference(one, other) is None
            for a, b in zip(
                one["logprobs"]["token_logprobs"], other["logprobs"]["token_logprobs"], strict=True
            )
        ),
        default=0.0,
    )
    return {
        "clients": args.clients,
        "tokens_each": args.max_tokens,
        "differing": len(differing),
        "margins": [margin for _, margin in differing],
        "largest_logprob_difference": drift,
    }


def main(argv: list[str] | None = None) -> int:
    options = command_line("agreement", __doc__)
    options.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the server")
    options.add_argument("--data", type=Path, help="text file to cut prompts from")
    options.add_argument(
        "--clients", type=int, default=64, help="clients that ask at the same time"
    )
    options.add_argument("--max-tokens", type=int, default=64, help="tokens of each answer")
    options.add_argument(
        "--min-prompt", type=int, default=1, help="length of the shortest prompt, bytes"
    )
    options.add_argument(
        "--max-prompt", type=int, default=5000, help="length of the longest prompt, bytes"
    )
    options.add_argument("--seed", type=int, default=0, help="seed of the prompts")
    options.add_argument("--json", type=Path, help="write every figure to this file")
    args = options.parse_args(argv)
    figures = asyncio.run(run(args))
    print_environment()
    print(
        f"{figures['differing']} of {figures['clients']} greedy texts of {args.max_tokens} tokens "
        f"differ between {args.clients} concurrent clients and each alone; margins where they do: "
        f"{[f'{margin:.2e}' for margin in figures['margins']]}; largest difference of a "
        f"log-probability elsewhere {figures['largest_logprob_difference']:.2e}"
    )
    save_json(args.json, figures)
    return 1 if figures["differing"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
