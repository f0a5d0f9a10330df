"""Context: tokenises continuations together with their context.

A continuation's tokens usually differ from those of the same text alone: a tokenizer may put a
space before a text, or merge characters across the border. So context and continuation are
tokenised together, and the continuation's tokens are those after the longest common prefix with the
context's own tokens. White space at the context's end belongs to the continuation, because
tokenizers mostly join it to the next word (as in lm-evaluation-harness).
"""

from __future__ import annotations

import asyncio
from array import array

from engine.protocol.events import ModelInfo
from service.http.errors import invalid
from service.inference.inputs.sampling import end_of_text, read_prompt
from service.text.tokenizer import THREAD_CHARACTERS, Tokenizer

LONG = 2048  # characters; only the end of a longer context is tokenised with each continuation


class Context:
    """A context of several continuations."""

    def __init__(
        self,
        context: str | list[int],
        name: str,
        tokenizer: Tokenizer | None,
        info: ModelInfo,
        *,
        begins: bool,
        goes_on: bool,
    ) -> None:
        """Take a context.

        Args:
            context: A text or token ids.
            name: Its name in error messages.
            tokenizer: The model's tokenizer, or None.
            info: The model.
            begins: The context is the beginning of a text.
            goes_on: The context continues a state, so it may be empty.
        """
        self._context = context
        self._name = name
        self._tokenizer = tokenizer
        self._info = info
        self._begins = begins
        self._goes_on = goes_on
        self._ids: dict[str, array[int]] = {}  # token ids by text
        self._beginning: tuple[str, array[int]] | None = None  # text that no continuation changes
        self._encoded = 0  # characters since the event loop last ran

    async def ids(self) -> array[int]:
        """Return the token ids of the context alone. Raises ApiError 400."""
        if not isinstance(self._context, str):
            return await self._of_ids(self._context)
        return await self._of_text(self._context)

    async def followed_by(self, continuation: str | list[int], name: str) -> tuple[array[int], int]:
        """Return the token ids of context and continuation, and how many belong to the context.

        `name`: the continuation's name in error messages. Raises ApiError 400, also for a
        continuation that adds no token.
        """
        context = self._context
        if not isinstance(continuation, str):
            before = await self.ids()
            return before + await self._read(continuation, name), len(before)
        if not isinstance(context, str):
            before = await self.ids()
            # If the context is special tokens only, the text begins with the continuation.
            begins = self._begins and self._tokenizer is not None and self._is_silent(before)
            more = await self._read(continuation, name, begins=begins, marks=False)
            return before + more, len(before)
        text = context.rstrip()
        before = await self._of_text(text)
        follows = context[len(text) :] + continuation
        if self._tokenizer is not None and self._tokenizer.joins_nothing:
            return before + await self._read(follows, name), len(before)
        if not text:
            more = await self._read(follows, name, begins=self._begins, marks=False)
            return before + more, len(before)
        whole = await self._whole(text, follows, name)
        common = _common(before, whole)
        if common == len(whole):
            raise invalid(name, "adds no token to its context; at least one is needed")
        if common > 0 or self._goes_on:
            return whole, common
        # The context has no token left after which the first token could be scored.
        if self._info.eos_token_id is not None:
            return array("i", [self._info.eos_token_id]) + whole, 1
        return before + await self._read(follows, name, begins=False), len(before)

    async def _of_text(self, text: str) -> array[int]:
        if text not in self._ids:
            ids = array("i")
            if text or not self._goes_on:
                ids = await self._read(text, self._name, empty=True, begins=self._begins)
            if not ids and not self._goes_on:
                ids = array("i", end_of_text(self._name, self._info))
            self._ids[text] = ids
        return self._ids[text]

    async def _whole(self, text: str, follows: str, name: str) -> array[int]:
        """Return the token ids of a text and its continuation.

        Only the end of a long text is tokenised again with each continuation.
        """
        if self._beginning is None:
            cut = 0
            if self._tokenizer is not None and len(text) > LONG:
                cut = self._tokenizer.last_cut(text)
            ids = array("i")
            if cut:
                ids = await self._read(text[:cut], self._name, empty=True, begins=self._begins)
            self._beginning = text[:cut], ids
        known, ids = self._beginning
        begins = self._begins and not known
        return ids + await self._read(text[len(known) :] + follows, name, empty=True, begins=begins)

    async def _of_ids(self, context: list[int]) -> array[int]:
        if context or self._goes_on:
            return await self._read(context, self._name, empty=self._goes_on)
        return array("i", end_of_text(self._name, self._info))

    async def _read(
        self, prompt: str | list[int], name: str, *, empty: bool = False, **how: bool
    ) -> array[int]:
        self._encoded += len(prompt)
        if self._encoded > THREAD_CHARACTERS:
            await asyncio.sleep(0)
            self._encoded = 0
        return await read_prompt(
            prompt, name, self._tokenizer, self._info, may_be_empty=empty, **how
        )

    def _is_silent(self, ids: array[int]) -> bool:
        assert self._tokenizer is not None
        return not self._tokenizer.decode(ids)


def _common(one: array[int], other: array[int]) -> int:
    """Return the length of the common prefix of two arrays."""
    if one == other[: len(one)]:
        return len(one)
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
