"""Mamba of llama.cpp with the same weights, on a CPU, through llama-cpp-python and a GGUF file.

The matrices are BF16 in the file, all else F32, as llama.cpp's own converter writes them. Needs
`pip install llama-cpp-python gguf`.
"""

from __future__ import annotations

import ctypes
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.models.backends.blocks import last_norm
from engine.models.mamba.lm import MambaLM

_MOST_PROMPT = 512  # tokens of a batch
_MOST_TEXT = 2**17  # tokens of a sequence


def write_gguf(model: MambaLM, path: Path) -> None:
    """Write the model as a GGUF file without a vocabulary. Raises ImportError without gguf."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_name("random")
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_context_length(2**20)
    writer.add_embedding_length(config.d_model)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config.n_layers)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(config.inner)
    writer.add_ssm_state_size(config.state_size)
    writer.add_ssm_time_step_rank(config.dt_rank)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)

    def add(name: str, tensor: Tensor, matrix: bool = False) -> None:
        wide = tensor.detach().float().contiguous()
        if not matrix:
            writer.add_tensor(name, wide.numpy())
            return
        bits = wide.bfloat16().view(torch.uint16).numpy()
        writer.add_tensor(name, bits.view("uint8"), raw_dtype=gguf.GGMLQuantizationType.BF16)

    add("token_embd.weight", model.embedding.weight, matrix=True)
    add("output_norm.weight", last_norm(model).weight)
    if not config.tie_embeddings:
        add("output.weight", model.state_dict()["head.weight"], matrix=True)
    for number, (layer, a) in enumerate(zip(model.layers, model.channel_parameters(), strict=True)):
        tensors, at = dict(layer.named_parameters()), f"blk.{number}."
        assert a is not None
        add(at + "attn_norm.weight", tensors["norm.weight"])
        add(at + "ssm_in.weight", tensors["in_proj.weight"], matrix=True)
        add(at + "ssm_conv1d.weight", tensors["conv"])
        bias = tensors.get("conv_bias", torch.zeros(config.inner))
        add(at + "ssm_conv1d.bias", bias)
        add(at + "ssm_x.weight", tensors["x_proj.weight"], matrix=True)
        add(at + "ssm_dt.weight", tensors["dt_proj.weight"], matrix=True)
        add(at + "ssm_dt.bias", tensors["dt_proj.bias"])
        add(at + "ssm_a", a)
        add(at + "ssm_d", tensors["D"])
        add(at + "ssm_out.weight", tensors["out_proj.weight"], matrix=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCpp:
    """llama.cpp with as many threads as torch has.

    Raises ImportError if a package is not installed, and ValueError for what it cannot compute.
    """

    name = "llama.cpp"
    decodes = True

    def __init__(self, model: MambaLM) -> None:
        import llama_cpp

        config = model.config
        if config.selection_norm_eps is not None or config.bias:
            raise ValueError("the peer is Mamba, without norms of dt, B and C and without biases")
        if config.inner != 2 * config.d_model:
            raise ValueError("llama.cpp knows Mamba of twice the width only")
        self._library: Any = llama_cpp
        self._vocab_size = config.vocab_size
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        with tempfile.TemporaryDirectory(prefix="minserve-") as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(model, path)
            wanted = llama_cpp.llama_model_default_params()
            wanted.use_mmap = False
            self._model: Any = llama_cpp.llama_model_load_from_file(str(path).encode(), wanted)
        if not self._model:
            raise ValueError("llama.cpp did not load the file")

    def _context(self, sequences: int, tokens: int) -> Any:
        """Return a context for so many sequences, and so many tokens in a batch."""
        wanted = self._library.llama_context_default_params()
        wanted.n_ctx = _MOST_TEXT * sequences
        wanted.n_seq_max = sequences
        wanted.n_batch = wanted.n_ubatch = max(tokens, 32)
        wanted.n_threads = wanted.n_threads_batch = torch.get_num_threads()
        context = self._library.llama_init_from_model(self._model, wanted)
        if not context:
            raise ValueError(f"llama.cpp has no context for {sequences} sequences")
        return context

    def _read(
        self, context: Any, batch: Any, tokens: list[int], sequences: list[int], first: list[int]
    ) -> None:
        """Read a token each of the given sequences, at the given positions."""
        batch.n_tokens = len(tokens)
        for row, (token, sequence, position) in enumerate(
            zip(tokens, sequences, first, strict=True)
        ):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = row + 1 == len(tokens) or sequences[row + 1] != sequence
        code = self._library.llama_decode(context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")

    def _logits(self, context: Any, row: int) -> Tensor:
        pointer = self._library.llama_get_logits_ith(context, row)
        kind = ctypes.POINTER(ctypes.c_float * self._vocab_size)
        return torch.frombuffer(ctypes.cast(pointer, kind).contents, dtype=torch.float32)

    def prompt(self, tokens: Tensor) -> Tensor:
        """Read a prompt [tokens]; return the logits [vocab] of its last token."""
        context = self._context(1, _MOST_PROMPT)
        batch = self._library.llama_batch_init(_MOST_PROMPT, 0, 1)
        try:
            ids = tokens.tolist()
            for start in range(0, len(ids), _MOST_PROMPT):
                piece = ids[start : start + _MOST_PROMPT]
                places = list(range(start, start + len(piece)))
                self._read(context, batch, piece, [0] * len(piece), places)
            return self._logits(context, -1).clone()
        finally:
            self._library.llama_batch_free(batch)
            self._library.llama_free(context)

    def step(self, batch: int, device: torch.device) -> Callable[[], Tensor]:
        """Return a function that decodes one token of `batch` sequences greedily."""
        context = self._context(batch, batch)
        rows = self._library.llama_batch_init(batch, 0, 1)
        tokens, position = [0] * batch, 0

        def step() -> Tensor:
            nonlocal tokens, position
            self._read(context, rows, tokens, list(range(batch)), [position] * batch)
            position += 1
            found = torch.stack([self._logits(context, row) for row in range(batch)])
            drawn = found.argmax(-1)
            tokens = drawn.tolist()
            return drawn

        weakref.finalize(step, self._library.llama_batch_free, rows)
        weakref.finalize(step, self._library.llama_free, context)
        return step
