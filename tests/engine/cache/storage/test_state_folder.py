"""Where several engines have their files, also after there was another number of them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.cache.storage.file_store import StateFileStore, digest_in
from engine.cache.storage.state_folder import PREFIX_FOLDER, open_file_store
from engine.errors import ConfigError
from engine.protocol.placement import StatePlacement, engine_of_state

MODEL, VARIANT, OTHER = "model", "variant", "another model"
IDS = [f"id-{number}" for number in range(40)]


def opened(folder: Path, engines: int) -> list[StateFileStore]:
    return [
        open_file_store(folder, MODEL, VARIANT, StatePlacement(rank, engines))
        for rank in range(engines)
    ]


def write(file_store: StateFileStore, name: str, content: bytes) -> None:
    file_store.write(name, lambda: content, lambda _: None)


def names(file_store: StateFileStore) -> set[str]:
    return {name for name, _ in file_store.list_files(MODEL)}


def fill(folder: Path) -> None:
    """As one engine leaves it."""
    (file_store,) = opened(folder, 1)
    for id in IDS:
        write(file_store, StateFileStore.name(MODEL, "alice", id), id.encode())
    write(file_store, StateFileStore.name(OTHER, "alice", "its own"), b"other")
    file_store.list_files(VARIANT, PREFIX_FOLDER)  # makes the folder
    write(file_store, f"{PREFIX_FOLDER}/{StateFileStore.name(VARIANT, 'a text')}", b"cached")
    file_store.close()


def test_files_follow_the_number_of_engines(tmp_path: Path) -> None:
    fill(tmp_path)
    for engines in (3, 2, 1, 4):
        shelves = opened(tmp_path, engines)
        cached = 0
        for rank, file_store in enumerate(shelves):
            mine = [id for id in IDS if engine_of_state("alice", id, engines) == rank]
            assert names(file_store) == {StateFileStore.name(MODEL, "alice", id) for id in mine}
            for id in mine:
                assert (
                    file_store.read_now(StateFileStore.name(MODEL, "alice", id), 100)[0]
                    == id.encode()
                )
            cached += len(file_store.list_files(VARIANT, PREFIX_FOLDER))
            file_store.close()
        assert cached == 1
    # Another model's is there for when it is served.
    assert (tmp_path / StateFileStore.name(OTHER, "alice", "its own")).read_bytes() == b"other"


def test_what_is_no_file_of_the_model_stays(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "9-of-9").symlink_to(tmp_path)  # is not followed
    (tmp_path / "engine-9-of-9").symlink_to(tmp_path)
    (tmp_path / "1-of-2 of them").mkdir()
    for file_store in opened(tmp_path, 2):
        file_store.close()
    left = {path.name for path in tmp_path.iterdir() if not path.name.endswith("lock")}
    named = {
        StateFileStore.name(OTHER, "alice", "its own"),
        "notes.txt",
        "9-of-9",
        "engine-9-of-9",
        "1-of-2 of them",
    }
    assert left == {*named, PREFIX_FOLDER, "engine-0-of-2", "engine-1-of-2"}


def test_what_another_server_uses_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path)
    (user,) = opened(tmp_path, 1)
    shelves = opened(tmp_path, 2)
    assert "another server is using it" in caplog.text
    assert [names(file_store) for file_store in shelves] == [set(), set()]
    assert len(names(user)) == len(IDS)
    # Meanwhile two states go on here, and one there.
    for id in IDS[:2]:
        write(
            shelves[engine_of_state("alice", id, 2)],
            StateFileStore.name(MODEL, "alice", id),
            b"here",
        )
    write(user, StateFileStore.name(MODEL, "alice", IDS[2]), b"there")
    for file_store in (*shelves, user):
        file_store.close()
    os.utime(tmp_path / StateFileStore.name(MODEL, "alice", IDS[1]), (2e9, 2e9))  # used there since
    again = opened(tmp_path, 2)  # as by a reload
    assert sum(len(names(file_store)) for file_store in again) == len(IDS)
    for id, content in zip(IDS, (b"here", IDS[1].encode(), b"there"), strict=False):
        name = StateFileStore.name(MODEL, "alice", id)
        assert again[engine_of_state("alice", id, 2)].read_now(name, 100)[0] == content
        assert not (tmp_path / name).exists()


def fill_by_remainder(folder: Path, engines: int) -> None:
    """As several engines of a version that placed states by remainder leave the folder."""
    stores = [StateFileStore(folder / f"{rank}-of-{engines}", MODEL) for rank in range(engines)]
    for file_store in stores:
        file_store.list_files(VARIANT, PREFIX_FOLDER)  # makes the folder
    for id in IDS:
        for within, model in (("", MODEL), (f"{PREFIX_FOLDER}/", VARIANT)):
            name = StateFileStore.name(model, "alice", id)
            digest = digest_in(name, model)
            assert digest is not None
            write(stores[int(digest[:8], 16) % engines], within + name, id.encode())
    for file_store in stores:
        file_store.close()


def check_all_are_where_they_belong(stores: list[StateFileStore]) -> None:
    for rank, file_store in enumerate(stores):
        mine = [id for id in IDS if engine_of_state("alice", id, len(stores)) == rank]
        assert names(file_store) == {StateFileStore.name(MODEL, "alice", id) for id in mine}
        prefixes = {f"{PREFIX_FOLDER}/{StateFileStore.name(VARIANT, 'alice', id)}" for id in mine}
        assert {name for name, _ in file_store.list_files(VARIANT, PREFIX_FOLDER)} == prefixes
        for id in mine:
            name = StateFileStore.name(MODEL, "alice", id)
            assert file_store.read_now(name, 100)[0] == id.encode()


@pytest.mark.parametrize("engines", [1, 2, 3])
def test_a_folder_placed_by_remainder_is_sorted_anew(tmp_path: Path, engines: int) -> None:
    fill_by_remainder(tmp_path, 2)
    stores = opened(tmp_path, engines)
    check_all_are_where_they_belong(stores)
    for file_store in stores:
        file_store.close()
    check_all_are_where_they_belong(opened(tmp_path, engines))


def test_engines_that_start_at_once_sort_it_together(tmp_path: Path) -> None:
    fill_by_remainder(tmp_path, 3)
    with ThreadPoolExecutor(8) as threads:
        homes = [StatePlacement(rank, 8) for rank in range(8)]
        stores = list(
            threads.map(lambda home: open_file_store(tmp_path, MODEL, VARIANT, home), homes)
        )
    check_all_are_where_they_belong(stores)


def test_sorting_goes_on_after_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_by_remainder(tmp_path, 2)
    rename, left = Path.rename, 7

    def crash(self: Path, target: Path) -> Path:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", crash)
        with pytest.raises(KeyboardInterrupt):
            opened(tmp_path, 2)
    assert sum(1 for _ in tmp_path.glob("engine-*/*.safetensors")) == 7
    check_all_are_where_they_belong(opened(tmp_path, 2))


def test_what_a_server_of_the_older_version_uses_is_sorted_when_it_has_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill_by_remainder(tmp_path, 2)
    users = [StateFileStore(tmp_path / f"{rank}-of-2", MODEL) for rank in range(2)]
    there = [names(user) for user in users]
    first = opened(tmp_path, 2)
    assert "another server is using it" in caplog.text
    assert [names(user) for user in users] == there
    assert [names(file_store) for file_store in first] == [set(), set()]
    for file_store in (*users, *first):
        file_store.close()
    check_all_are_where_they_belong(opened(tmp_path, 2))


def test_one_engine_brings_all_states_to_where_an_older_version_finds_them(tmp_path: Path) -> None:
    """That version moves them on from the folder itself, as from any other number of engines."""
    fill_by_remainder(tmp_path, 2)
    for engines in (3, 1):
        for file_store in opened(tmp_path, engines):
            file_store.close()
    assert len(list(tmp_path.glob("*.safetensors"))) == len(IDS)
    assert len(list(tmp_path.glob(f"{PREFIX_FOLDER}/*.safetensors"))) == len(IDS)


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="state_folder"):
        open_file_store(tmp_path / "file", MODEL, VARIANT, StatePlacement(0, 2))
