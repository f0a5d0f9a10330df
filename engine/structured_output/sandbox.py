"""A process that compiles grammars to find out whether they can be: `python -m
engine.structured_output.sandbox FOLDER VOCAB_SIZE SECONDS BYTES`.

Grammars come on stdin and verdicts go to stdout, one for one, each as four bytes of length (least
first) and a msgpack value: a Grammar, and null or a text that says what is wrong. A grammar
that takes more than SECONDS of processor time or more than BYTES of memory ends the process, by
SIGPROF or SIGABRT; whoever started it starts another one.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from engine.errors import InvalidRequest
from engine.protocol.sampling_params import Grammar

if TYPE_CHECKING:  # whoever starts the process needs `frame` alone
    from engine.structured_output.compiler import TextTokens

LENGTH_BYTES = 4
STDERR = 2


def frame(value: object) -> bytes:
    """A value as it is sent."""
    data = msgspec.msgpack.encode(value)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def check(
    tokens: TextTokens | InvalidRequest, grammar: Grammar, seconds: float, more: int
) -> str | None:
    """What is wrong with a grammar; None when nothing is. Ends the process after `seconds`, or when
    it takes `more` bytes than before."""
    from engine.structured_output.compiler import check_grammar

    if isinstance(tokens, InvalidRequest):
        return tokens.message
    _limit_memory(more)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        with _silent():
            check_grammar(tokens, grammar)
    except InvalidRequest as error:
        return error.message
    except MemoryError:
        os.abort()  # as the library does
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None


@contextmanager
def _silent() -> Iterator[None]:
    """Nothing goes to stderr, which is the server's: the library complains there of its last
    allocation, and who sends grammars should not write the server's log."""
    stderr = os.dup(STDERR)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, STDERR)
    try:
        yield
    finally:
        os.dup2(stderr, STDERR)
        os.close(nowhere)
        os.close(stderr)


def _read(stream: BinaryIO) -> bytes | None:
    """The next value; None at the end."""
    length = stream.read(LENGTH_BYTES)
    data = stream.read(int.from_bytes(length, "little"))
    return data if len(length) == LENGTH_BYTES else None


def _limit_memory(more: int) -> None:
    """Bounds the process to `more` bytes than it has now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def main(arguments: list[str]) -> None:
    """Answers until stdin ends."""
    from engine.structured_output.compiler import load_tokens

    folder, vocab_size, seconds, more = arguments
    # What is sent to the whole process group is for the server, which then closes us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tokens: TextTokens | InvalidRequest
    try:
        tokens = load_tokens(Path(folder), int(vocab_size))
    except InvalidRequest as error:
        tokens = error
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while (data := _read(sys.stdin.buffer)) is not None:
        grammar = msgspec.msgpack.decode(data, type=Grammar)
        verdict = frame(check(tokens, grammar, float(seconds), int(more)))
        try:
            sys.stdout.buffer.write(verdict)
            sys.stdout.buffer.flush()
        except BrokenPipeError:  # who asked was killed; nor can the interpreter flush at its end
            os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
