"""ModelRunner: carries out a StepPlan: tensors in, the model, the sampler, token ids and scores
out.

`start` gives the device its work, the copies of the results to the host included, and `finish`
waits for these, which is a step's one wait. On the CPU all of the work is done in `start`.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, cast

import torch
from torch import Tensor

from engine import device, ops
from engine.config import DtypeName, EngineConfig, host_rows
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


class _Samples(NamedTuple):
    """Of a SampleStep, in host memory once the device is done."""

    tokens: Tensor  # [rows] int32
    reported: Reported | None


class _Results(NamedTuple):
    """What a step computes beside what its batch samples, in host memory once the device is
    done."""

    samples: list[_Samples]  # of all rows, in order
    scores: Tensor | None  # reports of all targets
    exports: dict[int, Tensor]  # by ticket

    @property
    def any(self) -> bool:
        """Whether there is something on its way."""
        return bool(self.samples or self.exports) or self.scores is not None


class _Read(NamedTuple):
    """What reading a plan's chunks gives; rows are those of the chunks with `sample`."""

    hidden: Tensor | None  # [tokens, d_model], where there are targets to score
    logits: Tensor | None  # [rows, vocab] fp32
    sample_steps: list[SampleStep]  # of all rows, or none


class Pending(NamedTuple):
    """A step under way."""

    plan: StepPlan
    results: _Results
    keys: list[int]  # whom it samples for, but for its batch
    guided: bool  # the host has a part in this sampling
    run: DecodeRun | None  # of a plain plan
    host_seconds: float  # that it took to begin
    begin: DeviceEvent
    middle: DeviceEvent  # prompts have been read
    end: DeviceEvent
    done: DeviceEvent  # the results are on the host


class ModelRunner:
    """The loaded model with its state pool; carries out plans, one or two at a time.

    One thread makes all calls: `warm_up` first, then `start` and `finish` in turn. `config` is the
    given one with every choice made, `info` what API processes are told of the model.
    On CUDA, fp32 matrix products are fp32: TF32 would cost three digits of the log-probabilities.
    """

    most_steps = MOST_STEPS

    def __init__(self, config: EngineConfig) -> None:
        """Loads the model and takes the memory of its states.

        Args:
            config: what was asked for; device, dtype and threads may be left open.

        Raises:
            CheckpointError: the checkpoint cannot be found or read.
            ConfigError: the states do not fit in the device's free memory, or a value is wrong.
            DeviceError: the device cannot be used.
        """
        folder = loader.resolve(config.model)
        self.config = device.resolve(config, loader.load_config(folder).dtype)
        self._device = torch.device(self.config.device)
        assert self.config.threads is not None
        torch.set_num_threads(self.config.threads)
        torch.set_float32_matmul_precision("highest")
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._events = EventPool(self._device)
        fingerprint = loader.fingerprint(folder)
        model, self.model_config = loader.load_model(
            folder,
            self._device,
            cast(DtypeName, self.config.dtype),
            self.config.quantization,
            known_readable=True,
        )
        parameters = sum(weight.numel() for weight in model.parameters())
        rows = self.config.max_slots + self.config.share_slots
        self._model = select_backend(
            model,
            self._device,
            deterministic=self.config.deterministic,
            reserve=(rows + 1) * self.model_config.state_bytes,
            tuning_folder=tuning_folder(self.config.tuning_cache),
        )
        uploads = UploadRing(self._device)
        self._pool = StatePool(self.model_config, rows, uploads, self._model.initial_state_rows())
        vocab_size, eos_token_ids = self.model_config.vocab_size, self.model_config.eos_token_ids
        slots = self.config.max_slots
        main_memory_rows = host_rows(
            self.config, state_bytes=self.model_config.state_bytes, vocab_size=vocab_size
        )
        self._copier = StateCopier(self._pool, slots, main_memory_rows, vocab_size, uploads)
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
            GrammarMatchers(self.grammars, eos_token_ids, self.config.threads),
        )
        self.info = self._describe(folder, parameters, fingerprint)

    @property
    def overlaps(self) -> bool:
        """Whether a step may be started before the one before it is finished."""
        return self._device.type == "cuda"

    def _describe(self, folder: Path, parameters: int, fingerprint: str) -> ModelInfo:
        given = Path(self.config.model).expanduser()
        return ModelInfo(
            name=given.resolve().name if given.is_dir() else self.config.model,
            folder=str(folder),
            fingerprint=fingerprint,
            cell=self.model_config.cell,
            vocab_size=self.model_config.vocab_size,
            eos_token_ids=self.model_config.eos_token_ids,
            parameters=parameters,
            state_bytes=self.model_config.state_bytes,
            slots=self.config.max_slots,
            device=str(self._device),
            device_name=device.describe(self._device),
            dtype=self.config.dtype,
            quantization=self.model_config.quantization,
            deterministic=self.config.deterministic,
            cell_shape=(self.model_config.n_layers, self.model_config.inner),
            conv_shape=self.model_config.conv_shape,
        )

    @torch.inference_mode()
    def warm_up(self, batches: Collection[int] | None = None) -> None:
        """Runs every kind of step once and captures the CUDA graphs, so that no request pays for
        what libraries do at first use. Comes before the first `start`.

        Args:
            batches: rows of the decode batches to capture graphs for (`cuda_graphs.buckets`);
                others run in larger ones. None: all of them.
        """
        self.grammars.prepare()
        if self._device.type == "cuda" and self.config.cuda_graphs:
            # One pool: graphs run one after another, and none leaves results in it.
            pool, vocab_size = torch.cuda.graph_pool_handle(), self.model_config.vocab_size
            slots, most_tokens = self.config.max_slots, self.config.max_step_tokens
            assert most_tokens is not None
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
        """Carries out one plan: `start` and `finish`, with what they raise."""
        return self.finish(self.start(plan))

    @torch.inference_mode()
    def start(self, plan: StepPlan) -> Pending:
        """Gives the device the work of a plan; on the CPU all of it is done in this call.

        At most one more may be started before it is finished: the host may have a part in the
        sampling of one of the two only, and of two plain ones the second has no new batch.

        Args:
            plan: what to do, in rows of the state pool and keys of sequences.

        Returns:
            What `finish` takes.

        Raises:
            DeviceLost: the device is lost, whatever has found that out.
            Exception: the step could not be started; the rows of its sequences are undefined, and
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
        """After a failed step: waits for the device, and raises DeviceLost where it is lost.

        What was launched before the failure must not meet what the next step uploads. Whoever the
        error comes from (an operator of the extension, cuBLAS, torch), a lost context fails to
        synchronize, and torch.AcceleratorError is that too.
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
            self._copier.keep(plan.after, _rows_by_key(plan), logits)
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
        # An event takes the device a microsecond.
        done = self._events.record() if results.any else end
        return Pending(plan, results, rows.keys, guided, run, 0.0, begin, middle, end, done)

    def is_done(self, pending: Pending) -> bool:
        """Whether `finish` need not wait for it. Raises DeviceLost."""
        try:
            return pending.done.is_passed
        except Exception as error:
            self._check_device(error)
            raise

    def finish(self, pending: Pending) -> StepResult:
        """Waits for the oldest step that was started.

        Args:
            pending: what `start` gave.

        Returns:
            Tokens, scores and exported states, with the seconds that the device and the host took.
            Sequences whose logits were not finite are named in `non_finite`.

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
        """Reads every chunk; the device samples for them where the host has no part in it. Chunks
        that were read before come first."""
        known = self._copier.logits_at(plan.prefill)
        reading = [chunk for chunk in plan.prefill if chunk.source is None]
        slots = [chunk.slot for chunk in plan.prefill if chunk.sample]
        # In a plan in whose rows' sampling the host has a part, it has one in all of it.
        sample = (plan.plain or not plan.decode) and self._context.params.all_plain(slots)
        hidden, logits, sample_steps = None, [], []
        if known is not None:
            logits.append(known)
            if sample:
                done = [chunk for chunk in plan.prefill if chunk.source is not None]
                sample_steps.append(self._prefill.sample(known, done))
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
    """Once the device has done what it was given; whoever has this keeps it until then."""
    host = torch.empty(len(tokens), dtype=tokens.dtype, pin_memory=tokens.is_cuda)
    ops.copy_words_(host, tokens)
    return host


def _by_row(samples: Sequence[_Samples]) -> tuple[list[int], dict[int, PackedLogprobs]]:
    """The tokens of all rows, and the reports of those that asked."""
    tokens: list[int] = []
    reports: dict[int, PackedLogprobs] = {}
    for one in samples:
        if one.reported is not None:
            reports |= {len(tokens) + row: of for row, of in one.reported.by_row().items()}
        tokens += one.tokens.tolist()
    return tokens, reports


def _rows_by_key(plan: StepPlan) -> dict[int, int]:
    """Which row of the logits of a plan's prompts is whose."""
    keys = [chunk.key for chunk in plan.prefill if chunk.sample]
    return {key: row for row, key in enumerate(keys)}
