"""The CUDA kernels on the host: every wait ends, every schedule gives the same bits.

The kernels of csrc are compiled with the machine's C++ compiler against an emulator of GPU threads
(emulator/machine.h tells what it notices). A case runs in many schedules and numbers of blocks; the
program compares their bits with each other and their values with a serial loop. What stands here
about the real GPU's arithmetic and speed: nothing.
"""

import re
import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests.csrc import build
from tests.once import made_once

RAGGED = "--lengths 1,300,0,128,129,64,700 --slots 3,0,5,-1,1,7,2 --tail 5"
# More sequences than streams of tiles (tiles.cuh), some without rows.
MANY = "--lengths " + ",".join(str(7 * n % 5 * 40) for n in range(45))
MANY += " --slots " + ",".join(str(-1 if n % 9 == 4 else n) for n in range(45))


def long_ones(count: int) -> str:
    """So many long sequences, and short ones between them."""
    lengths = [length for n in range(count) for length in ([n, 129] if n % 8 == 0 else [129])]
    slots = [-1 if n % 9 == 4 else n for n in range(len(lengths))]
    return f"--lengths {','.join(map(str, lengths))} --slots {','.join(map(str, slots))}"


LONG = "--lengths 2300 --slots 1"
UNIFORM = "--lengths 300,300,300"

# Without more said, with 1, 2, 7 and 50 blocks, in schedule 1; in schedule 0 all take turns.
TWO_TYPES = [
    f"{RAGGED} --type f32 --channels 72 --seeds 0,1",
    f"{RAGGED} --type bf16 --channels 72",
    f"{LONG} --type bf16 --channels 64 --blocks 2,19 --seeds 2",
    # Few columns for many blocks and many turns: blocks agree whether they take turns.
    "--lengths 6000 --slots 1 --type bf16 --channels 64 --blocks 3,4,5 --seeds 3",
]
# The cell matters little: mostly how many inputs there are, and so how many fit shared memory.
ALL_TYPES = [
    f"{LONG} --type f32 --channels 32 --blocks 1,3,19 --seeds 3,4",
    f"{MANY} --type f32 --channels 32 --seeds 5",
    f"{RAGGED} --type f32 --channels 64 --shift 1 --seeds 6",
    f"{RAGGED} --type f32 --channels 37 --extra-stride 3 --seeds 7",
    f"{RAGGED} --type bf16 --channels 21 --seeds 8",
    f"{RAGGED} --type f64 --channels 20 --seeds 9",
]
OF_LINEAR = [("linear", case) for case in TWO_TYPES[1:]]
SCANS = [
    pytest.param(
        cell,
        f"{case} --backward {backward} --reverse {backward}",
        # What takes long runs always for one cell and one type, forward and backward. Of all types
        # every second case runs always, half of these forward and half backward.
        marks=pytest.mark.slow
        if case == TWO_TYPES[3]
        or (cell, case) in OF_LINEAR
        or (case in ALL_TYPES and (ALL_TYPES.index(case) + backward) % 2)
        else [],
    )
    for cell in ("linear", "mingru")
    for backward in (0, 1)
    for case in TWO_TYPES + (ALL_TYPES if cell == "mingru" else [])
]
SCANS += [
    pytest.param(
        cell,
        f"{RAGGED} --type {dtype} --channels {channels} --short 128 --blocks 1,7 --seeds 13",
        marks=[] if cell == "mingru" else pytest.mark.slow,
    )
    for cell in ("linear", "mingru", "minlstm")
    for dtype, channels in (("f32", 132), ("bf16", 328))
]
# With a parameter of each channel: one case each of two-byte and four-byte types runs always.
SCANS += [
    pytest.param("hgrn", case, marks=[] if n in (0, 1) else pytest.mark.slow)
    for n, case in enumerate(
        [*TWO_TYPES, *ALL_TYPES, f"{RAGGED} --type bf16 --channels 328 --short 128 --seeds 18"]
    )
]
# Of three gates, which take a program of their own.
SCANS += [
    pytest.param(
        "minlstm",
        f"{case} --backward {backward} --reverse {backward}",
        marks=pytest.mark.slow,
    )
    for backward in (0, 1)
    for case in TWO_TYPES
]
SCANS += [
    ("linear", f"{RAGGED} --type bf16 --channels 32 --nan 1 --short 128 --blocks 1,7 --seeds 15"),
    ("mingru", f"{MANY} --type bf16 --channels 40 --short 128 --seeds 16"),
    # As many as there are streams, and more; the rows of no sequence may be long too.
    *(
        pytest.param(
            "linear",
            f"{long_ones(n)} --tail {tail} --type f32 --channels 32 --short 40 --seeds 17",
            marks=[] if n == 33 else pytest.mark.slow,
        )
        for n, tail in ((31, 41), (32, 0), (33, 0), (37, 300))
    ),
    ("linear", f"{RAGGED} --type f32 --channels 32 --nan 1 --seeds 10,11,12"),
    ("mingru", f"{UNIFORM} --type f32 --channels 5 --reverse 1 --seeds 11"),
    ("mingru", f"{UNIFORM} --type bf16 --channels 24 --backward 1 --seeds 12"),
]

# Prompts of Mamba; where nothing more is said, of 16 states, in schedules 0 and 1. Channels and
# strides that four divides are read and written in whole vectors, in three shares of the states.
SELECTIVE = [
    "--type bf16",
    "--type f32 --gate 0 --seeds 2",
    "--type f16 --float-vectors 0 --states 12 --channels 36",
    pytest.param(
        "--lengths 300,64,127 --slots 0,1,2 --splits 1,33,100,299 --channels 68 --seeds 0,1,2,3",
        marks=pytest.mark.slow,
    ),
    "--lengths 65,127 --slots 1,0 --splits 1,33,100 --channels 68",
    "--states 1 --channels 7 --extra-stride 3",
    "--states 16 --channels 33 --tail 70 --seeds 4",
    "--states 8 --extra-stride 4 --type f32",
    "--states 17 --channels 5 --extra-stride 1",
    "--states 64 --channels 9 --lengths 40,0,16,3 --slots 3,1,-1,0 --splits 16",
    "--states 256 --channels 5 --type f32 --lengths 19,8,1 --slots 2,0,1 --splits 8",
    "--states 200 --channels 3",
    "--half-state 1 --lengths 1,80,0,33 --slots 2,0,1,-1",
    "--half-state 1 --lengths 1,0,1 --slots 2,0,1 --type f32",
    "--lengths 0,0 --slots 0,1 --tail 3 --splits 0",
    "--lengths 5 --slots -1 --tail 0 --splits 2",
]

# Token by token unless it says otherwise: --chunks 1 is for bf16 with rows of 64 channels.
_RAGGED_TWENTY = "--lengths " + ",".join(str(5 * n % 4) for n in range(20))
_RAGGED_TWENTY += " --slots " + ",".join(str(-1 if n % 7 == 3 else n) for n in range(20))
_RAGGED_SEVENTY = "--lengths " + ",".join(str(7 * n % 4) for n in range(70))
_RAGGED_SEVENTY += " --slots " + ",".join(str(-1 if n % 9 == 0 else n) for n in range(70))
GATED_RNN = [
    f"--cell {cell} {case}"
    for cell in ("gru", "lstm")
    for case in (
        "--type bf16 --seeds 0,1,2",
        "--type f32 --units 13 --bias 0 --seeds 0,3",
        "--type f16 --units 8 --float-bias 0 --multiprocessors 1,3",
        "--type bf16 --units 100 --extra-stride 4 --seeds 2,5",
        "--type bf16 --units 264 --lengths 3,2,1 --slots 0,2,1 --multiprocessors 33,5,9,2 "
        "--splits 1 --seeds 1,4",
        f"--type f32 --units 24 {_RAGGED_TWENTY} --splits 2",
        f"--type bf16 --units 16 {_RAGGED_SEVENTY} --splits 2 --multiprocessors 2,1",
        "--lengths 0,0 --slots 0,1 --tail 3 --splits 0",
    )
]
SSD = [
    "--type bf16 --states 17 --head-dim 5 --heads 6 --groups 3",
    "--type f32 --states 64 --head-dim 20 --least-dt 0.25 --most-dt 1.5",
    "--type f16 --states 128 --head-dim 33 --lengths 20,0,3 --slots 0,2,1 --float-vectors 0",
    "--states 256 --head-dim 3 --lengths 40,0,16,3 --slots 3,1,-1,0 --extra-stride 1",
    "--type f32 --half-state 1 --states 128 --head-dim 20 --lengths 1,20,0,33 --slots 2,0,1,-1",
    "--half-state 1 --states 64 --head-dim 6 --heads 6 --groups 3 --lengths 1,0,1 --slots 2,0,1",
    "--chunks 1",
    "--chunks 1 --heads 4 --groups 2 --extra-stride 8 --float-vectors 0 --seeds 2 "
    "--lengths 1,37,0,20 --slots 3,0,5,-1",
    "--chunks 1 --states 128 --lengths 129,1,260 --slots 2,0,1",
    "--chunks 1 --states 128 --half-state 1 --lengths 128,257 --slots 1,0 --groups 2",
    "--chunks 1 --head-dim 128 --heads 1 --lengths 70,16,17 --slots 0,1,2 --least-dt 0.25 "
    "--most-dt 1.5",
    "--chunks 1 --lengths 0,0 --slots 0,1 --tail 3 --splits 0",
]

SRU = [
    "--type bf16",
    "--type f32 --tanh 1 --channels 33 --extra-stride 3 --seeds 0,1,2",
    "--type f16 --highway 0 --initial 0",
    "--type f32 --highway 0 --tanh 1 --lengths 100,0,64,65 --slots 3,1,-1,0 --channels 7",
    "--weight-c 0",
    "--weight-c 0 --type f32 --lengths 300,128,0,129,1,257 --slots 5,0,3,1,-1,2 --splits 128,256 "
    "--channels 33 --extra-stride 1",
    "--weight-c 0 --type f16 --lengths 513 --slots 0 --tanh 1 --highway 0 --tail 70 --channels 5",
    "--weight-c 0 --lengths 1,1,1,1 --slots 2,-1,0,9 --type f32",
    "--lengths 0,0 --slots 0,1 --tail 3 --splits 0",
    "--lengths 5 --slots -1 --tail 0 --splits 2",
]

# Five rows of 44 channels and a rank of 48, of which the second and the third row are padding.
SELECTED = [
    "--seeds 0,1,2",
    "--normed 1 --rank 8 --channels 33",
    "--half-state 1 --gate 0 --rank 16 --rows 4",
    "--normed 1 --rank 264 --rows 1 --channels 9",
    "--rank 40 --rows 9 --channels 150 --normed 1 --half-state 1",
]

# With SiLU unless it says otherwise. Where every sequence has one token there are steps too.
CONVOLUTIONS = [
    "--type bf16 --silu 0",
    "--type f32 --extra-stride 4",
    "--taps 2 --channels 140 --seeds 0,1,2",
    "--channels 7 --extra-stride 3 --bias 0",
    "--lengths 1,1,1,1,1 --slots 2,-1,0,9,4 --tail 0 --channels 132 --seeds 0,1,2",
    "--lengths 1,1,1 --slots 0,4,1 --tail 0 --taps 2 --channels 8 --silu 0 --type f32",
    "--lengths 0,0 --slots 0,1",
]

ROWS = [
    "--type f32 --time 5000",
    "--type f32 --time 5000 --shift 1 --seeds 2",
    "--type f32 --time 9999 --nan 1 --rows 1 --seeds 3,4",
    "--type f32 --time 500 --rows 9",
    "--type f32 --time 40000 --rows 1 --blocks 1,7,50 --seeds 4,5",
    "--type bf16 --time 9001 --rows 2",
    "--type bf16 --time 8192 --rows 2 --seeds 6",
    "--type bf16 --time 1 --rows 3",
    "--type f64 --time 2600 --initial 0",
]
ROWS = [f"{case} --backward {b} --reverse {r}" for case in ROWS for b, r in ((0, 0), (1, 1))] + [
    "--type f32 --time 3000 --reverse 1",
    "--type bf16 --time 5001 --backward 1",
]

# Rows of 24 that the streaming kernel gives up: where thousands of tokens are about as likely (some
# rows have temperatures that make them so). They are sampled in another way, which would hide that
# the first one is wrong.
GIVEN_UP = {
    "normal": (1, 1),
    "ties": (2, 5),
    "narrow": (14, 13),
    "equal": (17, 18),
    "geometric": (15, 16),
    "few": (0, 1),
    "outlier": (13, 12),
}
# Few threads have few bins and short lists, so that the cut is closed in on in many rounds.
SAMPLES = [
    pytest.param(f"--kind {kind} {size}", marks=pytest.mark.slow if slow else [])
    for kind, given_up in GIVEN_UP.items()
    for size, slow in (
        ("--vocab 66", False),
        ("--vocab 66 --each 4", False),
        ("--vocab 999 --each 32 --seeds 2", kind != "normal"),
        ("--vocab 3001 --threads 32", False),
        ("--vocab 3000 --threads 96 --seeds 2", kind != "normal"),
        (f"--vocab 3001 --threads 128 --streamed 1 --given-up {given_up[0]}", False),
        (
            f"--vocab 9000 --threads 64 --streamed 1 --given-up {given_up[1]} --seeds 2",
            kind != "ties",
        ),
    )
] + [
    "--vocab 1 --each 4",
    "--vocab 128 --each 4 --shift 1",
    "--vocab 200 --each 8",
    "--vocab 257 --each 9",
    "--vocab 289 --each 16",
    "--vocab 512 --each 16 --shift 1",
    "--vocab 288 --each 9 --shift 1",
    "--vocab 1024 --each 32",
    "--vocab 2",
    "--vocab 66 --shift 1",
    "--vocab 2999 --shift 3 --stored 1 --seeds 3",
    "--vocab 3000 --threads 256 --stored 1",
    "--kind ties --vocab 9000 --threads 128",
    "--vocab 1025 --streamed 1",
    "--vocab 2999 --shift 3 --threads 256 --streamed 1 --given-up 1 --seeds 3",
    pytest.param(
        "--vocab 70000 --threads 256 --streamed 1 --given-up 2 --seeds 4", marks=pytest.mark.slow
    ),
    "--vocab 9001 --threads 512 --streamed 1 --given-up 1 --seeds 5",
    pytest.param(
        "--kind ties --vocab 3001 --threads 512 --streamed 1 --given-up 2", marks=pytest.mark.slow
    ),
    "--kind later --vocab 9003 --threads 256 --streamed 1 --given-up 2 --seeds 1",
    "--kind weightless --vocab 8192 --threads 256 --streamed 1 --given-up 4 --seeds 1",
    "--kind ties --vocab 2999 --part 256",
    "--kind equal --vocab 3001 --part 7",
    "--kind few --vocab 700 --part 256",
    "--vocab 1 --part 256",
    "--kind holes --vocab 9001 --threads 128 --streamed 1 --given-up 1",
    "--kind holes --vocab 3001 --threads 96",
    "--sums 200",
    pytest.param("--edges 400 --vocab 9000", marks=pytest.mark.slow),
    pytest.param("--edges 400 --vocab 2048", marks=pytest.mark.slow),
    "--edges 200 --vocab 3001 --kind ties",
    pytest.param("--edges 200 --vocab 9003 --kind later --threads 128", marks=pytest.mark.slow),
]

# Without best tokens, with one, by a list and by several readings of a row.
LOGPROBS = [
    "--vocab 66",
    "--vocab 3001 --shift 1",
    "--vocab 3000 --seeds 2,3",
    "--vocab 66 --top 20 --seeds 1",
    "--vocab 3001 --top 1 --shift 1",
    "--vocab 3000 --top 20 --seeds 2,3",
    "--vocab 20000 --top 20 --seeds 4",
    "--vocab 1001 --top 3 --sampled 1 --seeds 5,6",
]

# One piece of a row and several, whole turns of the threads and not.
LOGITS_PROCESSED = [
    "--vocab 66 --entries 5",
    "--vocab 9001 --entries 300 --seeds 2,3",
    "--vocab 8192 --seeds 4",
    "--vocab 1 --entries 2 --seeds 5",
]

# One turn of the threads and several, of either row; fewer rows of state than slots name.
FUSED_NORMS = [
    "--width 8 --channels 8",
    "--width 72 --channels 200 --seeds 2,3",
    "--width 304 --channels 128 --cell 1",
    "--width 64 --channels 8200 --rows 2 --seeds 4",
    "--width 8200 --channels 72 --rows 2 --cell 1 --seeds 5",
    pytest.param(
        "--width 2304 --channels 4104 --rows 9 --processors 1 --seeds 6", marks=pytest.mark.slow
    ),
]

# One turn of the threads and two, of either row.
GATED_NORMS = [
    "--width 8 --channels 8",
    "--width 72 --channels 200 --seeds 2,3",
    "--width 64 --channels 8200 --rows 3 --seeds 4",
    "--width 8200 --channels 72 --rows 3 --seeds 5",
]

# Threads have a word, or several; all, some and no words become zero.
PINNED_COPIES = [
    "--count 1",
    "--count 257 --zeros 257 --blocks 1",
    "--count 1500 --first 300 --zeros 900",
]

SOUND = ["staged_and_met", "value_as_its_own_flag", "kernel_before_waited_for"]
DEFECTS = {
    "staged_not_waited_for": "before thread .* has waited for its copy",
    "staged_not_met": "before thread .* has waited for its copy|no barrier between",
    "values_without_barrier": "no barrier between",
    "values_after_shuffle": "no barrier between",
    "copy_over_what_is_read": r"\(by a copy that it starts\)|before thread .* has waited",
    "barrier_with_a_thread_gone": r"never ends(.|\n)*barrier 3 \(.*63 of 64 threads are there\)",
    "barrier_of_two_sizes": "barrier 4: .* for 32 threads, where others wait .* for 64",
    "lanes_at_other_calls": "__syncwarp|__ballot_sync",
    "word_that_nobody_stores": r"never ends(.|\n)*again and again at words at byte 16",
    "shared_memory_not_asked_for": "outside of what was asked for",
    "output_past_its_end": "writes outside of the arrays: output at byte 2048 of 2048",
    "input_written": "to be read alone: input",
    "copy_not_aligned": "not aligned",
    "value_and_flag_in_two_words": "the value came after its flag",
    "plain_value_and_flag": "which block 0 wrote, and nothing orders the two",
    "kernel_before_not_waited_for": "which the kernel before may still write",
}

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the programs, but for that of three gates."""
    names = [name for name in build.PROGRAMS if name != "minlstm"]
    return made_once(tmp_path_factory, "emulator", partial(build.build, names=names))


@pytest.fixture(scope="session")
def three_gates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds its program."""
    return made_once(tmp_path_factory, "three-gates", partial(build.build, names=["minlstm"]))


def run(program: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *options], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(("cell", "case"), SCANS)
def test_scan(request: pytest.FixtureRequest, cell: str, case: str) -> None:
    programs = request.getfixturevalue("three_gates" if cell == "minlstm" else "programs")
    result = run(programs / cell, *case.split())
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stderr


@pytest.mark.parametrize("case", SELECTIVE)
def test_selective_recurrence(programs: Path, case: str) -> None:
    result = run(programs / "selective", *case.split())
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stderr


@pytest.mark.parametrize("case", GATED_RNN)
def test_gated_rnn(programs: Path, case: str) -> None:
    result = run(programs / "gated_rnn", *case.split())
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stderr


@pytest.mark.parametrize("case", SSD)
def test_ssd(programs: Path, case: str) -> None:
    result = run(programs / "ssd", *case.split())
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stderr


@pytest.mark.parametrize("case", SRU)
def test_sru(programs: Path, case: str) -> None:
    result = run(programs / "sru", *case.split())
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stderr


@pytest.mark.parametrize("case", SELECTED)
def test_selected_step(programs: Path, case: str) -> None:
    result = run(programs / "selected", *case.split())
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stderr


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution(programs: Path, case: str) -> None:
    result = run(programs / "conv", *case.split())
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stderr


@pytest.mark.parametrize("case", ROWS)
def test_time_contiguous_scan(programs: Path, case: str) -> None:
    result = run(programs / "time_contiguous", *case.split())
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stderr


@pytest.mark.parametrize("case", SAMPLES)
def test_sampling(programs: Path, case: str) -> None:
    result = run(programs / "sampling", *case.split())
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stderr


@pytest.mark.parametrize("case", LOGPROBS)
def test_logprobs(programs: Path, case: str) -> None:
    result = run(programs / "logprobs", *case.split())
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stderr


@pytest.mark.parametrize("case", LOGITS_PROCESSED)
def test_logits_processor(programs: Path, case: str) -> None:
    result = run(programs / "logits_processor", *case.split())
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stderr


@pytest.mark.parametrize("case", GATED_NORMS)
def test_gated_norms(programs: Path, case: str) -> None:
    result = run(programs / "gated_norm", *case.split())
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stderr


@pytest.mark.parametrize("case", FUSED_NORMS)
def test_fused_norm(programs: Path, case: str) -> None:
    result = run(programs / "fused_norm", *case.split())
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stderr


@pytest.mark.parametrize("case", PINNED_COPIES)
def test_pinned_copy(programs: Path, case: str) -> None:
    result = run(programs / "pinned_copy", *case.split())
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stderr


@pytest.mark.parametrize("name", SOUND)
def test_sound_kernel_passes(programs: Path, name: str) -> None:
    result = run(programs / "defects", name)
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stderr


@pytest.mark.parametrize("name", DEFECTS)
def test_defect_is_told_of(programs: Path, name: str) -> None:
    result = run(programs / "defects", name)
    assert result.returncode == 3, result.stderr
    assert re.search(DEFECTS[name], result.stderr), result.stderr
