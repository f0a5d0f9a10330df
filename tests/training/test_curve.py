from __future__ import annotations

from pathlib import Path

from engine.training.curve import Curve, Point, draw


def point(step: int, valid_loss: float = 2.0) -> Point:
    return Point(
        step=step,
        tokens=step * 8,
        train_loss=2.5,
        valid_loss=valid_loss,
        learning_rate=1e-3,
        tokens_per_second=100.0,
        seconds=step / 10,
    )


def test_what_is_appended_reads_back(tmp_path: Path) -> None:
    curve = Curve(tmp_path / "curve.jsonl")
    assert curve.points() == []
    for step in (10, 20):
        curve.append(point(step))
    assert Curve(tmp_path / "curve.jsonl").points() == [point(10), point(20)]


def test_a_resumed_run_drops_what_it_will_write_again_and_a_broken_line(tmp_path: Path) -> None:
    curve = Curve(tmp_path / "curve.jsonl")
    curve.keep_until(10)  # no file yet
    for step in (10, 20, 30):
        curve.append(point(step))
    with curve.path.open("a") as file:
        file.write('{"step": 40, "tok')
    curve.keep_until(20)
    assert curve.points() == [point(10), point(20)]


def test_the_curve_of_an_earlier_version_reads_as_it_did(tmp_path: Path) -> None:
    """Its validation loss was called test_loss."""
    curve = Curve(tmp_path / "curve.jsonl")
    curve.append(point(10))
    curve.path.write_text(curve.path.read_text().replace("valid_loss", "test_loss"))
    assert curve.points() == [point(10)]
    curve.keep_until(10)
    curve.append(point(20))
    assert curve.points() == [point(10), point(20)]


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    draw([point(10, 3.0), point(20, 2.1), point(30, 2.2)], "title", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
