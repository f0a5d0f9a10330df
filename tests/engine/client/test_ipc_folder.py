"""SocketFolder: private, gone when it is removed, and what killed processes left goes too."""

from __future__ import annotations

import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.client.ipc_folder import PREFIX, SocketFolder

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this test's temporary files go; tmp_path may be too long for a socket."""
    with tempfile.TemporaryDirectory(prefix="test-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_it_is_private_and_goes(own_folder: Path) -> None:
    folder = SocketFolder()
    assert folder.path.parent == own_folder
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder.socket))
        folder.remove()
        folder.remove()
    assert list(own_folder.iterdir()) == []


def test_a_killed_process_leaves_its_folder_for_the_next_to_remove(own_folder: Path) -> None:
    code = (
        "import sys, socket, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from engine.client.ipc_folder import SocketFolder\n"
        "folder = SocketFolder(); server = socket.socket(socket.AF_UNIX)\n"
        "server.bind(str(folder.socket)); print(folder.path, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(own_folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    with process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        first = SocketFolder()
        assert theirs.is_dir()  # it lives
        process.kill()
        process.wait()
    second = SocketFolder()
    assert not theirs.exists()
    assert first.path.is_dir() and second.path.is_dir()
    first.remove()
    second.remove()


def test_what_is_no_socket_folder_stays(own_folder: Path) -> None:
    full = own_folder / f"{PREFIX}mine"
    full.mkdir()
    (full / "engine").write_text("not a socket")
    elsewhere = own_folder / "elsewhere"
    elsewhere.mkdir()
    (own_folder / f"{PREFIX}link").symlink_to(elsewhere)
    SocketFolder().remove()
    assert (full / "engine").read_text() == "not a socket"
    assert elsewhere.is_dir()


def test_a_path_too_long_for_a_socket_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = SocketFolder()
    assert folder.path.parent == Path("/tmp")
    assert list(deep.iterdir()) == []
    folder.remove()
