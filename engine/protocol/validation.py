"""The engine's validation of requests, whoever sent them.

Decoding has checked the types already. A value that would index outside a tensor or turn logits
into NaN must not reach a step, because it would fail every other sequence in the batch.
"""

from __future__ import annotations

import math
from array import array

import numpy as np

from engine.config import MOST_TTL
from engine.errors import InvalidRequest
from engine.protocol.requests import LEAST_PRIORITY, MOST_PRIORITY, KeepState, Request
from engine.protocol.sampling_params import MOST_OWNER_BYTES, SamplingParams, endings
from engine.protocol.token_ids import ID_BYTES, unpack_ids

INT32_MAX = 2**31 - 1
SEED_MAX = 2**63 - 1
MOST_GRAMMAR = 2**20  # characters in a grammar
MOST_MARKS = 64  # entries in cache_points; each costs a step and a copy of a state
MOST_SALT_BYTES = 64
FEW_TOKENS = 64  # for up to this many tokens plain Python is faster than making an array


def check_request(request: Request, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
    """Check every field of a request.

    Raises InvalidRequest, which names the parameter and says what is allowed.
    """
    if len(request.prompt) % ID_BYTES:
        raise InvalidRequest(
            f"prompt has {len(request.prompt)} bytes; allowed: packed int32 token ids",
            param="prompt",
        )
    length = len(request.prompt) // ID_BYTES
    if length == 0 and (not request.state or request.score):
        raise InvalidRequest("prompt is empty; allowed: at least one token", param="prompt")
    if length > FEW_TOKENS:
        packed = np.frombuffer(request.prompt, np.int32)
        _check_id("prompt", int(packed.min()), vocab_size)
        _check_id("prompt", int(packed.max()), vocab_size)
    elif length:
        unsigned = array("I")
        unsigned.frombytes(request.prompt)
        if max(unsigned) >= vocab_size:  # or one is negative
            ids = unpack_ids(request.prompt)
            _check_id("prompt", min(ids), vocab_size)
            _check_id("prompt", max(ids), vocab_size)
    if request.score:
        _check_range("score_from", request.score_from, 0 if request.state else 1, length)
    if request.keep is not None:
        _check_keep(request.keep)
    if request.cache_salt and len(request.cache_salt.encode()) > MOST_SALT_BYTES:
        raise InvalidRequest(
            f"cache_salt is too long; allowed: up to {MOST_SALT_BYTES} bytes of UTF-8",
            param="cache_salt",
        )
    if request.score_top:
        _check_range("score_top", request.score_top, 0, vocab_size)
    if request.cache_points:
        _check_points(request.cache_points, length)
    if request.owner and len(request.owner.encode()) > MOST_OWNER_BYTES:
        raise InvalidRequest(
            f"owner is too long; allowed: up to {MOST_OWNER_BYTES} bytes of UTF-8", param="owner"
        )
    if request.priority:
        _check_range("priority", request.priority, LEAST_PRIORITY, MOST_PRIORITY)
    if request.timeout is not None and not 0.0 < request.timeout < math.inf:
        _check_number("timeout", request.timeout, above=0.0)
    _check_sampling(request.sampling, vocab_size, eos_token_ids)


def _check_keep(keep: KeepState) -> None:
    if keep.ttl is not None:
        check_ttl("keep", keep.ttl)
    if not (keep.store or keep.export):
        raise InvalidRequest("keep asks for nothing; set store, export or both", param="keep")


def _check_points(points: tuple[int, ...], length: int) -> None:
    if len(points) > MOST_MARKS:
        raise InvalidRequest(
            f"cache_points has {len(points)} marks; allowed: at most {MOST_MARKS}",
            param="cache_points",
        )
    for mark in points:
        _check_range("cache_points", mark, 1, length)


def check_ttl(param: str, seconds: float) -> None:
    """Check a lifetime in seconds; raises InvalidRequest that names `param`."""
    _check_number(param, seconds, above=0.0, most=MOST_TTL)


def _check_sampling(
    params: SamplingParams, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> None:
    """Check the sampling parameters; default values, the common case, are skipped quickly.

    To save time, a check function is called only for values that fail or that few requests set.
    """
    if not 0 <= params.max_tokens <= INT32_MAX:
        _check_range("max_tokens", params.max_tokens, 0, INT32_MAX)
    if params.min_tokens:
        _check_range("min_tokens", params.min_tokens, 0, params.max_tokens)
        if len(endings(params, eos_token_ids)) >= vocab_size:
            raise InvalidRequest(
                "min_tokens cannot be met: every token of the vocabulary ends the answer",
                param="min_tokens",
            )
    if params.top_k:
        _check_range("top_k", params.top_k, 0, INT32_MAX)
    if not 0 <= params.seed <= SEED_MAX:
        _check_range("seed", params.seed, 0, SEED_MAX)
    if params.choice:
        _check_range("choice", params.choice, 0, INT32_MAX)
    if params.logprobs is not None:
        _check_range("logprobs", params.logprobs, 0, vocab_size)
    if not 0.0 <= params.temperature < math.inf:
        _check_number("temperature", params.temperature, least=0.0)
    if not 0.0 <= params.top_p <= 1.0:
        _check_number("top_p", params.top_p, least=0.0, most=1.0)
    if params.min_p:
        _check_number("min_p", params.min_p, least=0.0, most=1.0)
    if params.repetition_penalty != 1:
        _check_number("repetition_penalty", params.repetition_penalty, above=0.0)
    if params.presence_penalty:
        _check_number("presence_penalty", params.presence_penalty)
    if params.frequency_penalty:
        _check_number("frequency_penalty", params.frequency_penalty)
    if params.grammar is not None and len(params.grammar.text) > MOST_GRAMMAR:
        raise InvalidRequest(
            f"grammar has {len(params.grammar.text)} characters; allowed: up to {MOST_GRAMMAR}",
            param="grammar",
        )
    if params.logit_bias:
        for token, bias in params.logit_bias.items():
            _check_id("logit_bias", token, vocab_size)
            _check_number("logit_bias", bias)
    for token in params.stop_token_ids:
        _check_id("stop_token_ids", token, vocab_size)


def _check_range(param: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidRequest(
            f"{param} is {value}; allowed: an integer from {least} to {most}", param=param
        )


def _check_id(param: str, token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise InvalidRequest(
            f"{param} has token id {token}; allowed: 0 to {vocab_size - 1}", param=param
        )


def _check_number(
    param: str,
    value: float,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
) -> None:
    if math.isfinite(value) and value >= least and value > above and value <= most:
        return
    allowed = ["a finite number"]
    if least > -math.inf:
        allowed.append(f"at least {least:g}")
    if above > -math.inf:
        allowed.append(f"above {above:g}")
    if most < math.inf:
        allowed.append(f"at most {most:g}")
    raise InvalidRequest(f"{param} is {value}; allowed: {', '.join(allowed)}", param=param)
