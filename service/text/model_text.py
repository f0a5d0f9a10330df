"""What a model's folder says of text: its tokenizer and its chat template."""

from __future__ import annotations

import asyncio
from pathlib import Path

from engine.protocol.events import ModelInfo
from service.text.chat_template import ChatTemplate
from service.text.tokenizer import Tokenizer


async def load_text(info: ModelInfo) -> tuple[Tokenizer | None, ChatTemplate]:
    """A model's tokenizer, where it has one, and chat template. Raises CheckpointError."""
    folder = Path(info.folder)
    tokenizer = await asyncio.to_thread(Tokenizer.load, folder, info.vocab_size)
    return tokenizer, await asyncio.to_thread(ChatTemplate.load, folder, tokenizer)
