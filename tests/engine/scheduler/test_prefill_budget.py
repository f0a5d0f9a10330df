"""AdmissionLimit: few requests at once, but as many as come free."""

from __future__ import annotations

import sys

from engine.scheduler.prefill_budget import AdmissionLimit


def test_alone_the_device_takes_all() -> None:
    assert AdmissionLimit(10, overlaps=False).limit(10) == sys.maxsize


def test_slots_are_taken_a_part_at_a_time() -> None:
    assert AdmissionLimit(4096, overlaps=True).limit(100) == 256
    assert AdmissionLimit(100, overlaps=True).limit(100) == 64


def test_what_comes_free_is_taken_again() -> None:
    admission = AdmissionLimit(1024, overlaps=True)
    admission.note(0)
    assert admission.limit(30) == 64
    assert admission.limit(80) == 80
    assert admission.limit(1024) == 96


def test_what_was_left_is_taken_bit_by_bit() -> None:
    admission = AdmissionLimit(1024, overlaps=True)
    free = 200
    for _ in range(20):
        admission.note(free)
        free += 70  # as many come free as are admitted else
        free -= admission.limit(free)
    assert free < 30
