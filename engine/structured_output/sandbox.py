"""Sandbox: a process that compiles untrusted grammars, so that it can be killed.

Usage: `python -m engine.structured_output.sandbox FOLDER VOCAB_SIZE SECONDS BYTES`. For each
Grammar on stdin it writes a verdict to stdout: null, or a text that says what is wrong. Each
message is four bytes of length (little endian) and a msgpack value. A grammar that takes more than
SECONDS of CPU time or more than BYTES of memory ends the process, by SIGPROF or SIGABRT; its parent
starts another one.
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

if TYPE_CHECKING:  # the parent process needs only `frame`
    from engine.structured_output.compiler import TextTokens

LENGTH_BYTES = 4
STDERR = 2


def frame(value: object) -> bytes:
    """Encode a message."""
    data = msgspec.msgpack.encode(value)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def check(
    tokens: TextTokens | InvalidRequest, grammar: Grammar, seconds: float, more: int
) -> str | None:
    """Return what is wrong with a grammar; None if nothing is.

    The process ends after `seconds` of CPU time, or when it needs `more` bytes than before.
    """
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
    """Discard output to stderr, which is the server's.

    The library reports a failed allocation there, and clients' grammars must not write to the
    server's log.
    """
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
    """Read the next message; None at the end."""
    length = stream.read(LENGTH_BYTES)
    data = stream.read(int.from_bytes(length, "little"))
    return data if len(length) == LENGTH_BYTES else None


def _limit_memory(more: int) -> None:
    """Limit the process to `more` bytes than it has now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def main(arguments: list[str]) -> None:
    """Answer messages on stdin until it ends."""
    from engine.structured_output.compiler import load_tokens

    folder, vocab_size, seconds, more = arguments
    # Signals to the whole process group are meant for the server, which then closes stdin.
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
        except BrokenPipeError:  # the parent was killed; flushing at exit would fail too
            os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
