"""Snapshots: what is written is read again, and nothing else is taken for one."""

from __future__ import annotations

import json
import os
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from engine.cache.storage.snapshot import MOST_TAIL, Snapshot, StateLayout, read, write
from engine.errors import EngineError, StateMalformed, StateMismatch
from engine.protocol.token_ids import pack_ids
from engine.state_spec import StateSpec

SHAPES = [
    StateLayout("one", 50, (StateSpec("cell", 2, (6,)),)),
    StateLayout("two", 50, (StateSpec("cell", 2, (6,)), StateSpec("conv", 2, (3, 4)))),
]
# The long run: MINSERVE_SNAPSHOT_MUTATIONS=10000
MUTATIONS = int(os.environ.get("MINSERVE_SNAPSHOT_MUTATIONS", "1500"))


def sample(shape: StateLayout, tail: tuple[int, ...] = (7,), **fields: Any) -> Snapshot:
    state = np.random.default_rng(3).standard_normal(shape.bytes // 4).astype("<f4").tobytes()
    given = {"tokens": 2**40, "drawn": len(tail) == 1, "recent": (1, 2, 3, 7), **fields}
    return Snapshot(state, pack_ids(tail), **given)


def changed(content: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The file with another header."""
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tail", [(7,), tuple(range(MOST_TAIL // 4))])
def test_what_is_written_is_read_again(shape: StateLayout, tail: tuple[int, ...]) -> None:
    given = sample(shape, tail, extra={"owner": "alice"})
    content = write(given, shape)
    assert read(content, shape) == given
    assert len(content) <= shape.most_bytes
    tensors = load(content)  # anybody's reader of safetensors finds the same
    assert tensors.pop("tail").tolist() == list(tail)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        spec.name: spec.full_shape for spec in shape.specs
    }
    assert b"".join(tensors[spec.name].tobytes() for spec in shape.specs) == given.state


def golden(name: str) -> bytes:
    return (Path(__file__).parents[2] / "snapshots" / name).read_bytes()


def test_files_of_all_formats_stay_readable() -> None:
    """As a server of each has left them, with a name and without."""
    shape = StateLayout("golden", 50, (StateSpec("cell", 1, (2,)), StateSpec("conv", 1, (1, 2))))
    state = np.array([1.0, -2.0, 0.5, 3.0], "<f4").tobytes()
    expected = Snapshot(state, pack_ids([4, 5]), 9, False, (2, 3, 4, 5), {"id": "romeo"})
    for name in ("version-1.safetensors", "version-2.safetensors", "version-3.safetensors"):
        assert read(golden(name), shape) == expected
    assert write(expected, shape) == golden("version-3.safetensors")


@pytest.mark.parametrize("shape", SHAPES)
def test_no_bit_of_a_file_flips_unseen(shape: StateLayout) -> None:
    content = write(sample(shape, (7, 9), extra={"owner": "alice", "id": "s"}), shape)
    read(content, shape)
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises((StateMalformed, StateMismatch)):
            read(bytes(damaged), shape)


def test_what_is_said_in_another_order_or_with_other_spaces_is_the_same() -> None:
    shape = SHAPES[1]
    given = sample(shape, extra={"owner": "alice"})

    def turned(header: dict[str, Any]) -> None:
        entries = list(header.items())
        header.clear()
        header.update(reversed(entries))
        header["__metadata__"] = dict(reversed(header["__metadata__"].items()))

    assert read(changed(write(given, shape), turned), shape) == given


def test_a_digest_is_of_its_format() -> None:
    content = write(sample(SHAPES[0]), SHAPES[0])

    def without(header: dict[str, Any]) -> None:
        del header["__metadata__"]["digest"]

    def former(header: dict[str, Any]) -> None:
        header["__metadata__"]["format"] = "minserve.state.1"

    def former_without_a_sum(header: dict[str, Any]) -> None:
        former(header)
        header["__metadata__"]["digest"] = ""

    for change, words in (
        (without, "has none"),
        (former, "has one"),
        (former_without_a_sum, "has one"),
    ):
        with pytest.raises(StateMalformed, match=words):
            read(changed(content, change), SHAPES[0])
    assert read(changed(changed(content, without), former), SHAPES[0]) == sample(SHAPES[0])


def test_what_is_moved_from_one_part_to_the_next_is_damage() -> None:
    """Each part is framed: the same bytes in all are not the same file."""
    shape = SHAPES[0]
    content = write(sample(shape, extra={"a": "bc"}), shape)
    for change in (
        lambda header: header["__metadata__"].update({"a": "b", "c": ""}),
        lambda header: header["__metadata__"].update({"ab": header["__metadata__"].pop("a")}),
        lambda header: header["__metadata__"].update(tokens=str(2**40 + 1)),
        lambda header: header["__metadata__"].update(recent="1,2,3"),
        lambda header: header["__metadata__"].update(digest="0" * 32),
    ):
        with pytest.raises(StateMalformed, match="digest"):
            read(changed(content, change), shape)


def test_another_models_is_refused_with_both_names() -> None:
    content = write(sample(SHAPES[0]), SHAPES[0])
    with pytest.raises(StateMismatch, match=r"'one'.*'other'"):
        read(content, StateLayout("other", 50, (StateSpec("cell", 2, (6,)),)))


def nan(content: bytes) -> bytes:
    (length,) = struct.unpack_from("<Q", content)
    at = 8 + length + 4
    return content[:at] + struct.pack("<f", float("nan")) + content[at + 4 :]


WRONG: list[tuple[Callable[[bytes], bytes], str]] = [
    (lambda c: b"", "0 bytes"),
    (lambda c: c[:7], "7 bytes"),
    (lambda c: c[:-1], "header says"),
    (lambda c: c + b"\0", "header says"),
    (lambda c: c + bytes(2**20), "at most"),
    (lambda c: struct.pack("<Q", 2**63) + c[8:], "header.s length is given as"),
    (lambda c: struct.pack("<Q", 2) + b"[]", "not a JSON object"),
    (lambda c: struct.pack("<Q", 4) + b"\xff\xfe\xff\xfe", "not valid JSON"),
    (lambda c: struct.pack("<Q", 60000) + b"[" * 60000, "not valid JSON"),
    (lambda c: changed(c, lambda h: h.clear()), "format is None"),
    (lambda c: changed(c, lambda h: h.pop("cell")), "'cell' is missing"),
    (lambda c: changed(c, lambda h: h.update(more=h["cell"])), "'more' is missing or unknown"),
    (lambda c: changed(c, lambda h: h["cell"].update(dtype="F16")), "cell is"),
    (lambda c: changed(c, lambda h: h["cell"].update(shape=[6, 2])), "cell is"),
    (lambda c: changed(c, lambda h: h["cell"].update(shape=[2.0, 6])), "cell is"),
    (lambda c: changed(c, lambda h: h["cell"].update(shape=[2**60, 6])), "cell is"),
    (lambda c: changed(c, lambda h: h["cell"].update(data_offsets=[4, 52])), "cell is"),
    (lambda c: changed(c, lambda h: h.update(cell=None)), "cell is None"),
    (lambda c: changed(c, lambda h: h.update(tail=[])), "tail is"),
    (lambda c: changed(c, lambda h: h["tail"].update(shape=[0])), "from 1 to"),
    (lambda c: changed(c, lambda h: h["tail"].update(shape=[2**40])), "from 1 to"),
    (lambda c: changed(c, lambda h: h["__metadata__"].update(tokens="-1")), "tokens is"),
    (lambda c: changed(c, lambda h: h["__metadata__"].update(tokens="9" * 30)), "tokens is"),
    (lambda c: changed(c, lambda h: h["__metadata__"].update(tokens="0")), "tail alone"),
    (lambda c: changed(c, lambda h: h["__metadata__"].update(tokens=5)), "object of strings"),
    (lambda c: changed(c, lambda h: h["__metadata__"].update(recent="1,x")), "recent is"),
    (lambda c: changed(c, lambda h: h["__metadata__"].update(recent="1,1,1,1,1")), "recent has 5"),
    (lambda c: changed(c, lambda h: h["__metadata__"].update(recent="50")), "0 to 49"),
    (lambda c: changed(c, lambda h: h["__metadata__"].update(drawn="2")), "drawn is"),
    (lambda c: c[:-4] + pack_ids([50]), "tail has token id 50"),
    (lambda c: c[:-4] + pack_ids([-1]), "tail has token id -1"),
    (nan, "not finite"),
]


@pytest.mark.parametrize(("damage", "words"), WRONG, ids=[words for _, words in WRONG])
def test_what_is_wrong_is_said(damage: Callable[[bytes], bytes], words: str) -> None:
    content = damage(write(sample(SHAPES[0]), SHAPES[0]))
    with pytest.raises(StateMalformed, match=words):
        read(content, SHAPES[0])


def test_damaged_files_cost_an_error_and_no_memory() -> None:
    chance = random.Random(11)
    shape = SHAPES[1]
    content = write(sample(shape), shape)
    taken = 0
    tracemalloc.start()
    try:
        for _ in range(MUTATIONS):
            damaged = mutated(content, chance)
            try:
                found = read(damaged, shape)
            except EngineError as error:
                assert isinstance(error, StateMalformed | StateMismatch), error
                assert 0 < len(error.message) < 2000
            else:
                taken += 1
                assert len(found.state) == shape.bytes and found.tokens >= 1
                assert np.isfinite(np.frombuffer(found.state, "<f4")).all()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * 2**20
    assert taken < MUTATIONS, "some were refused"


def mutated(content: bytes, chance: random.Random) -> bytes:
    """The file with bytes changed, cut out or put in, or other numbers in its header."""
    raw = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 8])):
        at = chance.randrange(len(raw) or 1)
        match chance.randrange(6):
            case 0 if raw:
                raw[at] = chance.randrange(256)
            case 1:
                del raw[at : at + chance.choice([1, 4, 100])]
            case 2:
                raw[at:at] = chance.randbytes(chance.choice([1, 4, 5000]))
            case 3:
                digits = [i for i in range(min(len(raw), 400)) if 48 <= raw[i] <= 57]
                if digits:
                    raw[chance.choice(digits)] = chance.choice(b"0123456789-.eE")
            case 4:
                raw[:8] = struct.pack("<Q", chance.choice([0, 1, 300, 2**16, 2**31, 2**64 - 1]))
            case 5:
                raw = raw[: chance.randrange(len(raw) + 1)]
    return bytes(raw)
