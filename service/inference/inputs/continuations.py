"""Continuations of a context, by the ids that the whole text has.

What follows a text is seldom encoded as it would be alone: a tokenizer may put a space before a
text, or join the characters on both sides. So a continuation's ids are those that context and
continuation have together, behind what the two have in common with the context alone. White space
at the context's end belongs to the continuation, where tokenizers mostly keep it (as
lm-evaluation-harness has it).
"""

from __future__ import annotations

import asyncio
from array import array

from engine.protocol.events import ModelInfo
from service.http.errors import invalid
from service.inference.inputs.sampling import end_of_text, read_prompt
from service.text.tokenizer import THREAD_CHARACTERS, Tokenizer

LONG = 2048  # characters: of a longer context only the end is encoded again with a continuation


class Context:
    """What several continuations follow; `name` is what errors call it."""

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
        """`begins`: the context is the beginning of a text. `goes_on`: a state is known to stand
        before it, so that it may be empty."""
        self._context = context
        self._name = name
        self._tokenizer = tokenizer
        self._info = info
        self._begins = begins
        self._goes_on = goes_on
        self._ids: dict[str, array[int]] = {}  # by the text
        self._beginning: tuple[str, array[int]] | None = None  # what no continuation changes
        self._encoded = 0  # characters since the event loop has turned

    async def ids(self) -> array[int]:
        """The context's own ids, all of them."""
        if not isinstance(self._context, str):
            return await self._of_ids(self._context)
        return await self._of_text(self._context)

    async def followed_by(self, continuation: str | list[int], name: str) -> tuple[array[int], int]:
        """The ids of both, and how many of them stand before the continuation's own. Raises
        ApiError 400, also for a continuation that adds nothing."""
        context = self._context
        if not isinstance(continuation, str):
            before = await self.ids()
            return before + await self._read(continuation, name), len(before)
        if not isinstance(context, str):
            before = await self.ids()
            # Special tokens alone are no text: it begins with the continuation.
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
        # Nothing would be left to score the first token after.
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
        """The ids of a text and what follows it. Continuations may be many: their context is not
        encoded with each of them again."""
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
    """How many ids two arrays begin with alike."""
    if one == other[: len(one)]:
        return len(one)
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
