"""Metrics: all Prometheus metrics of a server, fed by engine step events and by HTTP requests.

Every application has a registry of its own. Gauges are read at the time of a scrape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Info
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from engine.errors import BY_CODE
from engine.protocol.events import Finished, ModelInfo, Stats, StepEvents
from engine.protocol.requests import FinishReason
from service.observability.histograms import Counts, HistogramCollector, HistogramSeries
from service.observability.merge import RestartsCollector, Snapshot
from service.observability.outcomes import OUTCOMES

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
TOKENS = tuple(4.0**power for power in range(12))  # 1 to 4,194,304
SEQUENCES = tuple(2.0**power for power in range(13))  # 1 to 4,096
# Finer, because a step of a small model takes tens of microseconds.
STEP_SECONDS = (0.00001, 0.000025, 0.00005, *SECONDS)
ROUNDS = (0.0, 1.0, 2.0, 3.0, 4.0, 8.0, 16.0)
ENDPOINTS = ("generate", "score", "completions", "chat/completions", "states", "states/text")
GENERATING = ("generate", "completions", "chat/completions")
MISSES = ("new", "unaligned", "unheld", "short")  # reasons of prefix cache misses
TIERS = ("device", "host", "disk")
FETCHES = ("memory", "store", "new", "refused", "unavailable")  # results of looking up a state
CUTS = ("stalled", "late_head")  # reasons why connections were cut


class Metrics:
    """The metrics of one application, with a method for each event that changes them."""

    def __init__(
        self,
        load: Callable[[], Stats],
        restarts: Callable[[], int],
        engines: Callable[[], Sequence[int | None]] = lambda: [],
        count: int = 1,
    ) -> None:
        """Create the metrics.

        Args:
            load: Returns the load of all engines, for gauges.
            restarts: Returns how many engines were restarted.
            engines: Returns how many requests each engine holds; None for a missing engine.
            count: Engines that are meant to serve.
        """
        self.registry = CollectorRegistry()
        self._all_counts: list[Counts] = []  # counts to flush before the registry is read
        self.first_tokens = self._histogram(
            "time_to_first_token_seconds",
            "Time from an HTTP request's arrival to its first token; "
            "if it is not streamed, until the engine had that token.",
        )
        self.gaps = self._histogram(
            "inter_token_latency_seconds",
            "Time per token after the first; one observation per delivery to a stream, "
            "or the mean of a request that is not streamed.",
            STEP_SECONDS,
        )
        self._end_to_end = self._histogram(
            "e2e_request_latency_seconds",
            "Time from an HTTP request's arrival to its last byte: generate, completions, chat.",
        )
        self._score_latency = self._histogram(
            "score_latency_seconds",
            "Time from an HTTP request's arrival to its last byte: score.",
        )
        self._queue = self._histogram(
            "request_queue_time_seconds",
            "Time from arrival in the engine to the first step, or to the end without one.",
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "Time from the first step until the prompt is read."
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "Time from the first token to the last."
        )
        self._prompt_lengths = self._histogram(
            "request_prompt_tokens", "Prompt tokens per request.", TOKENS
        )
        self._answer_lengths = self._histogram(
            "request_generation_tokens", "Generated tokens per request, scores excluded.", TOKENS
        )
        steps = self._histograms(
            "engine_step_seconds",
            "Time that an engine step spends on prefill, and on decoding.",
            STEP_SECONDS,
            ("phase",),
        )
        self._prefill_step = steps.of("prefill")
        self._decode_step = steps.of("decode")
        self._release_seconds = self._histogram(
            "disconnect_release_seconds",
            "Time from a client's disconnect until the engine has ended its request.",
        )
        self._release_rounds = self._histogram(
            "disconnect_release_rounds",
            "Engine messages from a client's disconnect until its request has ended.",
            ROUNDS,
        )
        self._batch = self._histogram("step_batch_size", "Sequences in an engine step.", SEQUENCES)
        self._grammar = self._histogram(
            "grammar_compile_seconds",
            "Time to compile a grammar or schema that is not cached, without the wait for a turn.",
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens read.")
        self._answer_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._prefix_queries = self._counter(
            "prefix_cache_queries_tokens", "Prompt tokens looked up in the prefix cache."
        )
        self._prefix_hits = self._counter(
            "prefix_cache_hits_tokens", "Prompt tokens that a cached state had already read."
        )
        self._hits = self._counter(
            "prefix_cache_hits", "Requests that continued from a cached state."
        )
        self._misses = self._counter(
            "prefix_cache_misses", "Requests without a usable cached state.", ("reason",)
        )
        self._evictions = self._counter("state_evictions", "States evicted from a tier.", ("tier",))
        self._store_errors = self._counter(
            "state_store_errors",
            "Named or cached states that could not be written to the state folder, or removed "
            "from it.",
        )
        self._fetches = self._counter(
            "state_fetches",
            "Names of states that were looked up in the shared state store, by what was found.",
            ("result",),
        )
        self._fetch_seconds = self._histograms(
            "state_fetch_seconds",
            "Time that a request waits while a name is looked up in the shared state store.",
            SECONDS,
            ("result",),
        )
        self._write_seconds = self._histogram(
            "state_store_write_seconds",
            "Time until the shared state store has acknowledged a state.",
        )
        self._requests = self._counter(
            "requests", "HTTP requests for the model.", ("endpoint", "outcome")
        )
        self._success = self._counter(
            "request_success", "Requests that the engine has finished.", ("finish_reason",)
        )
        self._errors = self._counter(
            "request_errors",
            "HTTP requests for the model that were answered with an error.",
            ("code",),
        )
        self._cuts = self._counter(
            "connections_cut", "Connections cut because nothing moved on them.", ("reason",)
        )
        self._http = self._counter("http_requests", "HTTP requests.", ("method", "path", "status"))
        self._model = Info("minserve_model", "The loaded model.", registry=self.registry)
        self._http_counts = self._counts(self._http)
        self._request_counts = self._counts(self._requests)
        self._success_counts = self._counts(self._success)
        self._gauges(load)
        self._engine_gauges(engines, count)
        self._begin()
        self.registry.register(RestartsCollector(restarts))

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...] = SECONDS
    ) -> HistogramSeries:
        return self._histograms(name, text, buckets).of()

    def _histograms(
        self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
    ) -> HistogramCollector:
        histogram = HistogramCollector(f"minserve_{name}", text, buckets, labels)
        self.registry.register(histogram)
        return histogram

    def _counts(self, counter: Counter) -> Counts:
        counts = Counts(counter)
        self._all_counts.append(counts)
        return counts

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"minserve_{name}", text, labels, registry=self.registry)

    def _gauges(self, load: Callable[[], Stats]) -> None:
        for name, text, field in (
            ("requests_running", "Sequences that hold a slot.", "running"),
            ("requests_waiting", "Requests that wait for a slot.", "waiting"),
            (
                "waiting_prompt_tokens",
                "Prompt tokens of the requests that wait for a slot.",
                "waiting_tokens",
            ),
            ("state_slots_used", "State slots in use.", "slots_used"),
            ("state_slots_total", "State slots of all engines.", "slots_total"),
            (
                "state_usage_ratio",
                "State slots in use as a part of all engines' slots, 0 to 1; "
                "cached and kept states do not count.",
                "state_usage",
            ),
            ("states", "States kept under an id.", "states"),
        ):
            gauge = Gauge(f"minserve_{name}", text, registry=self.registry)
            gauge.set_function(partial(_stat, load, field))
        self._most_waiting = Gauge(
            "minserve_requests_waiting_limit",
            "Most requests that may wait for a slot.",
            registry=self.registry,
        )
        self._most_waiting_tokens = Gauge(
            "minserve_waiting_prompt_tokens_limit",
            "Most prompt tokens that may wait.",
            registry=self.registry,
        )
        state = Gauge(
            "minserve_state_bytes", "Bytes of states, by tier.", ["tier"], registry=self.registry
        )
        fields = ("state_bytes", "host_state_bytes", "disk_state_bytes")
        for tier, field in zip(TIERS, fields, strict=True):
            state.labels(tier=tier).set_function(partial(_stat, load, field))

    def _engine_gauges(self, engines: Callable[[], Sequence[int | None]], count: int) -> None:
        Gauge("minserve_engines", "Engines that are configured.", registry=self.registry).set(count)
        Gauge(
            "minserve_engines_serving", "Engines that take requests.", registry=self.registry
        ).set_function(lambda: sum(held is not None for held in engines()))
        gauge = Gauge(
            "minserve_engine_requests",
            "Requests that run or wait in an engine.",
            ["engine"],
            registry=self.registry,
        )
        for rank in range(count):
            gauge.labels(engine=str(rank)).set_function(partial(_held, engines, rank))

    def _begin(self) -> None:
        """Create all known label values with zero, so that rates include their first event."""
        for endpoint in ENDPOINTS:
            for outcome in OUTCOMES:
                self._requests.labels(endpoint=endpoint, outcome=outcome)
        for reason in get_args(FinishReason):
            self._success.labels(finish_reason=reason)
        for code in BY_CODE:
            self._errors.labels(code=code)
        for reason in CUTS:
            self._cuts.labels(reason=reason)
        for reason in MISSES:
            self._misses.labels(reason=reason)
        for tier in TIERS:
            self._evictions.labels(tier=tier)
        for result in FETCHES:
            self._fetches.labels(result=result)
            self._fetch_seconds.of(result)

    def set_limits(self, requests: int, prompt_tokens: int) -> None:
        """Set the limits of all engines' queues together: requests and their prompt tokens."""
        self._most_waiting.set(requests)
        self._most_waiting_tokens.set(prompt_tokens)

    def model_loaded(self, name: str, info: ModelInfo) -> None:
        """Set the info metric of the loaded model."""
        self._model.info(
            {
                "name": name,
                "fingerprint": info.fingerprint,
                "cell": info.cell,
                "dtype": info.dtype,
                "quantization": info.quantization or "none",
                "deterministic": str(info.deterministic).lower(),
                "device": info.device,
                "device_name": info.device_name,
            }
        )

    def on_step(self, events: StepEvents) -> None:
        """Count one engine step."""
        stats = events.stats
        if stats.batch_size:
            self._batch.observe(stats.batch_size)
        if stats.prefill_tokens:
            self._prefill_step.observe(stats.prefill_seconds)
            self._prompt_tokens.inc(stats.prefill_tokens)
        if stats.decode_steps:
            self._decode_step.observe_times(stats.decode_seconds, stats.decode_steps)
        if stats.decode_tokens:  # also without decode steps: a prompt's step samples a first token
            self._answer_tokens.inc(stats.decode_tokens)
        if stats.prefix_queries_tokens:
            self._prefix_queries.inc(stats.prefix_queries_tokens)
            self._prefix_hits.inc(stats.prefix_hits_tokens)
        if stats.prefix_hits:
            self._hits.inc(stats.prefix_hits)
        for reason, misses in stats.prefix_misses.items():
            self._misses.labels(reason=reason).inc(misses)
        for tier, evicted in stats.evictions.items():
            self._evictions.labels(tier=tier).inc(evicted)
        if stats.store_errors:
            self._store_errors.inc(stats.store_errors)
        for result, fetches in stats.state_fetches.items():
            self._fetches.labels(result=result).inc(len(fetches))
            for seconds in fetches:
                self._fetch_seconds.of(result).observe(seconds)
        for seconds in stats.state_writes:
            self._write_seconds.observe(seconds)
        for finished in events.finished:
            self._finished(finished)

    def _finished(self, finished: Finished) -> None:
        timing = finished.timing
        self._success_counts.of(finished.reason).value += 1
        self._prompt_lengths.observe(finished.prompt_tokens)
        if finished.completion_tokens or finished.reason != "length":  # not a score
            self._answer_lengths.observe(finished.completion_tokens)
        self._queue.observe(timing.queue)
        if timing.prefill is not None:
            self._prefill.observe(timing.prefill)
        if timing.decode is not None:
            self._decode.observe(timing.decode)

    def grammar_checked(self, seconds: float) -> None:
        """Observe the time to compile a grammar that was not cached, valid or not."""
        self._grammar.observe(seconds)

    def gathered(self, finished: Finished, before: float) -> None:
        """Observe the token times of a request that is not streamed, from the engine's timing.

        `before`: seconds from the HTTP request's arrival until it was submitted to the engine.
        """
        timing = finished.timing
        if timing.prefill is None or timing.decode is None:
            return
        self.first_tokens.observe(before + timing.queue + timing.prefill)
        if finished.completion_tokens > 1:
            self.gaps.observe(timing.decode / (finished.completion_tokens - 1))

    def released(self, since: float, rounds: int) -> None:
        """Observe how long the engine took to end a request after its client disconnected.

        Args:
            since: When the client disconnected, in seconds by time.perf_counter.
            rounds: Messages of the engine since then.
        """
        self._release_seconds.observe(time.perf_counter() - since)
        self._release_rounds.observe(rounds)

    def connection_cut(self, reason: str) -> None:
        """Count a connection that was cut; `reason` is one of CUTS."""
        self._cuts.labels(reason=reason).inc()

    def http_request(
        self,
        method: str,
        path: str,
        status: int,
        outcome: str | None,
        seconds: float,
        error: str | None = None,
    ) -> None:
        """Count an HTTP request that has ended.

        Args:
            method: Its method, or "other".
            path: The template of its route, or "other".
            status: The answer's status.
            outcome: One of OUTCOMES; None for requests that are not inference.
            seconds: From its arrival until the answer's last byte.
            error: The code of the error in the answer, if any.
        """
        self._http_counts.of(method, path, str(status)).value += 1
        if outcome is None:
            return
        endpoint = path.removeprefix("/v1/")
        self._request_counts.of(endpoint, outcome).value += 1
        if error is not None:
            self._errors.labels(code=error).inc()
        if outcome == "ok" and endpoint == "score":
            self._score_latency.observe(seconds)
        if outcome == "ok" and endpoint in GENERATING:
            self._end_to_end.observe(seconds)

    def snapshot(self) -> Snapshot:
        """Return all metrics as they are now."""
        for counts in self._all_counts:
            counts.flush()
        return Snapshot(self.registry)


def _held(engines: Callable[[], Sequence[int | None]], rank: int) -> float:
    held = engines()  # empty before a model is loaded
    return (held[rank] or 0) if held else 0


def _stat(load: Callable[[], Stats], field: str) -> float:
    value: float = getattr(load(), field)
    return value
