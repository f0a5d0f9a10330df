"""HopperBackend: the decode step of an LM as a chain of linear maps (chain.py), or as one kernel:
for a few sequences (whole_step.py), or of a small model for up to about a hundred
(cluster_step.py). A few sequences may have a kernel that reads the model's weights in 8 bits.

The chain is quickest up to some hundred tokens, where the head may be better off as a kernel of its
own. More are read with products of the library altogether (products.py), or but for the middle of a
layer, out projection and MLP up with GELU. Which way is the quickest is measured for some of the
sizes that graphs are made for (`prepare`), and other sizes go the way of the nearest of them.

A head apart is the library's, of a few rows the chain's last map, or where all of more rows draw
the best token, one that finds it meanwhile (engine/ops/gemm.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.models.backends.autotune import quickest_graph_of
from engine.models.backends.cluster_decode import ClusterDecode
from engine.models.backends.cublas import CublasPath
from engine.models.backends.dispatch import (
    MOST_WITHOUT_LIBRARY,
    OF_FEW,
    OF_THE_LIBRARY,
    ROWS_AT_ONCE,
    TO_A_HEAD,
    ExecutionPath,
    nearest,
    to_be_timed,
    where_the_library_begins,
)
from engine.models.backends.fused_gemm import FusedGemmPath
from engine.models.backends.lm_head import SMALL_VOCABULARY, LmHead
from engine.models.backends.persistent_decode import PersistentDecode, runs_kernels
from engine.models.backends.weight_transforms import move_norm_weights
from engine.models.minrnn.lm import LM
from engine.models.state import ModelState, StepToBests
from engine.ops.fused_norm import rms_norm
from engine.ops.gemm import IN_ONE_PART, SQUARE_ROWS, linear_best
from engine.ops.persistent_decode import EIGHT

_MOST_TOKENS = 65_535 * 128  # of a vocabulary: the rows of a grid, a tile of the head each

#: What `supports` asks of a model's widths, in words.
WIDTHS = (
    f"d_model a multiple of {SQUARE_ROWS}, inner and MLP widths of 8, an out projection, "
    f"a vocabulary of up to {_MOST_TOKENS:,}"
)


# tokens, state, slots -> what is computed
_Read = Callable[[Tensor, ModelState, Tensor, ExecutionPath], Tensor]


def supports(model: LM) -> bool:
    """Whether the kernels run this model: bfloat16 weights on a Hopper GPU that the library was
    built for, widths they can cut. (In float16 products with the residual stream itself, which is
    not divided yet, could overflow.)"""
    config = model.config
    return runs_kernels(model) and config.quantization is None and supports_widths(config)


def supports_widths(config: ModelConfig) -> bool:
    """Whether they are WIDTHS, but for the out projection."""
    return (
        config.d_model % SQUARE_ROWS == 0
        and config.inner % 8 == 0
        and config.mlp_hidden % 8 == 0
        and config.vocab_size <= _MOST_TOKENS
    )


class HopperBackend:
    """A ModelBackend of `model`, which `supports` says yes to. Many tokens and the logits of
    prompts are products of the library, which sums them in an order that the number of rows has a
    part in, and what was measured at start. With `deterministic` nothing is: a row's bits depend on
    that row alone.

    `few`, of the same model with 8-bit weights, computes the steps of a few sequences, unless the
    model's own kernel is quicker for so many.

    Gives the model other weights, as move_norm_weights does."""

    def __init__(
        self, model: LM, *, deterministic: bool = False, few: PersistentDecode | None = None
    ) -> None:
        self._model = model
        self._fixed_order = deterministic
        self._eps = model.config.norm_eps
        self._head, self._vocabulary = LmHead.of(model), model.config.vocab_size
        if deterministic:
            move_norm_weights(model)  # as CublasPath does
        self._products = None if deterministic else CublasPath(model, self._head)
        self._chain = FusedGemmPath(model, self._head, fixed_order=deterministic)
        # In a fixed order the bests are those of the logits to the bit, if these have one part.
        self._finds_best = self._vocabulary > (IN_ONE_PART if deterministic else SMALL_VOCABULARY)
        # Those that compute a step by themselves or up to a head, the quickest for few rows first.
        self._kernels: dict[ExecutionPath, PersistentDecode | ClusterDecode] = {}
        self._to_a_head = set(TO_A_HEAD)  # clusters may end there, too
        if few is not None:
            self._kernels[ExecutionPath.NARROW] = few
        if PersistentDecode.most_rows(model, fixed_order=deterministic) > 0:
            self._kernels[ExecutionPath.WHOLE] = PersistentDecode(
                model, self._head, fixed_order=deterministic
            )
        clusters = None if deterministic else ClusterDecode.of(model)
        if clusters is not None:
            self._kernels[ExecutionPath.CLUSTERS] = clusters
            if clusters.ends_with_hidden:
                self._to_a_head.add(ExecutionPath.CLUSTERS)
        self._most_rows, self._most_tokens = where_the_library_begins(model)
        # The quickest, where several ways were tried.
        self._ways_of_few: dict[int, ExecutionPath] = {}  # steps of up to EIGHT rows
        self._ways_of_steps: dict[int, ExecutionPath] = {}
        self._ways_of_prompts: dict[int, ExecutionPath] = {}
        self._ways_to_bests: dict[int, ExecutionPath] = {}
        # Kernels may read weights before the one ahead on the stream has ended.
        torch.cuda.synchronize(model.norm.weight.device)

    def prepare(
        self, steps: Collection[int], prompts: Collection[int], logits: Collection[int]
    ) -> None:
        """As ModelBackend.prepare."""
        if self._products is None:
            return
        few_rows = to_be_timed({count for count in steps if count <= EIGHT})
        most_untimed = min(self._most_rows_of(ExecutionPath.WHOLE), EIGHT)
        rows = {count for count in steps if count > most_untimed}
        timed_rows, timed_prompts = to_be_timed(rows), to_be_timed(prompts)
        for_products = [n for n in (*timed_rows, *timed_prompts) if n > MOST_WITHOUT_LIBRARY]
        heads = [n for n in timed_rows if n > MOST_WITHOUT_LIBRARY]
        self._products.tune(for_products, [*heads, *logits])
        for found, read, sizes, ways_of in (
            (self._ways_of_few, self._step, few_rows, self._possible_ways_of_few),
            (self._ways_of_steps, self._step, timed_rows, self._possible_ways),
            (self._ways_of_prompts, self._one_prompt, timed_prompts, _possible_ways_of_prompts),
        ):
            for size in sizes:
                ways = ways_of(size)
                if len(ways) > 1:
                    with suppress(torch.OutOfMemoryError):  # then its neighbours' have to do
                        found[size] = self._quickest(read, size, ways)
        for size, way in self._ways_of_steps.items():
            if self._finds_best and size > MOST_WITHOUT_LIBRARY:
                with suppress(torch.OutOfMemoryError):
                    self._ways_to_bests[size] = self._quickest_to_bests(size, way)
        # Those between, whose ways are known now.
        of_steps = [(count, self._way_of_step(count)) for count in sorted(rows)]
        of_prompts = [(count, self._way_of_prompt(count)) for count in sorted(prompts)]
        heads = [n for n, way in of_steps if way in self._to_a_head and n > MOST_WITHOUT_LIBRARY]
        both = [*of_steps, *of_prompts]
        self._products.tune([n for n, way in both if way is ExecutionPath.LIBRARY], heads)
        self._products.tune_around([n for n, way in both if way is ExecutionPath.LIBRARY_AROUND])
        torch.cuda.empty_cache()  # graphs take their memory from elsewhere

    def _most_rows_of(self, way: ExecutionPath) -> int:
        """Of a step that goes this way, 0 where none does."""
        kernel = self._kernels.get(way)
        return 0 if kernel is None else kernel.rows

    def _possible_ways_of_few(self, rows: int) -> list[ExecutionPath]:
        """Of a step of up to EIGHT rows. Where one kernel computes it nothing else is quicker, but
        its like with other weights may be."""
        return [way for way in OF_FEW if rows <= self._most_rows_of(way)]

    def _possible_ways(self, rows: int) -> list[ExecutionPath]:
        """Of a step of any number of rows. Of ways that are alike the first is taken, so the chain
        comes before the library: the more of a step is the library's the more power it takes, and
        the slower a GPU becomes that is at its limit."""
        ways = [ExecutionPath.CHAIN]
        if rows > MOST_WITHOUT_LIBRARY:
            ways += TO_A_HEAD
        if rows <= self._most_rows_of(ExecutionPath.WHOLE):
            ways.append(ExecutionPath.WHOLE)
        if ExecutionPath.CLUSTERS in self._kernels:
            ways.append(ExecutionPath.CLUSTERS)
        return ways

    def _nearest(
        self, found: Mapping[int, ExecutionPath], rows: int, unmeasured: ExecutionPath
    ) -> ExecutionPath:
        return nearest(found, rows, unmeasured, {way: self._most_rows_of(way) for way in OF_FEW})

    def _quickest_to_bests(self, count: int, found: ExecutionPath) -> ExecutionPath:
        """Whether a step whose way ends with all logits, which are read once more by a draw, had
        better go to a head that finds the best."""

        def drawn(tokens: Tensor, state: ModelState, slots: Tensor, way: ExecutionPath) -> Tensor:
            if way in self._to_a_head:
                return self._bests(tokens, state, slots, way)
            return self._step(tokens, state, slots, way).argmax(1)  # takes as long as a draw

        if found in self._to_a_head:  # this one takes no longer
            return found
        ways = [found, ExecutionPath.CHAIN_TO_HEAD]
        if ExecutionPath.CLUSTERS in self._to_a_head:
            ways.append(ExecutionPath.CLUSTERS)
        return self._quickest(drawn, count, ways)

    @torch.no_grad()
    def _quickest(self, read: _Read, count: int, ways: Sequence[ExecutionPath]) -> ExecutionPath:
        """Reads random tokens each way, of as many sequences or as a prompt."""
        device = self._model.norm.weight.device
        random = torch.Generator(device).manual_seed(0)
        tokens = torch.randint(
            self._vocabulary, (count,), dtype=torch.int32, device=device, generator=random
        )
        prompt = read == self._one_prompt
        state = self._model.new_state(1 if prompt else count)
        slots = torch.arange(count, dtype=torch.int32, device=device)
        runs = [partial(read, tokens, state, slots, way) for way in ways]
        # Steps follow one another for as long as somebody is served, prompts come between them.
        return ways[quickest_graph_of(runs, lasting=not prompt)]

    def _one_prompt(
        self, tokens: Tensor, state: ModelState, slots: Tensor, way: ExecutionPath
    ) -> Tensor:
        # Made on the device: nothing may wait for it while others are timed.
        bounds = torch.arange(2, dtype=torch.int32, device=tokens.device) * len(tokens)
        return self._prefill(tokens, bounds, state, slots[:1], way)

    @torch.no_grad()
    def prefill(
        self, tokens: Tensor, cu_seqlens: Tensor, state: ModelState, slots: Tensor
    ) -> Tensor:
        """As LM.prefill."""
        return self._prefill(tokens, cu_seqlens, state, slots, self._way_of_prompt(len(tokens)))

    def _way_of_prompt(self, tokens: int) -> ExecutionPath:
        unmeasured = ExecutionPath.LIBRARY if tokens > self._most_tokens else ExecutionPath.CHAIN
        return nearest(self._ways_of_prompts, tokens, unmeasured)

    def _prefill(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor,
        state: ModelState,
        slots: Tensor,
        way: ExecutionPath,
    ) -> Tensor:
        if self._products is not None and way in OF_THE_LIBRARY:
            middle = self._chain.middle if way is ExecutionPath.LIBRARY_AROUND else None
            return self._products.prefill(tokens, cu_seqlens, state, slots, middle)

        if not self._fixed_order:
            stream = self._chain.prefill(tokens, cu_seqlens, state, slots, normed=False)
            return self._normed(stream.x)
        _, scaled, squares = self._chain.prefill(tokens, cu_seqlens, state, slots)
        mean = _sum_in_pairs(squares) / scaled.shape[1]  # [tokens]
        hidden: Tensor = (scaled * (mean + self._eps).rsqrt().unsqueeze(-1)).to(scaled.dtype)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """As LM.logits."""
        if self._products is None:
            return self._chain.logits(hidden, None)
        return self._products.logits(hidden)

    def initial_state_rows(self) -> Tensor:
        """As LM.initial_state_rows."""
        return self._model.initial_state_rows()

    @torch.no_grad()
    def step(self, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        """Reads one token of every sequence: tokens [batch] int32, slots [batch] int32 -> logits
        [batch, vocabulary] fp32. Rows of `state` move on in place."""
        return self._step(tokens, state, slots, self._way_of_step(len(tokens)))

    def step_to_bests(self, rows: int) -> StepToBests | None:
        """As ModelBackend.step_to_bests."""
        if not self._finds_best:
            return None
        if rows <= MOST_WITHOUT_LIBRARY:  # their logits are as quick
            return None
        if self._fixed_order:
            return self._bests_in_fixed_order
        way = self._way_of_step(rows)
        if way not in self._to_a_head:
            way = self._nearest(self._ways_to_bests, rows, way)
        return partial(self._bests, way=way) if way in self._to_a_head else None

    @torch.no_grad()
    def _bests(
        self, tokens: Tensor, state: ModelState, slots: Tensor, way: ExecutionPath
    ) -> Tensor:
        head = self._head
        if way is ExecutionPath.CHAIN_TO_HEAD and head.bias is None:
            # What a norm divides all logits of a row by does not change their order.
            x = self._chain.step(tokens, state, slots).scaled
        else:
            x = self._to_head(tokens, state, slots, way)
        return linear_best(x, None, 0.0, head.weight, head.bias, self._vocabulary)

    @torch.no_grad()
    def _bests_in_fixed_order(self, tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        head = self._head
        _, scaled, squares = self._chain.step(tokens, state, slots)
        return linear_best(scaled, squares, self._eps, head.weight, head.bias, self._vocabulary)

    def _way_of_step(self, rows: int) -> ExecutionPath:
        few = self._possible_ways_of_few(rows) if 0 < rows <= EIGHT else []
        if few:
            return self._nearest(self._ways_of_few, rows, few[0])
        unmeasured = ExecutionPath.LIBRARY if rows > self._most_rows else ExecutionPath.CHAIN
        for way in (ExecutionPath.WHOLE, ExecutionPath.CLUSTERS):
            at_once = ROWS_AT_ONCE.get(way, self._most_rows_of(way))
            if way in self._kernels and 0 < rows <= at_once:
                unmeasured = way
        return self._nearest(self._ways_of_steps, rows, unmeasured)

    def _step(self, tokens: Tensor, state: ModelState, slots: Tensor, way: ExecutionPath) -> Tensor:
        if self._products is not None and way in self._to_a_head:
            hidden = self._to_head(tokens, state, slots, way)
            if len(tokens) <= MOST_WITHOUT_LIBRARY:
                return self._chain.logits(hidden, None)
            return self._products.logits(hidden)
        kernel = self._kernels.get(way)
        if kernel is not None:
            return kernel.step(tokens, state, slots)[:, : self._vocabulary]
        _, scaled, squares = self._chain.step(tokens, state, slots)
        return self._chain.logits(scaled, squares)

    def _to_head(
        self, tokens: Tensor, state: ModelState, slots: Tensor, way: ExecutionPath
    ) -> Tensor:
        """The last norm's hidden states [batch, d_model], one of the ways to a head."""
        kernel = self._kernels.get(way)
        if kernel is not None:
            return kernel.step(tokens, state, slots)
        if way is ExecutionPath.CHAIN_TO_HEAD:
            return self._normed(self._chain.step(tokens, state, slots, normed=False).x)
        assert self._products is not None
        middle = self._chain.middle if way is ExecutionPath.LIBRARY_AROUND else None
        return self._products.step(tokens, state, slots, middle)

    def _normed(self, x: Tensor) -> Tensor:
        return rms_norm(x, self._eps, self._model.norm.weight)


def _possible_ways_of_prompts(tokens: int) -> list[ExecutionPath]:
    return [ExecutionPath.CHAIN, *(OF_THE_LIBRARY if tokens > MOST_WITHOUT_LIBRARY else ())]


def _sum_in_pairs(rows: Tensor) -> Tensor:
    """The sum of rows [n, tokens], n at least 1: [tokens]. A sum by torch would add them up in an
    order that the number of tokens has a part in."""
    while len(rows) > 1:
        half = len(rows) // 2
        rows = torch.cat((rows[:half] + rows[half : 2 * half], rows[2 * half :]))
    return rows[0]
