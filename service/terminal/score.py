"""`minserve score`: how well a model predicts texts, with the state carried and in windows.

One file without further options is read in pieces at constant memory. Otherwise the texts are cut
into documents, each of which is scored from the initial state.
"""

from __future__ import annotations

import io
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from engine.config import DtypeName, EngineConfig
from engine.device import resolve_device, resolve_dtype, usable_cpus
from engine.errors import ConfigError
from engine.models.backends.selector import select_backend
from engine.models.loader import load_config, load_model, resolve
from engine.models.state import ModelState, new_state
from engine.training.evaluation import CHUNK, CarriedLoss, Loss, served_windows
from service.terminal import console as terminal
from service.terminal import positions
from service.terminal import text as terminal_text
from service.terminal.positions import PositionSums
from service.text.documents import ByteRange, Document, first_lines, read_documents

STDIN = Path("-")
FED = 16 * CHUNK  # tokens of a document between two reports of progress

Report = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to score, and which figures."""

    paths: Sequence[Path]
    separator: str | None = None  # a line of this text ends a document
    only: Path | None = None  # a list of documents' first lines
    within: ByteRange | None = None
    skip_header: bool = False
    window: int | None = None  # tokens
    by_position: bool = False
    plot: Path | None = None

    @property
    def plain(self) -> bool:
        """Whether it is one file of which nothing is asked that needs documents."""
        return len(self.paths) == 1 and self == Wanted(paths=self.paths)

    @property
    def with_positions(self) -> bool:
        """Whether figures by position are asked."""
        return self.by_position or self.plot is not None

    def check(self) -> None:
        """Raise ConfigError for what cannot be measured."""
        if STDIN in self.paths and not self.plain:
            raise ConfigError(
                'stdin is scored as one text: "-" takes no other path and no option about '
                "documents, ranges, headers, windows or positions"
            )
        if self.separator is not None and not self.separator.strip():
            raise ConfigError("--end-of-text is empty; allowed: the text of a line")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"--window is {self.window}; allowed: at least 1 token")
        if self.plot is not None:
            positions.require_matplotlib()
            if not self.plot.absolute().parent.is_dir():
                raise ConfigError(f"--plot: {self.plot.parent} is no folder")
            if self.plot.is_dir():
                raise ConfigError(f"--plot: {self.plot} is a folder; allowed: a file")


def score(wanted: Wanted, asked: EngineConfig) -> Report:
    """Return the figures of texts under a model, and draw them if wanted.

    Raises OSError, TextError, and EngineError for a model or a text that cannot be scored.
    """
    wanted.check()
    if wanted.plain and not wanted.paths[0].is_dir():
        return Scorer(asked).score_file(wanted.paths[0])
    documents = select(wanted)
    scores = Scorer(asked).score_documents(documents, wanted)
    report = report_of(scores, wanted)
    if wanted.plot is not None:
        draw(report, scores, wanted, wanted.plot)
    return report


def range_of(text: str | None) -> ByteRange | None:
    """Return the value of --range. Raises ConfigError if it is no range, or an empty one."""
    if text is None:
        return None
    found = ByteRange.parse(text)
    if found is None:
        raise ConfigError(f"--range is {text!r}; allowed: BEGIN:END in bytes, such as 0:1000000")
    if found.end is not None and found.end <= found.begin:
        raise ConfigError(f"--range {text} is empty; allowed: an END behind BEGIN")
    return found


@dataclass(frozen=True, kw_only=True)
class DocumentScore:
    """The figures of one document."""

    first_line: str
    size: int  # bytes of its text, without a header that is skipped
    scored: int  # bytes of it that were scored
    carried: Loss
    windows: Loss | None
    positions: PositionSums | None


class Scorer:
    """A model and its tokenizer on a device."""

    def __init__(self, asked: EngineConfig) -> None:
        """Load a model. Raises EngineError if it cannot be loaded or has no tokenizer."""
        folder = resolve(asked.model)
        device = resolve_device(asked.device)
        torch.set_num_threads(asked.threads or usable_cpus())
        stored = load_config(folder)
        self._tokenizer = terminal_text.load_tokenizer(folder, stored.vocab_size)
        compute = cast(DtypeName, resolve_dtype(asked.dtype, device, stored.dtype))
        model, config = load_model(
            folder, device, compute, asked.quantization, state_dtype=asked.state_dtype
        )
        self._model = select_backend(model, device, deterministic=asked.deterministic)
        self._specs, self._device = config.state, device

    def score_file(self, path: Path) -> Report:
        """Score a file of any length, or stdin, as one text at constant memory.

        Raises OSError, TextError, and ConfigError if the text has less than two tokens.
        """
        total = None if path == STDIN else path.stat().st_size
        carried = CarriedLoss(self._model, self._new_state())
        read = unscored = 0  # bytes
        with terminal.progress("scoring", total) as progress:
            begins = True  # until a token has been read
            for piece in terminal_text.text_pieces(path, self._tokenizer.last_cut):
                ids = self._tokenizer.encode(piece, begins=begins)
                if begins:
                    unscored = self._bytes_of_first(piece, ids)
                read += len(piece.encode())
                begins = begins and not ids
                carried.feed(_tensor(ids))
                loss = carried.loss
                progress.to(read, f"{loss.per_token:.4f} nats per token" if loss.tokens else None)
            carried.feed(_tensor(array("i", self._tokenizer.end_ids)))
        loss = carried.finish()
        if loss.tokens == 0:
            raise ConfigError(f"{path}: nothing to score: the text has less than two tokens")
        return _figures(loss, read - unscored)

    def score_documents(self, documents: Sequence[Document], wanted: Wanted) -> list[DocumentScore]:
        """Score each document from the initial state."""
        sizes = [len(document.text.encode()) for document in documents]
        scores = []
        done = 0
        with terminal.progress("scoring", sum(sizes)) as progress:
            for number, (document, size) in enumerate(zip(documents, sizes, strict=True), 1):
                named = f"document {number:,} of {len(documents):,}"

                def tell(
                    part: float, note: str, done: int = done, size: int = size, named: str = named
                ) -> None:
                    progress.to(done + part * size, f"{named}, {note}")

                scores.append(self._score(document, wanted, tell))
                done += size
        return scores

    def _score(
        self, document: Document, wanted: Wanted, tell: Callable[[float, str], None]
    ) -> DocumentScore:
        """Score a document; `tell` gets the part that is done, and a note."""
        header = self._tokenizer.encode(document.header) if wanted.skip_header else array("i")
        ids, starts, size = self._read(
            document.body if header else document.text, begins=not header
        )
        nats: list[Tensor] = []  # of each scored token, on the CPU
        carried = CarriedLoss(
            self._model,
            self._new_state(),
            unscored=max(len(header), 1),
            each=(lambda some: nats.append(some.cpu())) if wanted.with_positions else None,
        )
        before, tokens = _tensor(header), _tensor(ids)
        carried.feed(before)
        passes = 1 if wanted.window is None else 2
        for first in range(0, len(ids), FED):
            carried.feed(tokens[first : first + FED])
            tell(first / len(ids) / passes, f"{carried.loss.per_token:.4f} nats per token")
        loss = carried.finish()

        windows = None
        if wanted.window is not None and loss.tokens:
            windows = Loss(0.0, 0)
            for part in self._windows(before, tokens, wanted.window):
                windows += part
                tell(0.5 + windows.tokens / loss.tokens / 2, f"windows: {windows.per_token:.4f}")

        scored = starts[len(ids) - loss.tokens :]
        sizes = torch.diff(scored, append=torch.tensor([size]))
        return DocumentScore(
            first_line=document.first_line,
            size=size,
            scored=int(sizes.sum()),
            carried=loss,
            windows=windows,
            positions=PositionSums.of(scored, sizes, torch.cat(nats)) if nats else None,
        )

    def _windows(self, header: Tensor, ids: Tensor, window: int) -> Iterator[Loss]:
        """Yield the loss in windows, each from the state after the header, in parts."""
        start = self._new_state()
        if header.numel():
            # the header predicts the first token, before which no window can begin
            first = CarriedLoss(self._model, start, unscored=header.numel())
            first.feed(header)
            first.feed(ids[:1])
            yield first.finish()
        yield from served_windows(self._model, start, ids, window)

    def _read(self, text: str, *, begins: bool) -> tuple[array[int], Tensor, int]:
        """Return a text's tokens, the byte at which each begins, int64 [tokens], and its bytes.

        If it begins a document, its second token begins behind the bytes of the first.
        """
        ids, starts = array("i"), [torch.empty(0, dtype=torch.int64)]
        size = behind_first = 0
        file = io.BytesIO(text.encode())
        for piece in terminal_text.pieces_of(file, self._tokenizer.last_cut):
            more = self._tokenizer.encode(piece, begins=begins and not ids)
            length = len(piece.encode())
            if more and not ids:
                behind_first = size + self._bytes_of_first(piece, more)
            starts.append(size + self._starts(more, length))
            ids.extend(more)
            size += length
        ids.extend(self._tokenizer.end_ids)
        starts.append(torch.full((len(self._tokenizer.end_ids),), size))
        begun = torch.cat(starts)
        if begins and len(ids) > 1:
            begun.clamp_(min=behind_first)
            begun[1] = behind_first
        return ids, begun, size

    def _starts(self, ids: array[int], length: int) -> Tensor:
        """Return the byte of a piece of text at which each of its tokens begins, int64 [tokens].

        In proportion, where the tokens' bytes are not those of the text.
        """
        sizes = self._text_sizes[_tensor(ids).long()]
        ends = sizes.cumsum(0)
        whole = int(ends[-1]) if ids else 0
        starts = ends - sizes
        return starts if whole in (0, length) else starts * length // whole

    @cached_property
    def _text_sizes(self) -> Tensor:
        return torch.tensor(self._tokenizer.text_sizes())

    def _bytes_of_first(self, piece: str, ids: array[int]) -> int:
        return len(piece.encode()) - self._tokenizer.bytes_behind(piece, ids[:1])

    @torch.no_grad()
    def _new_state(self) -> ModelState:
        return new_state(self._specs, 1, self._model.initial_state(), self._device)


def select(wanted: Wanted) -> list[Document]:
    """Return the documents to score.

    Raises OSError, TextError, and ConfigError for a path that is not there, a range behind the
    data, or a line of `only` that no document begins with.
    """
    names = None if wanted.only is None else first_lines(wanted.only)
    found = [
        document
        for document in read_documents(
            wanted.paths, separator=wanted.separator, within=wanted.within
        )
        if names is None or document.first_line in names
    ]
    missing = sorted((names or set()) - {document.first_line for document in found})
    if missing:
        others = f" nor for {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(
            f"{wanted.only}: there is no document for the line {missing[0]!r}{others}"
        )
    return found


def report_of(scores: Sequence[DocumentScore], wanted: Wanted) -> dict[str, Any]:
    """Return the figures of documents. Raises ConfigError if no token was scored."""
    loss = _sum(score.carried for score in scores)
    if loss.tokens == 0:
        where = ", ".join(map(str, wanted.paths))
        raise ConfigError(f"{where}: nothing to score: no document has two tokens")
    size = sum(score.scored for score in scores)
    report = {**_figures(loss, size), "bytes": size}
    if wanted.window is not None:
        windows = _sum(score.windows for score in scores)
        report |= {
            "window": wanted.window,
            "windows_nats_per_token": windows.per_token,
            "windows_bits_per_byte": _bits(windows, size),
        }
    if wanted.with_positions:
        report |= {
            "by_position": _by_position(scores),
            "by_position_long": _by_position(_long(scores)),
        }
    report["documents"] = [
        {
            "first_line": score.first_line,
            "bytes": score.scored,
            "tokens": score.carried.tokens,
            "bits_per_byte": _bits(score.carried, score.scored),
        }
        | (
            {}
            if score.windows is None
            else {"windows_bits_per_byte": _bits(score.windows, score.scored)}
        )
        for score in scores
    ]
    return report


def shown(report: Report) -> str:
    """Return a report as text, the documents by their number alone."""
    parts = [
        terminal.table(
            {
                name: len(value) if name == "documents" else value
                for name, value in report.items()
                if not name.startswith("by_position")
            }
        )
    ]
    if "by_position" in report:
        parts.append("By position, all documents:\n" + positions.table(report["by_position"]))
    if report.get("by_position_long"):
        parts.append(
            f"By position, documents of {positions.LONG:,} bytes and more:\n"
            + positions.table(report["by_position_long"])
        )
    return "\n\n".join(parts)


def draw(report: Report, scores: Sequence[DocumentScore], wanted: Wanted, path: Path) -> None:
    """Write bits per byte by position as a PNG. Raises OSError."""
    kept = _long(scores) or scores
    windows = None
    if wanted.window is not None:
        bits = _bits(_sum(score.windows for score in kept), sum(score.scored for score in kept))
        windows = None if bits is None else (wanted.window, bits)
    positions.draw(path, report["by_position"], report["by_position_long"], windows)


def _long(scores: Sequence[DocumentScore]) -> list[DocumentScore]:
    return [score for score in scores if score.size >= positions.LONG]


def _by_position(scores: Iterable[DocumentScore]) -> list[positions.Row]:
    return PositionSums.total(score.positions for score in scores if score.positions).rows()


def _sum(losses: Iterable[Loss | None]) -> Loss:
    return sum((loss for loss in losses if loss is not None), Loss(0.0, 0))


def _figures(loss: Loss, size: int) -> dict[str, Any]:
    """Return the figures of a loss over `size` bytes."""
    return {
        "tokens": loss.tokens,
        "nats_per_token": loss.per_token,
        "perplexity": math.exp(loss.per_token),
        "bits_per_byte": _bits(loss, size),
    }


def _bits(loss: Loss, size: int) -> float | None:
    """Return bits per byte; None without bytes, as for an end-of-text token alone."""
    return loss.nats / math.log(2) / size if size > 0 else None


def _tensor(ids: array[int]) -> Tensor:
    """Return token ids as int32 [tokens], which share their memory."""
    return torch.frombuffer(ids, dtype=torch.int32) if ids else torch.empty(0, dtype=torch.int32)
