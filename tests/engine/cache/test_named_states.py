"""Kept states, with a runner that holds the very tokens: names, owners, quotas, files, calls."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.cache.storage import snapshot
from engine.cache.storage.file_store import StateFileStore
from engine.cache.storage.snapshot import StateLayout
from engine.client.client import EngineClient
from engine.engine import Engine
from engine.errors import StateNotFound, StepFailed
from engine.inline import InlineTransport
from engine.protocol.events import Finished
from engine.protocol.failed import Failed
from engine.protocol.requests import KeepState, Request
from engine.protocol.sampling_params import MOST_STOP_IDS, SamplingParams
from engine.protocol.state_calls import StateAction, StateCall, StateReply
from engine.protocol.token_ids import pack_ids
from engine.sequence import Sequence
from tests.engine.fake import FakeRunner


class Talk:
    """An engine, and a way to ask it one thing after the other."""

    def __init__(self, **options: Any) -> None:
        self.runner = FakeRunner(**{"host_rows": 40, **options})
        self.engine = Engine(self.runner)
        self.next = 0
        self.ends: dict[int, Finished | Failed] = {}

    def submit(self, prompt: bytes, count: int = 3, **fields: Any) -> int:
        self.next += 1
        sampling = fields.pop("sampling", None) or SamplingParams(
            max_tokens=count, temperature=0, ignore_eos=True
        )
        request = Request(
            id=self.next, prompt=pack_ids(prompt), sampling=sampling, stream=False, **fields
        )
        self.engine.add("c", request)
        return self.next

    def step(self) -> None:
        for events in self.engine.step().values():
            for end in (*events.finished, *events.failed):
                self.ends[end.request] = end

    def finish(self) -> None:
        for _ in range(2000):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("it does not come to an end")

    def run(self, prompt: bytes, count: int = 3, **fields: Any) -> Finished | Failed:
        id = self.submit(prompt, count, **fields)
        self.finish()
        return self.ends[id]

    def ask(self, action: StateAction, **fields: Any) -> StateReply:
        self.engine.ask("c", StateCall(call=9, action=action, **fields))
        replies = self.engine.replies()
        for _ in range(2000):
            if replies:
                break
            assert self.engine.has_work
            self.step()
            replies = self.engine.replies()
        ((client, reply),) = replies
        assert (client, reply.call) == ("c", 9)
        return reply

    def code(self, action: StateAction, **fields: Any) -> str:
        failed = self.ask(action, **fields).failed
        return "ok" if failed is None else failed.code


def text(end: Finished | Failed) -> bytes:
    assert isinstance(end, Finished), end
    return bytes(end.tokens)


def code(end: Finished | Failed) -> str:
    assert isinstance(end, Failed), end
    return end.code


@pytest.mark.parametrize("options", [{}, {"share_slots": 0}, {"most_steps": 4, "overlaps": True}])
def test_a_conversation_goes_on_where_it_stopped(options: dict[str, Any]) -> None:
    talk = Talk(**options)
    first = talk.run(b"abc", 4, keep=KeepState(id="s"))
    assert text(first) == b"defg"
    assert isinstance(first, Finished) and first.state is not None
    state = first.state
    assert (state.id, state.tokens, bytes(state.recent), state.bytes) == ("s", 7, b"defg", 1024)
    assert text(talk.run(b"", 2, state="s")) == b"hi", "nothing is read twice"
    assert text(talk.run(b"k", 2, state="s", keep=KeepState(id="s"))) == b"lm"
    assert talk.ask("get", id="s").states[0].tokens == 7 + 1 + 2
    assert text(talk.run(b"", 1, state="s")) == b"n"


def test_the_prompt_alone_may_be_kept() -> None:
    talk = Talk(max_step_tokens=100)
    long = bytes(range(97, 123)) * 12
    end = talk.run(long, 0, keep=KeepState(id="doc"))
    assert isinstance(end, Finished) and end.state is not None and end.reason == "length"
    assert end.state.tokens == len(long)
    more = talk.run(b"cde", 0, state="doc", keep=KeepState(id="doc"))
    assert isinstance(more, Finished) and more.prompt_tokens == 3
    assert text(talk.run(b"", 3, state="doc")) == b"fgh"


@pytest.mark.parametrize("options", [{}, {"most_steps": 4}, {"most_steps": 4, "overlaps": True}])
def test_a_cut_answer_is_rebuilt(options: dict[str, Any]) -> None:
    talk = Talk(**options)
    id = talk.submit(b"abc", 50, keep=KeepState(id="s"))
    for _ in range(6):
        talk.step()
    talk.engine.abort("c", [id], "stop", [2])
    talk.finish()
    end = talk.ends[id]
    assert isinstance(end, Finished) and end.reason == "stop" and end.state is not None
    assert end.completion_tokens > 2 and (end.state.tokens, bytes(end.state.recent)) == (5, b"bcde")
    assert text(talk.run(b"", 2, state="s")) == b"fg"


def test_a_rebuild_is_not_lost_with_a_plan_that_has_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One for the sake of a prompt after which the host draws, whose state is lost by then."""
    talk = Talk(most_steps=4, overlaps=True)
    id = talk.submit(b"abc", 50, keep=KeepState(id="s"))
    for _ in range(6):
        talk.step()
    manager = talk.engine._cache
    find = manager.lookup

    def losing(sequence: Sequence) -> Any:
        if sequence.needs_host:
            raise StepFailed("lost")
        return find(sequence)

    monkeypatch.setattr(manager, "lookup", losing)
    hosted = SamplingParams(max_tokens=3, temperature=0, stop_token_ids=(0,) * MOST_STOP_IDS)
    other = talk.submit(b"k", sampling=hosted)
    talk.engine.abort("c", [id], "stop", [2])
    talk.finish()
    end = talk.ends[id]
    assert isinstance(end, Finished) and end.state is not None
    assert bytes(end.state.recent) == b"bcde" and code(talk.ends[other]) == "step_failed"
    assert text(talk.run(b"", 2, state="s")) == b"fg"


def test_a_stop_token_is_not_part_of_the_state() -> None:
    talk = Talk()
    sampling = SamplingParams(max_tokens=9, temperature=0, stop_token_ids=(ord("e"),))
    end = talk.run(b"abc", sampling=sampling, keep=KeepState(id="s"))
    assert isinstance(end, Finished) and text(end) == b"d" and end.state is not None
    assert bytes(end.state.recent) == b"abcd"
    assert text(talk.run(b"", 2, state="s")) == b"ef"


def test_who_leaves_keeps_nothing() -> None:
    talk = Talk()
    talk.run(b"abc", 1, keep=KeepState(id="s"))
    id = talk.submit(b"x", 50, state="s", keep=KeepState(id="s"))
    talk.step()
    talk.engine.abort("c", [id], "abort")
    talk.finish()
    end = talk.ends[id]
    assert isinstance(end, Finished) and end.state is None
    assert talk.ask("get", id="s").states[0].tokens == 4


def test_one_turn_at_a_time() -> None:
    talk = Talk()
    turn = {"state": "s", "state_optional": True, "keep": KeepState(id="s")}
    first, second = talk.submit(b"a", 5, **turn), talk.submit(b"b", 5, **turn)
    other = talk.submit(b"b", 5, owner="bob", **turn)
    assert talk.code("import", target="s", content=b"") == "state_malformed"
    talk.finish()
    assert code(talk.ends[second]) == "state_busy"
    assert text(talk.ends[first]) == b"bcdef" and text(talk.ends[other]) == b"cdefg"
    third = talk.submit(b"k", 2, **turn)
    assert talk.code("delete", id="s") == "state_busy"
    assert talk.ask("get", id="s").states[0].busy
    assert text(talk.run(b"", 1, state="s")) == b"g", "what was there can be read meanwhile"
    talk.finish()
    assert text(talk.ends[third]) == b"lm"


def test_owners_do_not_meet() -> None:
    talk = Talk()
    talk.run(b"abc", owner="alice", keep=KeepState(id="s"))
    assert code(talk.run(b"", state="s", owner="bob")) == "state_not_found"
    for action in ("get", "delete", "export", "fork"):
        assert talk.code(action, id="s", owner="bob") == "state_not_found"
    assert talk.ask("list", owner="bob").states == []
    assert text(talk.run(b"", state="s", owner="alice")) == b"ghi"


def test_prompts_of_other_owners_and_salts_are_read_again() -> None:
    talk = Talk()

    def cached(**fields: Any) -> int:
        end = talk.run(b"abcdefgh", 1, **fields)
        assert isinstance(end, Finished)
        return end.cached_tokens

    assert [cached(), cached()] == [0, 8]
    assert [cached(owner="a"), cached(owner="a")] == [0, 8]
    assert [cached(cache_salt="x"), cached(cache_salt="x"), cached(cache_salt="y")] == [0, 8, 0]


def test_an_answer_that_a_prompt_goes_on_from_is_not_read_again() -> None:
    talk = Talk()
    assert text(talk.run(b"abc", 4)) == b"defg"
    end = talk.run(b"abcdefgxy", 1)
    assert isinstance(end, Finished) and end.cached_tokens == 6, "the last token was not read yet"


def test_a_junction_is_kept_where_it_saves_enough() -> None:
    talk = Talk()
    stem = bytes(range(97, 123)) * 2
    cached = []
    for end in (b"1", b"2", b"3"):
        done = talk.run(stem + end * 5, 1)
        assert isinstance(done, Finished)
        cached.append(done.cached_tokens)
    assert cached == [0, 0, len(stem)]


@pytest.mark.parametrize("options", [{}, {"share_slots": 0}, {"deterministic": True}])
@pytest.mark.parametrize("keep", [None, KeepState()])
@pytest.mark.parametrize("name", ["", "s"])
def test_samples_read_a_prompt_once(
    options: dict[str, Any], keep: KeepState | None, name: str
) -> None:
    talk = Talk(**options)
    talk.run(b"abcdef", 0, keep=KeepState(id="s"))
    prompt = bytes(range(97, 123)) * 10
    length = len(prompt) - (keep is not None)
    ids = [talk.submit(prompt, 3, state=name, keep=keep, cache_points=(length,)) for _ in range(4)]
    talk.finish()
    ends = [talk.ends[id] for id in ids]
    read_once = length
    if options.get("deterministic") and keep:  # in whole chunks; the state's tail is a part of one
        read_once = (length + 6 * bool(name)) // 128 * 128 - 6 * bool(name)
    cached = sorted(end.cached_tokens for end in ends if isinstance(end, Finished))
    assert cached == [0, *[read_once] * 3]
    if keep is not None:
        for end in ends:
            assert isinstance(end, Finished) and end.state is not None
            assert end.state.tokens == (6 if name else 0) + len(prompt) + 3


def test_continuations_after_a_state_read_their_context_once() -> None:
    talk = Talk()
    talk.run(b"abcdef", 0, keep=KeepState(id="s"))
    context = bytes(range(97, 123)) * 4
    ids = [
        talk.submit(
            context + bytes([97 + number]),
            0,
            state="s",
            score=True,
            score_from=len(context),
            cache_points=(len(context) - 1,),
        )
        for number in range(5)
    ]
    talk.finish()
    cached = []
    for id in ids:
        end = talk.ends[id]
        assert isinstance(end, Finished)
        cached.append(end.cached_tokens)
    assert sorted(cached) == [0, *[len(context) - 1] * 4]


def test_what_follows_one_state_is_not_known_after_another() -> None:
    talk = Talk()
    for id in ("s", "t"):
        talk.run(b"abcdef", 0, keep=KeepState(id=id))
    prompt = b"x" * 40

    def cached(**fields: Any) -> int:
        end = talk.run(prompt, 1, **fields)
        assert isinstance(end, Finished)
        return end.cached_tokens

    points = {"cache_points": (40,)}
    assert [cached(state="s", **points) for _ in range(2)] == [0, 40]
    assert cached(state="t", **points) == 0
    assert cached(**points) == 0
    assert cached(state="s") == 0, "unless it is asked for, nothing is kept or looked for"
    talk.ask("fork", id="s", target="u")
    assert cached(state="u", **points) == 40, "a fork is the same state"


def test_forks_exports_and_imports() -> None:
    talk = Talk()
    talk.run(b"abc", keep=KeepState(id="s"))
    forked = talk.ask("fork", id="s").states[0]
    assert forked.id.startswith("st_") and len(forked.id) == 35 and forked.tokens == 6
    out = talk.ask("export", id="s")
    back = talk.ask("import", content=out.content, target="t").states[0]
    assert (back.id, back.tokens, back.recent) == ("t", 6, forked.recent)
    assert talk.code("delete", id="s") == "ok"
    assert talk.code("get", id="s") == "state_not_found"
    for id in (forked.id, "t"):
        assert text(talk.run(b"", state=id)) == b"ghi"


def test_snapshots_are_made_and_checked_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the thread that steps the engine, which a large state would hold up."""
    talk = Talk(state_folder=str(tmp_path))
    stepping: list[bool] = []
    for name in ("read", "write"):
        real = getattr(snapshot, name)

        def noted(*given: Any, real: Any = real) -> Any:
            stepping.append(threading.current_thread() is threading.main_thread())
            return real(*given)

        monkeypatch.setattr(snapshot, name, noted)
    talk.run(b"abc", keep=KeepState(id="s", export=True))
    content = talk.ask("export", id="s").content
    assert talk.code("import", content=content, target="t") == "ok"
    kept = talk.engine._cache.states.get("", "s").point.state
    talk.engine._cache.tiers.free_row(kept)
    assert text(talk.run(b"", 1, state="s")) == b"g"
    # Snapshot and file of the request, the export, import and its file, the file read.
    assert stepping == [False] * 6


def test_a_snapshot_may_be_all_that_is_kept() -> None:
    talk = Talk()
    end = talk.run(b"abc", keep=KeepState(store=False, export=True))
    assert isinstance(end, Finished) and end.state is None and end.snapshot
    assert talk.ask("list").states == []
    talk.ask("import", content=end.snapshot, target="mine")
    assert text(talk.run(b"", state="mine")) == b"ghi"
    assert talk.engine._cache.tiers.host_used + talk.engine._cache.tiers.device_used < 8


def test_lists_come_in_pages() -> None:
    talk = Talk()
    talk.run(b"abc", keep=KeepState(id="m"))
    for id in ("z", "a", "k"):
        talk.ask("fork", id="m", target=id)
    page = talk.ask("list", limit=3)
    assert [state.id for state in page.states] == ["a", "k", "m"] and page.more
    page = talk.ask("list", id="m", limit=3)
    assert [state.id for state in page.states] == ["z"] and not page.more
    assert talk.code("list", limit=0) == talk.code("list", limit=1001) == "invalid_request"


@pytest.mark.parametrize("id", ["a b", "ä", "x" * 129, "a/b"])
def test_ids_that_are_none(id: str) -> None:
    talk = Talk()
    assert code(talk.run(b"abc", keep=KeepState(id=id))) == "invalid_request"
    talk.run(b"abc", keep=KeepState(id="s"))
    assert talk.code("fork", id="s", target=id) == "invalid_request"


@pytest.mark.parametrize(
    ("fields", "code_"),
    [
        ({"state": "none"}, "state_not_found"),
        ({"state": "none", "state_optional": True}, "invalid_request"),
        ({"keep": KeepState(ttl=0.0)}, "invalid_request"),
        ({"keep": KeepState(store=False)}, "invalid_request"),
        ({"cache_salt": "x" * 65}, "invalid_request"),
    ],
)
def test_wrong_requests(fields: dict[str, Any], code_: str) -> None:
    prompt = b"" if "state" in fields else b"abc"
    assert code(Talk().run(prompt, **fields)) == code_


def test_an_owner_has_so_many_and_memory_has_an_end() -> None:
    talk = Talk(max_states=2)
    for id in ("a", "b"):
        talk.run(b"abc", keep=KeepState(id=id))
    assert code(talk.run(b"abc", keep=KeepState(id="c"))) == "state_quota"
    assert talk.code("fork", id="a") == "state_quota"
    assert text(talk.run(b"abc", keep=KeepState(id="b"))) == b"def", "in the place of another"
    assert talk.ask("move", id="b", target="c").states[0].id == "c", "its place goes along"
    assert talk.ask("move", id="c", target="c").states[0].tokens == 6
    assert talk.ask("move", id="c").states[0].id.startswith("st_")
    assert [talk.code("get", id=id) for id in ("a", "b", "c")] == ["ok", *["state_not_found"] * 2]
    assert text(talk.run(b"abc", keep=KeepState(id="c"), owner="bob")) == b"def"
    small = Talk(share_slots=1, host_rows=1)
    for id in ("a", "b"):
        small.run(b"abc", keep=KeepState(id=id))
    assert code(small.run(b"abc", keep=KeepState(id="c"))) == "state_quota"
    assert text(small.run(b"wxy", 1)) == b"z", "others are served all the same"
    assert small.code("delete", id="a") == "ok"
    assert text(small.run(b"abc", keep=KeepState(id="c"))) == b"def"


def test_time_passes() -> None:
    talk = Talk(state_ttl=50.0)
    now = 1000.0
    states = talk.engine._cache.states
    states._clock = lambda: now
    talk.run(b"abc", keep=KeepState(id="s"))
    talk.run(b"abc", keep=KeepState(id="long", ttl=500.0))
    now += 40
    assert talk.ask("get", id="s").states[0].expires == now + 50, "a use"
    now += 40
    assert len(talk.ask("list").states) == 2
    now += 20
    assert [state.id for state in talk.ask("list").states] == ["long"]
    assert code(talk.run(b"", state="s")) == "state_not_found"


def test_states_leave_the_device_and_come_back() -> None:
    talk = Talk(share_slots=2, host_rows=30)
    for number in range(20):
        talk.run(bytes([97 + number]) * 3, 1, keep=KeepState(id=f"s{number}"))
    for number in (3, 0, 19, 3):
        assert text(talk.run(b"", 1, state=f"s{number}")) == bytes([97 + number + 2])


def test_a_failed_round_costs_what_it_was_to_copy() -> None:
    talk = Talk(share_slots=2)
    talk.run(b"abc", keep=KeepState(id="s"))  # its last copy waits for the next round
    talk.runner.failures.append(RuntimeError("boom"))
    assert code(talk.run(b"zzz")) == "step_failed"
    assert talk.code("get", id="s") == "state_not_found", "nobody knows what its row holds"
    assert text(talk.run(b"abc", keep=KeepState(id="s"))) == b"def"
    assert text(talk.run(b"", state="s")) == b"ghi"


def test_states_outlive_the_engine(tmp_path: Path) -> None:
    folder = str(tmp_path / "states")
    talk = Talk(state_folder=folder)
    talk.run(b"abc", keep=KeepState(id="s"), owner="alice")
    talk.run(b"xyz", keep=KeepState(id="gone"))
    talk.ask("delete", id="gone")
    talk.engine.close()
    part = StateFileStore.name("fake", "", "half").partition("-")[0]
    half = tmp_path / "states" / f"{part}-half.safetensors.1234abcd.writing"
    half.write_bytes(b"...")
    (tmp_path / "states" / ("0" * 48 + ".safetensors")).write_bytes(b"rubbish")
    later = Talk(state_folder=folder)
    later.runner.outside = talk.runner.outside
    (state,) = later.ask("list", owner="alice").states
    assert (state.id, state.tier, state.tokens) == ("s", "disk", 6)
    assert later.ask("list").states == []
    assert later.ask("export", id="s", owner="alice").content
    assert text(later.run(b"", state="s", owner="alice", keep=KeepState(id="s"))) == b"ghi"
    later.engine.close()
    assert not half.exists()
    third = Talk(state_folder=folder)
    third.runner.outside = later.runner.outside
    assert text(third.run(b"", state="s", owner="alice")) == b"jkl"


def test_states_of_another_model_in_the_folder_are_left_as_they_are(tmp_path: Path) -> None:
    """They are not deleted, touched, counted or found, and are served again afterwards."""

    def start(fingerprint: str, outside: dict[bytes, list[int]] | None = None) -> Talk:
        talk = Talk(state_folder=str(tmp_path), disk_state_bytes=one)
        talk.runner.info = msgspec.structs.replace(talk.runner.info, fingerprint=fingerprint)
        talk.engine = Engine(talk.runner)
        talk.runner.outside |= outside or {}
        return talk

    def files() -> dict[str, tuple[int, bytes]]:
        found = tmp_path.glob("*.safetensors")
        return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in found}

    shape = FakeRunner().info
    one = StateLayout("", shape.vocab_size, shape.state, shape.d_model).most_bytes  # for one state
    former = start("former")
    former.run(b"abc", keep=KeepState(id="s"))
    former.engine.close()
    before = files()
    other = start("other")
    assert other.ask("list").states == [] and other.code("get", id="s") == "state_not_found"
    other.run(b"xyz", keep=KeepState(id="s"))
    assert other.ask("get", id="s").states[0].stored
    other.ask("delete", id="s")
    other.run(b"uvw", keep=KeepState(id="t"))
    assert other.ask("get", id="t").states[0].stored
    other.engine.close()
    assert before.items() < files().items() and len(files()) == 2
    again = start("former", former.runner.outside)
    assert [state.id for state in again.ask("list").states] == ["s"]
    assert text(again.run(b"", state="s")) == b"ghi"
    again.engine.close()


def test_on_disk_there_is_room_for_more_than_in_memory(tmp_path: Path) -> None:
    talk = Talk(share_slots=2, host_rows=4, state_folder=str(tmp_path))
    for number in range(20):
        end = talk.run(bytes([97 + number]) * 3, 1, keep=KeepState(id=f"s{number:02}"))
        assert isinstance(end, Finished), end
        talk.engine.close()  # written
    tiers = {state.tier for state in talk.ask("list").states}
    assert tiers == {"device", "host", "disk"}
    for number in (0, 7, 19):
        assert text(talk.run(b"", 1, state=f"s{number:02}")) == bytes([97 + number + 2])


async def test_a_client_asks() -> None:
    client = EngineClient(InlineTransport(Engine(FakeRunner(host_rows=8))))
    await client.start()
    await client.ready(10)
    request = Request(id=0, prompt=pack_ids(b"abc"), keep=KeepState(id="s"))
    async for update in client.submit(request):
        last = update
    assert last.finished is not None and last.finished.state is not None
    listed = await client.ask_state("list", timeout=10)
    assert [state.id for state in listed.states] == ["s"]
    out = await client.ask_state("export", timeout=10, id="s")
    assert out.states == (await client.ask_state("list", timeout=10)).states and out.content
    moved = await client.ask_state("move", timeout=10, id="s", target="u")
    assert [state.id for state in moved.states] == ["u"]
    with pytest.raises(StateNotFound, match="'t'"):
        await client.ask_state("get", timeout=10, id="t")
    await client.close()
