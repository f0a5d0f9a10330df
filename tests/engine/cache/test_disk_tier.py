"""Cached states on disk: they leave main memory and come back, and outlast the engine."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.cache.storage import file_store, prefix_file
from engine.cache.storage.file_store import SUFFIX
from engine.cache.storage.prefix_file import Head
from engine.cache.storage.snapshot import StateLayout
from engine.cache.storage.state_folder import PREFIX_FOLDER
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, StateMalformed
from engine.protocol.events import Finished
from engine.protocol.requests import KeepState, Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids
from engine.runner.model_runner import ModelRunner
from engine.safetensors_container import Tensor, serialize
from engine.state_spec import StateSpec
from tests.engine.cache.test_named_states import Talk, text
from tests.engine.cache.test_radix_tree import nodes_of
from tests.engine.fake import FakeRunner


def prompt(number: int, length: int = 300) -> bytes:
    return bytes([97 + number % 26, 97 + number // 26]) + b"x" * (length - 2)


def cached(talk: Talk, text: bytes, count: int = 1, **fields: Any) -> int:
    end = talk.run(text, count, **fields)
    assert isinstance(end, Finished), end
    return end.cached_tokens


def start(folder: Path, former: Talk | None = None, **options: Any) -> Talk:
    given = {"share_slots": 2, "host_rows": 4, "disk_cache_bytes": 2**30, **options}
    talk = Talk(state_folder=str(folder), **given)
    talk.engine._cache.disk._clock = iter(range(10**9)).__next__  # every state may be written
    if former is not None:
        talk.runner.outside = former.runner.outside
    return talk


def settle(talk: Talk) -> None:
    """What is under way to the disk is there."""
    talk.finish()
    transfer = talk.engine._cache.transfer
    transfer.close()
    transfer.collect()


def files(folder: Path) -> list[Path]:
    return sorted((folder / PREFIX_FOLDER).iterdir())


def test_more_lies_on_disk_than_in_memory(tmp_path: Path) -> None:
    talk = start(tmp_path)
    for number in range(30):
        assert cached(talk, prompt(number)) == 0
        settle(talk)
    tiers = talk.engine._cache.tiers
    assert tiers.device_used + tiers.host_used <= 6
    assert len(files(tmp_path)) > 20
    before = talk.runner.steps
    assert [cached(talk, prompt(number)) for number in (0, 7, 0)] == [300] * 3, (
        "with their hidden states"
    )
    assert text(talk.run(prompt(3) + b"abc", 3)) == b"def"
    assert talk.runner.steps > before
    assert talk.engine._scheduler.events() == {}


def test_a_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    talk = start(tmp_path)
    assert text(talk.run(prompt(0) + b"abc", 4, owner="alice")) == b"defg"
    talk.engine.close()
    later = start(tmp_path, talk)
    assert cached(later, prompt(0) + b"abc" + b"defg" + b"hi", owner="bob") == 0
    assert cached(later, prompt(0) + b"abc" + b"defg" + b"hi", owner="alice") == 306
    assert cached(later, prompt(0) + b"abc", owner="alice") == 303, "hidden states outlast it too"
    later.engine.close()
    third = start(tmp_path, later, host_rows=0)
    assert cached(third, prompt(0) + b"abc", owner="alice") == 303


def test_salts_are_kept_apart(tmp_path: Path) -> None:
    talk = start(tmp_path)
    cached(talk, prompt(0), cache_salt="one")
    talk.engine.close()
    later = start(tmp_path, talk)
    assert cached(later, prompt(0)) == 0
    assert cached(later, prompt(0), cache_salt="two") == 0
    assert cached(later, prompt(0), cache_salt="one") == 300


def test_short_texts_and_what_follows_named_states_are_not_written(tmp_path: Path) -> None:
    talk = start(tmp_path)
    cached(talk, prompt(0, 200))
    talk.run(b"abc", 0, keep=KeepState(id="s"))
    cached(talk, prompt(1), state="s", cache_points=(300,))
    talk.engine.close()
    assert files(tmp_path) == []


@pytest.mark.parametrize("change", ["fingerprint", "dtype", "deterministic", "device_name"])
def test_other_bits_are_left_alone(tmp_path: Path, change: str) -> None:
    talk = start(tmp_path)
    cached(talk, prompt(0))
    talk.engine.close()
    (file,) = files(tmp_path)
    later = start(tmp_path / "unused", talk)
    config = later.runner.config
    later.runner.info = msgspec.structs.replace(
        later.runner.info, **{change: True if change == "deterministic" else "other"}
    )
    later.runner.config = type(config)(
        **{
            name: getattr(config, name)
            for name in ("model", "device", "max_step_tokens", "max_slots")
        },
        share_slots=2,
        host_state_bytes=2**16,
        state_folder=str(tmp_path),
        disk_cache_bytes=2**30,
    )
    later.engine = Engine(later.runner)
    assert cached(later, prompt(0)) == 0
    later.engine.close()
    assert file in files(tmp_path) and len(files(tmp_path)) == 2


def damage_state(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def damage_text(content: bytes) -> bytes:
    at = content.index(b"}") + 400
    at = content.rindex(b"}", 0, 1000) + 9
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    "damage", [damage_state, damage_text, lambda c: c[:-4], lambda c: b"", None]
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_damaged_files_are_read_again_as_prompts(tmp_path: Path, damage: Any, when: str) -> None:
    talk = start(tmp_path)
    assert text(talk.run(prompt(0) + b"abc", 1)) == b"d"
    talk.engine.close()
    later = start(tmp_path, talk) if when == "after" else None
    for file in files(tmp_path):
        if damage is None:
            file.unlink()
        else:
            file.write_bytes(damage(file.read_bytes()))
    later = later or start(tmp_path, talk)
    end = later.run(prompt(0) + b"abc", 1)
    assert text(end) == b"d" and isinstance(end, Finished) and end.cached_tokens == 0
    later.engine.close()
    third = start(tmp_path, later)
    assert cached(third, prompt(0) + b"abc") == 303, "it was written anew"


@pytest.mark.parametrize("damage", [damage_state, lambda c: c[:-4], lambda c: c + bytes(5000)])
def test_what_is_found_damaged_is_deleted(tmp_path: Path, damage: Any) -> None:
    talk = start(tmp_path)
    cached(talk, prompt(0))
    talk.engine.close()
    later = start(tmp_path, talk, share_slots=20)  # nothing leaves the device, to be written
    (file,) = files(tmp_path)
    file.write_bytes(damage(file.read_bytes()))
    assert cached(later, prompt(0)) == 0
    settle(later)
    assert files(tmp_path) == [] and later.engine._cache.disk.bytes == 0
    assert cached(later, prompt(0)) == 300


def test_what_cannot_be_read_just_now_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = start(tmp_path)
    cached(talk, prompt(0))
    talk.engine.close()
    later = start(tmp_path, talk, share_slots=20)

    def busy(path: Path, most: int) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(file_store, "_read", busy)
        assert text(later.run(prompt(0) + b"abc", 1)) == b"d"
        settle(later)
    assert len(files(tmp_path)) == 1 and later.engine._cache.disk.bytes > 0
    assert cached(later, prompt(0)) == 300


def test_bytes_are_bounded_and_owners_have_parts_of_them(tmp_path: Path) -> None:
    talk = start(tmp_path, disk_cache_bytes=20_000)
    cached(talk, prompt(0), owner="alice")
    for number in range(20):
        cached(talk, prompt(number), owner="bob")
        settle(talk)
        disk = talk.engine._cache.disk
        assert disk.bytes <= 20_000
        found = sum(file.stat().st_size for file in files(tmp_path))
        assert found <= 20_000 + 500 * len(files(tmp_path))
    assert talk.engine._cache.load_stats(0, 0)["disk_state_bytes"] == disk.bytes > 5000
    assert cached(talk, prompt(0), owner="alice") == 300
    assert cached(talk, prompt(0), owner="bob") == 0
    settle(talk)
    talk.engine.close()
    smaller = start(tmp_path, talk, disk_cache_bytes=5_000)
    assert smaller.engine._cache.disk.bytes <= 5_000
    settle(smaller)
    assert len(files(tmp_path)) == 1


def test_what_tries_take_bounds_what_is_taken_over(tmp_path: Path) -> None:
    talk = start(tmp_path)
    for number in range(8):
        cached(talk, prompt(number))
        settle(talk)
    talk.engine.close()
    count = len(files(tmp_path))
    later = start(tmp_path, talk)
    cache = later.engine._cache.cache
    assert cache._bytes.total > 8 * 1200
    cache._tree_bytes = 4000
    cached(later, prompt(9))
    settle(later)
    assert cache._bytes.total <= 4000
    assert len(files(tmp_path)) < count


def test_writes_are_few_under_a_load_of_new_prompts(tmp_path: Path) -> None:
    talk = start(tmp_path)
    talk.engine._cache.disk._clock = lambda: 5.0
    for number in range(20):
        cached(talk, prompt(number))
        settle(talk)
    assert len(files(tmp_path)) == 1


def test_what_cannot_be_written_is_counted_and_served_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes, sync: bool = False) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    talk = start(tmp_path)
    cache, told = talk.engine._cache, 0
    take_counts = cache.take_counts

    def counted() -> dict[str, Any]:
        nonlocal told
        counts = take_counts()
        told += counts["store_errors"]
        return counts

    monkeypatch.setattr(cache, "take_counts", counted)
    monkeypatch.setattr(file_store, "_write_new", full)
    for number in range(3):
        cached(talk, prompt(number))
        settle(talk)
    assert cached(talk, prompt(2)) == 300
    assert told > 0 and files(tmp_path) == [] and cache.disk.bytes == 0
    monkeypatch.undo()
    cached(talk, prompt(4))
    settle(talk)
    assert len(files(tmp_path)) > 0


def test_a_failed_round_costs_no_file(tmp_path: Path) -> None:
    talk = start(tmp_path, share_slots=1)
    for number in range(12):
        cached(talk, prompt(number))
        settle(talk)
    for number in range(12):
        talk.submit(prompt(number) + b"k", 1)
    talk.runner.failures.append(RuntimeError("boom"))
    talk.finish()
    settle(talk)
    for number in range(12):
        assert text(talk.run(prompt(number) + b"abc", 1)) == b"d"
    tiers = talk.engine._cache.tiers
    talk.finish()
    nodes = [
        node.value
        for trie in talk.engine._cache.cache._trees.values()
        for node in nodes_of(trie)
        if node.value is not None
    ]
    assert all(kept.has_row or kept.written for kept in nodes)
    assert tiers.device_used + tiers.host_used == sum(kept.has_row for kept in nodes)


def test_without_a_folder_there_is_no_such_cache() -> None:
    with pytest.raises(ConfigError, match="disk_cache_bytes"):
        FakeRunner(disk_cache_bytes=2**20)


def test_it_is_off_unless_asked_for(tmp_path: Path) -> None:
    talk = Talk(state_folder=str(tmp_path))
    cached(talk, prompt(0))
    talk.engine.close()
    assert not (tmp_path / PREFIX_FOLDER).exists() and not list(tmp_path.glob(f"*{SUFFIX}"))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_models_states_come_back_as_they_were(tmp_path: Path, deterministic: bool) -> None:
    """From the disk, with the same bits as from a row."""

    def ask(engine: Engine, ids: list[int]) -> Finished:
        sampling = SamplingParams(max_tokens=4, temperature=0, logprobs=3, ignore_eos=True)
        engine.add("c", Request(id=1, prompt=pack_ids(ids), sampling=sampling, stream=False))
        ends: list[Any] = []
        while engine.has_work:
            for events in engine.step().values():
                ends += [*events.finished, *events.failed]
        (end,) = ends
        assert isinstance(end, Finished)
        return end

    def start() -> Engine:
        config = EngineConfig(
            model="shakespeare-mingru",
            device="cpu",
            threads=1,
            max_slots=2,
            share_slots=8,
            state_folder=str(tmp_path),
            disk_cache_bytes=2**30,
            deterministic=deterministic,
        )
        return Engine(ModelRunner(config))

    ids = [number % 60 for number in range(384)]
    first = start()
    fresh = ask(first, ids)
    row = ask(first, ids)
    longer = ask(first, [*ids, 5, 6])
    assert (fresh.cached_tokens, row.cached_tokens) == (0, 384)
    first.close()
    second = start()
    back = ask(second, ids)
    assert back.cached_tokens == 384
    assert (back.tokens, back.logprobs) == (row.tokens, row.logprobs)
    third = start()
    again = ask(third, [*ids, 5, 6])
    assert again.cached_tokens >= 384
    assert again.tokens == longer.tokens
    if deterministic:
        assert again.logprobs == longer.logprobs and fresh.logprobs == row.logprobs
    for engine in (second, third):
        engine.close()


@pytest.mark.parametrize("with_hidden", [False, True])
def test_a_file_says_what_was_written(with_hidden: bool) -> None:
    shape = StateLayout("f", 50, (StateSpec("cell", 2, (6,)), StateSpec("conv", 2, (3, 4))), 4)
    state = bytes(shape.bytes + 16 * with_hidden)
    head = Head("alice", "salt", bytes(4 * 300), with_hidden, 0)
    content = prefix_file.write(head, state, "v")
    told = prefix_file.parse_head(content[: len(content) - len(state)], "v", shape)
    assert told == Head("alice", "salt", head.text, with_hidden, len(content))
    assert prefix_file.parse(content, "v", shape) == state
    for wrong in (content[:-1], content + b"0", content[:100], b"", damage_state(content)):
        with pytest.raises(StateMalformed):
            prefix_file.parse(wrong, "v", shape)
    with pytest.raises(StateMalformed):
        prefix_file.parse(content, "w", shape)
    with pytest.raises(StateMalformed, match="token id"):
        prefix_file.parse(
            prefix_file.write(Head("", "", b"\xff" * 4, False, 0), state, "v"), "v", shape
        )


def test_no_bit_of_a_file_flips_unseen() -> None:
    """What is told of types and shapes is not looked at, so it may be anything."""
    shape = StateLayout("f", 300, (StateSpec("cell", 1, (4,)),))
    state = np.arange(4, dtype=np.float32).tobytes()
    content = prefix_file.write(Head("alice", "salt", pack_ids([7, 8, 9]), False, 0), state, "v")
    told = prefix_file.parse_head(content, "v", shape)
    seen = 0
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            assert prefix_file.parse(bytes(damaged), "v", shape) == state
            assert prefix_file.parse_head(bytes(damaged), "v", shape) == told
        except StateMalformed:
            seen += 1
    assert seen > 8 * len(content) // 2


@pytest.mark.parametrize("with_logits", [False, True])
def test_files_of_format_1_are_states_without_a_hidden_state(with_logits: bool) -> None:
    shape = StateLayout("f", 50, (StateSpec("cell", 2, (6,)),), 4)
    state, ids = bytes(range(48)), pack_ids([7, 8, 9])
    stored = state + bytes(200 * with_logits)

    def sum_of(*parts: bytes) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for part in parts:
            digest.update(part)
        return digest.hexdigest()

    metadata = {
        "format": "minserve.prefix.1",
        "variant": "v",
        "owner": "alice",
        "salt": "salt",
        "with_logits": str(int(with_logits)),
        "text_sum": sum_of(ids, json.dumps(["v", "alice", "salt", with_logits]).encode()),
        "state_sum": sum_of(stored),
    }
    text = Tensor("text", "I32", [3], ids)
    content = serialize(metadata, [text, Tensor("state", "U8", [len(stored)], stored)])
    head = prefix_file.parse_head(content[: len(content) - len(stored)], "v", shape)
    assert head == Head("alice", "salt", ids, False, len(content))
    assert prefix_file.parse(content, "v", shape) == state
    assert len(stored) <= prefix_file.most_state_bytes(shape)
    for wrong in (content[:-1], content + b"0", damage_state(content)):
        with pytest.raises(StateMalformed):
            prefix_file.parse(wrong, "v", shape)
