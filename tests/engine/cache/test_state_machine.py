"""The headline test of states: whatever is submitted, aborted, kept, forked, exported, imported and
evicted in whatever order, every answer is that of a solo run; in `deterministic` bit for bit.

Rows that hold nothing are filled with NaN after every step: nobody may read what is not his.
"""

from __future__ import annotations

import dataclasses
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    multiple,
    rule,
)

from engine.cache import disk_tier as disk_cache
from engine.cache.transfer import StateTransfer
from engine.config import EngineConfig
from engine.engine import Engine
from engine.models.loader import save_model
from engine.models.minrnn.config import MinRnnConfig
from engine.models.minrnn.lm import LM
from engine.protocol.events import Finished
from engine.protocol.failed import Failed
from engine.protocol.logprobs import PackedLogprobs, TokenLogprobs
from engine.protocol.requests import KeepState, Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.state_calls import StateCall, StateInfo, StateReply
from engine.protocol.token_ids import pack_ids
from engine.runner.model_runner import ModelRunner
from engine.step_plan import Copy, StepPlan
from tests.engine.cache.test_radix_tree import nodes_of

VOCAB = 61
CLOSE = 2e-4  # log-probabilities of a text that was read in other pieces
# The long run: MINSERVE_STATE_STEPS=10000 pytest tests/engine/cache/test_state_machine.py -k long
STEPS = int(os.environ.get("MINSERVE_STATE_STEPS", "60"))


WIDTH = {"cpu": 16, "cuda": 384}  # on a GPU: one whose kernels give the same bits in any company
CLOSE_ON = {"cpu": CLOSE, "cuda": 0.3}  # there in bfloat16


def _model(device: str) -> str:
    folder = Path(_FOLDER.name) / device
    if not (folder / "config.json").exists():
        folder.mkdir(exist_ok=True)
        torch.manual_seed(5)
        config = MinRnnConfig(
            cell="minlstm",
            vocab_size=VOCAB,
            d_model=WIDTH[device],
            n_layers=2,
            conv_kernel=3,
            dtype="float32",
        )
        model = LM(config)
        with torch.no_grad():
            assert model.head is not None
            model.head.weight.mul_(4)
        save_model(folder, model, config, "float32")
    return str(folder)


_FOLDER = TemporaryDirectory(prefix="minserve-test-")


@lru_cache(maxsize=4)
def _runner(deterministic: bool, solo: bool, device: str) -> ModelRunner:
    one = 4 * (2 * 2 * WIDTH[device] + 2 * 2 * WIDTH[device] + WIDTH[device])
    runner = ModelRunner(
        EngineConfig(
            model=_model(device),
            device=device,
            dtype="float32" if device == "cpu" else "bfloat16",
            threads=1,
            max_slots=1 if solo else 5,
            share_slots=0 if solo else 3,
            host_state_bytes=0 if solo else 12 * one,
            max_step_tokens=4096 if solo else 160,
            deterministic=deterministic,
        )
    )
    runner.warm_up()
    return runner


@dataclass(frozen=True)
class Text:
    """What a state stands after: all tokens, and if all of it was read and then drawn greedily,
    how many of them were drawn (else None)."""

    tokens: tuple[int, ...] = ()
    drawn: int | None = 0


@dataclass(eq=False)
class Asked:
    """A request, and what has come of it."""

    request: Request
    before: Text
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    kept: int | None = None  # an abort said so
    end: Finished | Failed | None = None


@lru_cache(maxsize=4096)
def _solo_encoded(deterministic: bool, raw: bytes, device: str) -> Finished:
    request = msgspec.msgpack.decode(raw, type=Request)
    runner = _runner(deterministic, True, device)
    engine = Engine(runner)
    engine.add("solo", request)
    scores: list[PackedLogprobs] = []
    while engine.has_work:
        for events in engine.step().values():
            for run in events.scores:
                scores.append(run.reports)
            for end in events.finished:
                runner.run(StepPlan(release=[0]))
                whole = PackedLogprobs(request.score_top, b"".join([one.packed for one in scores]))
                reports = whole if scores else end.reports
                return Finished(0, "length", 0, 0, 0, answer=end.answer, reports=reports)
    raise AssertionError("a solo run failed")


def _solo(deterministic: bool, request: Request, device: str) -> Finished:
    """What the request gives on an engine that serves and caches nothing else."""
    return _solo_encoded(deterministic, msgspec.msgpack.encode(request), device)


class StateMachine(RuleBasedStateMachine):
    """Bundles: requests under way, and names of states."""

    device = "cpu"
    folder = ""  # where states lie as files too; "": nowhere
    asked = Bundle("asked")
    names = Bundle("names")

    @initialize(deterministic=st.booleans())
    def start(self, deterministic: bool) -> None:
        self.deterministic = deterministic
        self.runner = _runner(deterministic, False, self.device)
        config = self.runner.config
        if self.folder:
            self.runner.config = dataclasses.replace(
                config, state_folder=self.folder, disk_cache_bytes=2**22
            )
        self.engine = Engine(self.runner)
        self.runner.config = config
        self.all: dict[int, Asked] = {}
        self.texts: dict[str, Text] = {}
        self.next = 0
        self.calls = 0
        self.replies: dict[int, StateReply] = {}
        self.seen: Counter[str] = Counter()
        manager = self.engine._cache
        rebuild = manager.rebuild

        def counted(*arguments: Any) -> Any:
            self.seen["rebuilds"] += 1
            return rebuild(*arguments)

        manager.rebuild = counted  # type: ignore[method-assign]

    # What is asked.

    @rule(
        target=asked,
        stem=st.integers(0, 2),
        length=st.sampled_from([0, 1, 5, 40, 127, 128, 129, 200, 300]),
        own=st.lists(st.integers(0, VOCAB - 1), max_size=6),
        count=st.integers(0, 9),
        keep=st.sampled_from([None, None, "a", "b", "c"]),
        mark=st.integers(1, 300),
        temperature=st.sampled_from([0.0, 0.0, 0.8]),
        plain=st.booleans(),
        stream=st.booleans(),
    )
    def submit(
        self, stem: int, length: int, own: list[int], keep: str | None, mark: int, **how: Any
    ) -> Asked:
        prompt = [(stem * 7 + i * i) % VOCAB for i in range(length)] + own
        prompt = prompt or [stem]
        points = (mark,) if mark <= len(prompt) else ()
        if keep is not None:
            how["temperature"] = 0.0
        return self._add(Text(), prompt, keep, cache_points=points, **how)

    @rule(
        target=asked,
        name=names,
        length=st.sampled_from([0, 0, 5, 127, 128, 200]),
        own=st.lists(st.integers(0, VOCAB - 1), max_size=150),
        count=st.integers(0, 9),
        keep=st.sampled_from([None, "same", "d"]),
        marked=st.booleans(),
        plain=st.booleans(),
        stream=st.booleans(),
    )
    def go_on(
        self,
        name: str,
        length: int,
        own: list[int],
        count: int,
        keep: str | None,
        marked: bool,
        plain: bool,
        stream: bool,
    ) -> Any:
        if name not in self.texts:
            return multiple()
        keep = name if keep == "same" else keep
        own = [i * i % VOCAB for i in range(length)] + own
        points = tuple({max(length, 1), len(own)} - {0}) if marked and own else ()
        return self._add(
            self.texts[name],
            own,
            keep,
            count=count,
            plain=plain,
            stream=stream,
            temperature=0.0,
            state=name,
            cache_points=points,
        )

    def _add(
        self,
        before: Text,
        prompt: list[int],
        keep: str | None,
        *,
        count: int,
        plain: bool,
        stream: bool,
        temperature: float,
        **fields: Any,
    ) -> Asked:
        sampling = SamplingParams(
            max_tokens=count,
            temperature=temperature,
            seed=self.next,
            logprobs=None if plain else 0,
            stop_token_ids=(3,) if count == 9 else (),
        )
        self.next += 1
        request = Request(
            id=self.next,
            prompt=pack_ids(prompt),
            sampling=sampling,
            stream=stream,
            keep=None if keep is None else KeepState(id=keep, export=len(prompt) % 2 == 1),
            **fields,
        )
        one = self.all[request.id] = Asked(request, before, prompt)
        self.engine.add("c", request)
        return one

    @rule(target=names, times=st.integers(1, 12))
    def step(self, times: int) -> Any:
        for _ in range(times):
            self._step()
        return multiple(*self.texts)

    @rule(one=consumes(asked), kept=st.integers(0, 9), stop=st.booleans())
    def abort(self, one: Asked, kept: int, stop: bool) -> None:
        if one.end is not None:
            return
        if one.request.id not in self.engine._scheduler._table._clients.get("c", {}):
            stop = stop and not one.request.stream  # it is over, but for its state's file
        elif stop and one.request.stream:
            one.kept = min(kept, len(one.tokens))
            self.engine.abort("c", [one.request.id], "stop", [one.kept])
            self._step()
            return
        if not stop or not one.request.stream:
            self.engine.abort("c", [one.request.id], "abort")
        self._step()  # what it has kept is named already, and told with this

    @rule(target=names, name=names, new=st.sampled_from(["e", "f", "g"]))
    def fork(self, name: str, new: str) -> str:
        before = self.texts.get(name)
        reply = self._ask("fork", id=name, target=new)
        if reply.failed is None:
            self.texts[new] = self._meant(name, before, reply.states[0])
        else:
            assert reply.failed.code in ("state_busy", "state_not_found", "state_quota")
        return new

    @rule(target=names, name=consumes(names), new=st.sampled_from(["e", "j"]))
    def move(self, name: str, new: str) -> str:
        before = self.texts.get(name)
        reply = self._ask("move", id=name, target=new)
        if reply.failed is None:
            self.texts[new] = self._meant(name, before, reply.states[0])
            if new != name:
                del self.texts[name]
        else:
            assert reply.failed.code in ("state_busy", "state_not_found", "state_quota")
        return new

    @rule(target=names, name=names, new=st.sampled_from(["h", "i"]))
    def move_out_and_in(self, name: str, new: str) -> str:
        text = self.texts.get(name)
        out = self._ask("export", id=name)
        if out.failed is not None:
            assert text is None and out.failed.code == "state_not_found", out.failed
            return new
        text = self._meant(name, text, out.states[0])
        back = self._ask("import", content=out.content, target=new)
        if back.failed is None:
            self.texts[new] = text
            assert back.states[0].tokens == len(text.tokens)
        else:
            assert back.failed.code in ("state_busy", "state_quota")
        return new

    def _meant(self, name: str, before: Text | None, info: StateInfo) -> Text:
        """What the name stood for when the engine came to it, which reading a file may have put
        off: what it stands for now, or what it did when it was asked."""
        for text in (self.texts.get(name), before):
            if text is not None and (len(text.tokens), text.tokens[-4:]) == (
                info.tokens,
                tuple(info.recent),
            ):
                return text
        raise AssertionError(f"{name} is another state than it should be: {info}")

    @rule(name=consumes(names))
    def delete(self, name: str) -> None:
        reply = self._ask("delete", id=name)
        if reply.failed is None:
            del self.texts[name]
        else:
            assert reply.failed.code in ("state_busy", "state_not_found")

    @rule(times=st.integers(1, 4))
    def evict(self, times: int) -> None:
        for _ in range(times):
            self.engine._cache.tiers.evict("")

    # What comes of it.

    def _ask(self, action: Any, **fields: Any) -> StateReply:
        self.calls += 1
        self.engine.ask("c", StateCall(call=self.calls, action=action, **fields))
        for _ in range(1000):
            for _, reply in self.engine.replies():
                self.replies[reply.call] = reply
            if self.calls in self.replies:
                return self.replies.pop(self.calls)
            assert self.engine.has_work, "a call was forgotten"
            self._step()
        raise AssertionError("a call is never answered")

    def _step(self) -> None:
        decoding = self.engine._scheduler._decoding
        if decoding._step_seconds:  # else how long a step took would decide what a rule finds
            decoding._step_seconds = 1e-3
        for events in self.engine.step().values():
            self.seen["hits"] += events.stats.prefix_hits
            self.seen.update(events.stats.evictions)
            for id, token in zip(events.requests, events.tokens, strict=True):
                self._take(self.all[id], [token], [])
            for id, tokens, logprobs in events.in_runs():
                self._take(self.all[id], tokens, logprobs)
            for end in (*events.finished, *events.failed):
                self._end(self.all[end.request], end)
        for _, reply in self.engine.replies():
            self.replies[reply.call] = reply
        threads = self.engine._cache.transfer._threads
        # At times the disk lags behind, however quick. Without files nothing does, or how long a
        # worker thread took would decide what a rule finds.
        if not self.folder or self.next % 3:
            while threads._done.qsize() < threads.pending:  # which the next step takes note of
                time.sleep(1e-4)
        self._poison()

    def _take(self, one: Asked, tokens: list[int], logprobs: list[TokenLogprobs]) -> None:
        assert one.end is None
        one.tokens += tokens
        one.logprobs += logprobs

    def _end(self, one: Asked, end: Finished | Failed) -> None:
        assert one.end is None, "a second terminal event"
        one.end = end
        if isinstance(end, Failed):
            assert end.code in (
                "state_busy",
                "state_not_found",
                "state_quota",
                "invalid_request",
            ), end
            assert end.code != "invalid_request" or not one.prompt
            return
        if not one.request.stream:
            self._take_whole(one, end)
        self._check(one)
        keep = one.request.keep
        if keep is None or end.reason == "abort" or end.state is None:
            assert end.state is None
            return
        self.texts[keep.id] = text = self._text_after(one, end)
        assert end.state.tokens == len(text.tokens)
        assert tuple(end.state.recent) == text.tokens[-4:]
        assert bool(end.snapshot) == keep.export

    def _take_whole(self, one: Asked, end: Finished) -> None:
        one.tokens, one.logprobs = list(end.tokens), end.logprobs

    def _text_after(self, one: Asked, end: Finished) -> Text:
        cut = one.kept is not None and end.reason == "stop"
        answer = one.tokens[: one.kept] if cut else one.tokens
        read = Text((*one.before.tokens, *one.prompt), self._drawn_before(one))
        tokens = (*read.tokens, *answer)
        if read.drawn is None or (answer and end.reason != "length"):
            return Text(tokens, read.drawn if not answer else None)
        return Text(tokens, read.drawn + len(answer))

    def _drawn_before(self, one: Asked) -> int | None:
        """How many of the last tokens before the answer were drawn."""
        if not one.prompt:
            return one.before.drawn
        return 0 if one.before.drawn == 0 else None

    def _check(self, one: Asked) -> None:
        if not one.tokens:
            return
        text, drawn = [*one.before.tokens, *one.prompt], self._drawn_before(one)
        if self.deterministic and drawn is not None:
            params = one.request.sampling
            sampling = SamplingParams(
                max_tokens=drawn + len(one.tokens),
                temperature=params.temperature,
                seed=params.seed,
                logprobs=0,
            )
            prompt = pack_ids(text[: len(text) - drawn])
            solo = _solo(
                True, Request(id=0, prompt=prompt, sampling=sampling, stream=False), self.device
            )
            assert one.tokens == list(solo.tokens[drawn:]), one.request
            self.seen["exact"] += 1
            if one.logprobs:
                assert one.logprobs == solo.logprobs[drawn : drawn + len(one.logprobs)]
            return
        scored = Request(
            id=0,
            prompt=pack_ids([*text, *one.tokens]),
            sampling=SamplingParams(max_tokens=0),
            score=True,
            score_from=len(text),
            score_top=1,
            stream=False,
        )
        told = _solo(self.deterministic, scored, self.device).logprobs
        close = CLOSE_ON[self.device]
        for index, score in enumerate(told):
            if one.request.sampling.temperature == 0:
                assert score.logprob >= score.top_logprobs[0] - close, one.request
            if one.logprobs:
                assert abs(score.logprob - one.logprobs[index].logprob) < close, one.request

    def _poison(self) -> None:
        """NaN wherever nothing is."""
        if self.device == "cuda":
            torch.cuda.synchronize()  # a row of main memory may be on its way
        scheduler, tiers = self.engine._scheduler, self.engine._cache.tiers
        needed = {move.source for move in tiers.planned_moves() if isinstance(move, Copy)}
        state = self.runner._pool.state
        assert state.get("conv") is not None
        host = self.runner._copier._host
        with torch.inference_mode():  # as the runner's own tensors were made
            for row in (scheduler._slots._free | tiers._device._free) - needed:
                state["cell"][:, row] = state["conv"][:, row] = float("nan")
            for row in tiers._host._free:
                if ~row not in needed:
                    host._row(row).fill_(float("nan"))

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self._step()
        assert not self.engine.has_work
        assert all(one.end is not None for one in self.all.values()), "someone was forgotten"
        self._check_nothing_leaks()
        for name in list(self.texts):
            one = self._add(
                self.texts[name],
                [1],
                None,
                count=3,
                plain=False,
                stream=False,
                temperature=0.0,
                state=name,
            )
            while one.end is None:
                self._step()
            assert isinstance(one.end, Finished)
        # What ended last is released with the next plan, which the next engine makes.
        self.runner.run(StepPlan(release=list(range(self.next * 3 + 10))))

    def _check_nothing_leaks(self) -> None:
        manager = self.engine._cache
        assert self.engine._scheduler._slots.used == 0
        assert not manager.states.locks._reserved and not manager.states.waiters
        assert not manager.states._new_of and not manager.transfer.busy
        for _ in range(1000 if self.folder else 0):  # what is on its way to the disk
            manager.transfer.wait(0.001)
            manager.collect()
            if self.engine._cache.transfer._file_store.pending == 0:  # type: ignore[union-attr]
                break
        held = {named.point.state for named in manager.states._index.all()}
        for trie in manager.cache._trees.values():
            held |= {node.value for node in nodes_of(trie) if node.value is not None}
            assert all(node.reader < 0 for node in nodes_of(trie))
        manager.tiers.begin_plan()
        without = {kept for kept in held if not kept.has_row}
        assert all(kept.written for kept in without)
        assert manager.tiers.device_used + manager.tiers.host_used == len(held - without)


TestStates = StateMachine.TestCase
TestStates.settings = settings(
    max_examples=1 if STEPS > 1000 else 40,
    stateful_step_count=STEPS,
    deadline=None,
    derandomize=STEPS <= 1000,
)


def drive(
    chance: random.Random, steps: int, deterministic: bool, device: str = "cpu", folder: str = ""
) -> StateMachine:
    """The same machine for longer than hypothesis goes on: `steps` rules at random."""
    machine = StateMachine()
    machine.device, machine.folder = device, folder
    machine.start(deterministic)
    under_way: list[Asked] = []
    names = ["a", "b", "c", "d", "e", "f", "g", "h", "i"]
    tokens = range(VOCAB)
    for _ in range(steps):
        how = {
            "count": chance.choice([0, 1, 2, 5, 9, 40]),
            "plain": chance.random() < 0.5,
            "stream": chance.random() < 0.8,
        }
        name, new = chance.choice(names), chance.choice(names)
        match chance.choice("sssggggtttttaaafmMde"):
            case "s":
                length = chance.choice([0, 1, 5, 40, 128, 129, 200, 250, 300])
                one = machine.submit(
                    stem=chance.choice([0, 0, 1]),
                    length=length,
                    own=chance.choices(tokens, k=chance.choice([0, 0, 0, 1, 4])),
                    keep=chance.choice([*[None] * 12, *names]),
                    mark=chance.randint(1, 300),
                    temperature=chance.choice([0.0, 0.8]),
                    **how,
                )
                under_way.append(one)
            case "g" if name in machine.texts:
                own = chance.choices(tokens, k=chance.choice([0, 0, 1, 3, 130]))
                keep = chance.choice([None, name, new])
                if len(machine.texts[name].tokens) < 1500:
                    text, points = machine.texts[name], ()
                    if chance.random() < 0.5:  # what others may have read after it already
                        own = [i * i % VOCAB for i in range(chance.choice([1, 40, 130]))] + own
                        points = (len(own),)
                    one = machine._add(
                        text, own, keep, temperature=0.0, state=name, cache_points=points, **how
                    )
                    under_way.append(one)
            case "a" if under_way:
                one = under_way.pop(chance.randrange(len(under_way)))
                machine.abort(one, chance.randrange(20), chance.random() < 0.8)
            case "f":
                machine.fork(name, new)
            case "m":
                machine.move_out_and_in(name, new)
            case "M":
                machine.move(name, new)
            case "d":
                machine.delete(name)
            case "e":
                machine.evict(chance.randint(1, 3))
            case _:
                for _ in range(chance.randint(1, 6)):
                    machine._step()
        under_way = [one for one in under_way if one.end is None]
    machine.teardown()
    return machine


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_long_lives(seed: int, deterministic: bool) -> None:
    machine = drive(random.Random(seed), STEPS if STEPS != 60 else 400, deterministic)
    # It came to all that it is meant to come to.
    assert machine.seen["hits"] and machine.seen["rebuilds"]
    assert machine.seen["exact"] or not deterministic
    assert machine.seen["device"] and machine.seen["host"], "states left both tiers"


@pytest.mark.parametrize("seed", range(2))
def test_long_lives_whose_rounds_overlap(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a GPU do; on a CPU a round is over when it has been started."""
    monkeypatch.setattr(ModelRunner, "overlaps", True)
    machine = drive(random.Random(seed), STEPS if STEPS != 60 else 400, True)
    assert machine.seen["hits"] and machine.seen["rebuilds"] and machine.seen["exact"]


@pytest.mark.parametrize("deterministic", [True, False])
def test_long_lives_with_files(
    deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named and cached states leave main memory for a folder, and come back."""
    monkeypatch.setattr(disk_cache, "LEAST_TOKENS", 1)
    monkeypatch.setattr(disk_cache, "WRITES_PER_SECOND", 1e9)
    reads: Counter[bool] = Counter()
    load_from = StateTransfer.load_from

    def counted(self: StateTransfer, file_store: Any, kept: Any, *rest: Any) -> None:
        reads[kept.node is not None] += 1
        load_from(self, file_store, kept, *rest)

    monkeypatch.setattr(StateTransfer, "load_from", counted)
    steps = STEPS if STEPS != 60 else 900
    machine = drive(random.Random(7), steps, deterministic, folder=str(tmp_path))
    machine.engine.close()
    assert machine.seen["hits"] and machine.seen["rebuilds"]
    assert reads[True] and reads[False], "named and cached ones were read from files"


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(2))
def test_long_lives_on_a_gpu(seed: int) -> None:
    """Of a bfloat16 model, in the same bits; rounds are started before others end."""
    machine = drive(random.Random(seed), STEPS if STEPS != 60 else 400, True, "cuda")
    assert machine.seen["hits"] and machine.seen["rebuilds"] and machine.seen["exact"]
    assert machine.seen["device"] and machine.seen["host"], "states left both tiers"


def test_scores_and_penalties_after_a_state() -> None:
    """The first token of a prompt can be scored too; penalties count the request's own tokens."""
    engine = Engine(_runner(True, False, "cpu"))
    ends: dict[int, Finished] = {}
    scores: dict[int, list[TokenLogprobs]] = {}

    def run(id: int, prompt: list[int], count: int = 0, **fields: Any) -> None:
        penalty = fields.pop("penalty", 1.0)
        sampling = SamplingParams(max_tokens=count, temperature=0, repetition_penalty=penalty)
        engine.add(
            "c", Request(id=id, prompt=pack_ids(prompt), sampling=sampling, stream=False, **fields)
        )
        while engine.has_work:
            for events in engine.step().values():
                assert not events.failed
                ends.update({end.request: end for end in events.finished})
                for part in events.scores:
                    told = scores.setdefault(part.request, [])
                    assert part.start == (0 if "state" in fields else 1) + len(told)
                    told.extend(part.reports.unpack())

    text = [(3 * i * i) % VOCAB for i in range(260)]
    run(1, text, score=True)
    run(2, text[:200], keep=KeepState(id="s"))
    run(3, text[200:], score=True, score_from=0, state="s")
    assert scores[3] == scores[1][199:]
    run(4, [], 5, state="s", penalty=1.3)
    run(5, [text[200]], 5, state="s", penalty=1.3, keep=KeepState(id="s"))
    assert len(ends[4].tokens) == len(ends[5].tokens) == 5
    engine._runner.run(StepPlan(release=list(range(9))))  # type: ignore[attr-defined]
