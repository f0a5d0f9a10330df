"""ModelRunner: executes step plans: runs the model and the sampler, returns token ids and scores.

`start` gives the device its work, including the copies of the results to the host. `finish` waits
for these, the only wait of a step. On the CPU all work is done in `start`.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, cast

import torch
from torch import Tensor

from engine import device, ops
from engine.config import DtypeName, EngineConfig, check, host_rows
from engine.errors import DeviceLost
from engine.models import loader
from engine.models.backends.selector import select_backend
from engine.models.backends.tuning_cache import tuning_folder
from engine.ops.upload import UploadRing
from engine.protocol.events import ModelInfo
from engine.protocol.logprobs import PackedLogprobs
from engine.protocol.requests import Request
from engine.protocol.sampling_params import MOST_STOP_IDS, SamplingParams, is_adjusted, is_plain
from engine.protocol.token_ids import pack_ids
from engine.runner.context import RunnerContext
from engine.runner.cuda_graphs import buckets, long_prompts, prompt_buckets
from engine.runner.device_batch import DecodeRun, DeviceBatch, to_drawn
from engine.runner.device_events import DeviceEvent, EventPool
from engine.runner.guided_decoding import GuidedSampler, GuidedStep, rows_of
from engine.runner.prefill import PrefillRunner
from engine.runner.prompt_logprobs import score, to_scored
from engine.runner.sampling.batch_params import BatchSamplingParams
from engine.runner.sampling.logits_processors import LogitsProcessors
from engine.runner.sampling.logprobs import Reported
from engine.runner.sampling.sampler import Sampler, SampleStep
from engine.runner.state_copies import StateCopier, exported
from engine.runner.state_pool import StatePool
from engine.slot_choice import with_slots
from engine.step_plan import (
    MOST_STEPS,
    Admission,
    DecodeRow,
    PrefillChunk,
    Sampled,
    Scored,
    StepPlan,
    StepResult,
)
from engine.structured_output.grammar_cache import GrammarCache
from engine.structured_output.matchers import GrammarMatchers

log = logging.getLogger(__name__)


class _Samples(NamedTuple):
    """The tokens of a SampleStep, in host memory; valid once the device is done."""

    tokens: Tensor  # [rows] int32
    reported: Reported | None


class _Results(NamedTuple):
    """A step's results except for its batch's, in host memory; valid once the device is done."""

    samples: list[_Samples]  # samples of all rows, in order
    scores: Tensor | None  # reports of all targets
    exports: dict[int, Tensor]  # by ticket

    @property
    def any(self) -> bool:
        """Whether any result is being copied."""
        return bool(self.samples or self.exports) or self.scores is not None


class _Read(NamedTuple):
    """The result of reading a plan's chunks; rows are the chunks with `sample`."""

    hidden: Tensor | None  # [tokens, d_model] of all chunks; None: nothing was read
    logits: Tensor | None  # [rows, vocab] fp32
    sample_steps: list[SampleStep]  # the samples of all rows, or empty


class Pending(NamedTuple):
    """A step in flight."""

    plan: StepPlan
    results: _Results
    keys: list[int]  # sequences that are sampled for, except for the batch
    guided: bool  # the host takes part in the sampling
    run: DecodeRun | None  # the decode steps of a plain plan
    host_seconds: float  # host time for starting the step
    begin: DeviceEvent
    middle: DeviceEvent  # after the prompts were read
    end: DeviceEvent
    done: DeviceEvent  # the results are on the host


class ModelRunner:
    """The loaded model with its state pool; executes plans, one or two at a time.

    One thread makes all calls: `warm_up` first, then `start` and `finish` in turn. `config` is the
    given one with every open choice made; `info` describes the model for API processes.

    On CUDA, fp32 matrix products are computed in fp32: TF32 would cost three digits of the
    log-probabilities.
    """

    most_steps = MOST_STEPS

    def __init__(self, config: EngineConfig) -> None:
        """Load the model and allocate the memory of its states.

        Args:
            config: the requested configuration; device, dtype and threads may be open.

        Raises:
            CheckpointError: the checkpoint cannot be found or read.
            ConfigError: the states do not fit in the device's free memory, or a value is wrong.
            DeviceError: the device cannot be used.
        """
        folder = loader.resolve(config.model)
        self.config = device.resolve(config, loader.load_config(folder).dtype)
        self._device = torch.device(self.config.device)
        threads = self.config.threads
        assert threads is not None
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("highest")
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._events = EventPool(self._device)
        fingerprint = loader.fingerprint(folder, self.config.state_dtype)
        model, self.model_config = loader.load_model(
            folder,
            self._device,
            cast(DtypeName, self.config.dtype),
            self.config.quantization,
            state_dtype=self.config.state_dtype,
            known_readable=True,
        )
        # Such a state is rounded at the end of each part of a prompt, and what is a part depends on
        # the load.
        states = getattr(self.model_config, "state_dtype", "float32")
        check(
            not self.config.deterministic or states == "float32",
            "state_dtype",
            states,
            '"float32" with deterministic',
        )
        parameters = sum(weight.numel() for weight in model.parameters())
        self.config = with_slots(
            self.config, self._device, state_bytes=self.model_config.state_bytes
        )
        slots, share_slots = self.config.max_slots, self.config.share_slots
        assert slots is not None and share_slots is not None
        rows = slots + share_slots
        log.info(
            "states: %s bytes a sequence; %d MB for %d running sequences and %d cached or kept"
            " states, at most %d MB more in main memory",
            f"{self.model_config.state_bytes:,}",
            (rows + 1) * self.model_config.state_bytes // 10**6,
            slots,
            share_slots,
            (self.config.host_state_bytes or 0) // 10**6,
        )
        self._model = select_backend(
            model,
            self._device,
            deterministic=self.config.deterministic,
            reserve=(rows + 1) * self.model_config.state_bytes,
            tuning_folder=tuning_folder(self.config.tuning_cache),
        )
        uploads = UploadRing(self._device)
        self._pool = StatePool(
            *(self.model_config, rows, uploads, self._model.initial_state()),
            host_bytes=self.config.host_state_bytes or 0,
        )
        vocab_size, eos_token_ids = self.model_config.vocab_size, self.model_config.eos_token_ids
        d_model = self.model_config.d_model
        main_memory_rows = host_rows(
            self.config, state_bytes=self.model_config.state_bytes, d_model=d_model
        )
        self._copier = StateCopier(
            self._pool, slots, main_memory_rows, d_model, self._model.hidden_dtype, uploads
        )
        params = BatchSamplingParams(slots, vocab_size, eos_token_ids)
        processors = LogitsProcessors(slots, vocab_size, eos_token_ids, uploads)
        self._context = context = RunnerContext(
            model=self._model,
            state=self._pool.state,
            sampler=Sampler(params, processors, uploads),
            params=params,
            processors=processors,
            uploads=uploads,
        )
        self._batch = DeviceBatch(context, slots)
        self._prefill = PrefillRunner(context)
        self.grammars = GrammarCache(folder, vocab_size)
        self._guided = GuidedSampler(
            context,
            GuidedStep(context, slots, vocab_size),
            GrammarMatchers(self.grammars, eos_token_ids, threads),
        )
        self.info = self._describe(folder, parameters, slots, fingerprint)

    @property
    def overlaps(self) -> bool:
        """Whether a step may be started before the previous one is finished."""
        return self._device.type == "cuda"

    def _describe(self, folder: Path, parameters: int, slots: int, fingerprint: str) -> ModelInfo:
        given = Path(self.config.model).expanduser()
        return ModelInfo(
            name=given.resolve().name if given.is_dir() else self.config.model,
            folder=str(folder),
            fingerprint=fingerprint,
            family=self.model_config.family,
            cell=self.model_config.cell,
            vocab_size=self.model_config.vocab_size,
            eos_token_ids=self.model_config.eos_token_ids,
            parameters=parameters,
            d_model=self.model_config.d_model,
            state_bytes=self.model_config.state_bytes,
            slots=slots,
            device=str(self._device),
            device_name=device.describe(self._device),
            dtype=self.config.dtype,
            quantization=self.model_config.quantization,
            deterministic=self.config.deterministic,
            state=self.model_config.state,
            backend=self._model.info,
        )

    @torch.inference_mode()
    def warm_up(self, batches: Collection[int] | None = None) -> None:
        """Run every kind of step once and capture the CUDA graphs, before the first `start`.

        Requests then do not pay for what libraries do at first use.

        Args:
            batches: sizes of decode batches to capture graphs for (`cuda_graphs.buckets`); others
                run in larger ones. None: all sizes.
        """
        self.grammars.prepare()
        if self._device.type == "cuda" and self.config.cuda_graphs:
            # One memory pool for all graphs, since they run one after another and leave no results
            # in it.
            pool, vocab_size = torch.cuda.graph_pool_handle(), self.model_config.vocab_size
            slots, most_tokens = self.config.max_slots, self.config.max_step_tokens
            assert slots is not None and most_tokens is not None
            longest = self._prefill.worth_graphs(long_prompts(most_tokens))
            by_chunks = prompt_buckets(most_tokens, slots, longest)
            # Long prompts are read in pieces of `most_tokens`, with a graph or without.
            sizes = {most_tokens}.union(*by_chunks.values())
            steps = buckets(slots, batches)
            self._model.prepare(steps, sizes, list(by_chunks))
            self._prefill.capture(by_chunks, vocab_size, pool)
            self._batch.capture(steps, vocab_size, pool)
            self._guided.capture(steps, pool)
        plain = (
            SamplingParams(temperature=0),
            SamplingParams(repetition_penalty=1.1, logit_bias={0: 1.0}),
            SamplingParams(logprobs=0),
            SamplingParams(top_k=2, top_p=0.9, min_p=0.1, min_tokens=1, logprobs=1),
        )
        guided = SamplingParams(stop_token_ids=tuple(range(MOST_STOP_IDS + 1)))
        for sampling in (*plain, guided):
            request = Request(id=0, prompt=pack_ids([0]), sampling=sampling, score=True)
            tokens, targets = array("i", [0]), array("i", [0])
            self.run(
                StepPlan(
                    admit=[Admission(request, key=-1, slot=0, source=None, cached_tokens=0)],
                    prefill=[PrefillChunk(-1, 0, 0, tokens, targets, score_top=1, sample=True)],
                )
            )
            row = DecodeRow(-1, 0, token=0, position=1)
            self.run(StepPlan(decode=[row]))
            if is_plain(sampling, self.model_config.eos_token_ids):
                batch = StepPlan(decode=[row], at=[0], plain=True, adjusted=is_adjusted(sampling))
                batch.top = -1 if sampling.logprobs is None else sampling.logprobs
                self.run(batch)
                self.run(replace(batch, leave=[0], again=True, steps=2))
            self.run(StepPlan(release=[-1]))

    def run(self, plan: StepPlan) -> StepResult:
        """Execute one plan, by `start` and `finish`; raises what they raise."""
        return self.finish(self.start(plan))

    @torch.inference_mode()
    def start(self, plan: StepPlan) -> Pending:
        """Give the device the work of a plan; on the CPU all of it is done in this call.

        At most one more plan may be started before this one is finished. The host may then take
        part in the sampling of only one of the two, and if both are plain, the second must not have
        a new batch.

        Args:
            plan: refers to rows of the state pool and to keys of sequences.

        Returns:
            A handle for `finish`.

        Raises:
            DeviceLost: the device is lost, whichever call has noticed it.
            Exception: the step could not be started; the rows of its sequences are undefined, but
                other steps may follow.
        """
        began = perf_counter()
        try:
            pending = self._begin(plan)
            return pending._replace(host_seconds=perf_counter() - began)
        except Exception as error:
            self._check_device(error)
            raise

    def _check_device(self, error: Exception) -> None:
        """Wait for the device after a failed step, and raise DeviceLost if it is lost.

        Waiting is needed because work that was launched before the failure must not meet the next
        step's uploads. A lost context fails to synchronize, whoever raised the error (an operator
        of the extension, cuBLAS, torch); torch.AcceleratorError means the same.
        """
        if self._device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self._device)
        except Exception as lost:
            raise DeviceLost(str(lost)) from error
        if isinstance(error, torch.AcceleratorError):
            raise DeviceLost(str(error)) from error

    def _begin(self, plan: StepPlan) -> Pending:
        self._guided.release(plan.release)
        self._copier.carry_out(plan.before)
        self._copier.begin(plan.admit)
        self._admit(plan.admit)
        begin = self._events.record()
        hidden, logits, sample_steps = self._read(plan)
        if plan.after:
            self._copier.keep(plan.after, _ends_by_key(plan), hidden)
        scores = None
        if hidden is not None:
            scores = score(
                self._model.logits,
                self.model_config.vocab_size,
                hidden,
                plan.prefill,
                self._context.uploads,
            )
        run, rows = None, rows_of(plan)
        guided = False
        middle = self._events.record() if plan.prefill else begin
        if plan.plain:
            run = self._batch.start(plan, sample_steps)
        elif not sample_steps and (steps := self._guided.sample(plan, rows, logits)):
            sample_steps, guided = steps, True
        end = self._events.record()
        exports = self._copier.export(plan.exports)
        results = _fetch(sample_steps, scores, exports)
        # An event costs the device a microsecond.
        done = self._events.record() if results.any else end
        return Pending(plan, results, rows.keys, guided, run, 0.0, begin, middle, end, done)

    def is_done(self, pending: Pending) -> bool:
        """Return whether `finish` would return without waiting. Raises DeviceLost."""
        try:
            return pending.done.is_passed
        except Exception as error:
            self._check_device(error)
            raise

    def finish(self, pending: Pending) -> StepResult:
        """Wait for the oldest started step.

        Args:
            pending: the result of `start`.

        Returns:
            Tokens, scores and exported states, with the time that device and host took. Sequences
            whose logits were not finite are listed in `non_finite`.

        Raises:
            DeviceLost: the device is lost.
        """
        plan, results, keys, guided, run, host_seconds, begin, middle, end, done = pending
        try:
            done.wait()
        except Exception as error:
            self._check_device(error)
            raise
        arrived = perf_counter()
        tokens, reports = _by_row(results.samples)
        complete = self._guided.take(keys, tokens) if guided else ()
        sampled = [
            Sampled(key, token, reports.get(row), key in complete)
            for row, (key, token) in enumerate(zip(keys, tokens, strict=True))
        ]
        non_finite = [one.key for one in sampled if one.token < 0]
        scored: list[Scored] = []
        if results.scores is not None:
            scored, spoiled = to_scored(plan.prefill, results.scores)
            non_finite += spoiled
        drawn, spoiled = (None, []) if run is None else to_drawn(run)
        if not plan.decodes:
            middle = end
        return StepResult(
            sampled=sampled,
            rejected=self._guided.rejected() if guided else {},
            drawn=drawn,
            scored=scored,
            non_finite=sorted({*non_finite, *spoiled}),
            exports=exported(results.exports),
            prefill_seconds=begin.seconds_until(middle) if plan.prefill else 0.0,
            decode_seconds=middle.seconds_until(end) if plan.decodes else 0.0,
            host_seconds=host_seconds + perf_counter() - arrived,
        )

    def _admit(self, admissions: Sequence[Admission]) -> None:
        self._guided.admit(admissions)
        self._context.params.admit(admissions)
        self._context.processors.admit(admissions)

    def _read(self, plan: StepPlan) -> _Read:
        """Read every chunk, and sample for them unless the host takes part in it.

        Chunks whose hidden states are stored, so that nothing need be read, come first.
        """
        stored = [chunk for chunk in plan.prefill if chunk.source is not None]
        reading = [chunk for chunk in plan.prefill if chunk.source is None]
        slots = [chunk.slot for chunk in plan.prefill if chunk.sample]
        # If the host takes part in the sampling of a plan's rows, it does so for all of the plan.
        sample = (plan.plain or not plan.decode) and self._context.params.all_plain(slots)
        hidden, logits, sample_steps = None, [], []
        if stored:
            logits.append(self._stored_logits(stored))
            if sample:
                sample_steps.append(self._prefill.sample(logits[0], stored))
        if reading:
            read = self._prefill(reading, sample)
            hidden = read.hidden
            if read.logits is not None:
                logits.append(read.logits)
            if read.sampled is not None:
                sample_steps.append(read.sampled)
        if len(logits) > 1:
            logits = [torch.cat(logits)]
        return _Read(hidden, logits[0] if logits else None, sample_steps)

    def _stored_logits(self, chunks: Sequence[PrefillChunk]) -> Tensor:
        """Return the logits [n, vocab] fp32 after the hidden states stored at the chunks' sources.

        They are computed once for each source, since samples of one prompt share theirs.
        """
        sources = [chunk.source for chunk in chunks if chunk.source is not None]
        rows = {source: row for row, source in enumerate(dict.fromkeys(sources))}
        logits = self._model.logits(self._copier.hidden_at(list(rows)))
        if len(rows) == len(sources):
            return logits
        return logits.index_select(
            0, self._context.uploads.put([rows[source] for source in sources])
        )


def _fetch(
    sample_steps: Sequence[SampleStep], scores: Tensor | None, exports: dict[int, Tensor]
) -> _Results:
    samples = [
        _Samples(_on_host(one.tokens), None if one.reported is None else one.reported.to_host())
        for one in sample_steps
    ]
    if scores is not None:
        scores = scores.to("cpu", non_blocking=True)
    return _Results(samples, scores, exports)


def _on_host(tokens: Tensor) -> Tensor:
    """Copy to host memory; valid once the device is done. The caller must keep it until then."""
    host = torch.empty(len(tokens), dtype=tokens.dtype, pin_memory=tokens.is_cuda)
    ops.copy_words_(host, tokens)
    return host


def _by_row(samples: Sequence[_Samples]) -> tuple[list[int], dict[int, PackedLogprobs]]:
    """Return the tokens of all rows, and the reports of those that asked, by row."""
    tokens: list[int] = []
    reports: dict[int, PackedLogprobs] = {}
    for one in samples:
        if one.reported is not None:
            reports |= {len(tokens) + row: of for row, of in one.reported.by_row().items()}
        tokens += one.tokens.tolist()
    return tokens, reports


def _ends_by_key(plan: StepPlan) -> dict[int, int]:
    """Return the row of the hidden states after each prompt that is read to its end, by key."""
    rows, end = {}, 0
    for chunk in plan.prefill:
        end += len(chunk.tokens)
        if chunk.sample and chunk.source is None:
            rows[chunk.key] = end - 1
    return rows
