"""Intake: few requests at once, but as many as come free."""

from __future__ import annotations

import sys

from engine.scheduler.prefill_budget import Intake


def test_alone_the_device_takes_all() -> None:
    assert Intake(10, overlaps=False).most(10) == sys.maxsize


def test_slots_are_taken_a_part_at_a_time() -> None:
    assert Intake(4096, overlaps=True).most(100) == 256
    assert Intake(100, overlaps=True).most(100) == 64


def test_what_comes_free_is_taken_again() -> None:
    intake = Intake(1024, overlaps=True)
    intake.note(0)
    assert intake.most(30) == 64
    assert intake.most(80) == 80
    assert intake.most(1024) == 96


def test_what_was_left_is_taken_bit_by_bit() -> None:
    intake = Intake(1024, overlaps=True)
    free = 200
    for _ in range(20):
        intake.note(free)
        free += 70  # as many come free as are admitted else
        free -= intake.most(free)
    assert free < 30
