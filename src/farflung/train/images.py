"""Labelled images: where they come from, how they are split over learners, and batches of them.

Shape letters: N images, B images in a batch, H rows, W columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from farflung.errors import UserError
from farflung.train.batches import ShardBatches, check_learner
from farflung.train.idx import read_idx

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
"""Where the package `dataset-fashion-mnist` of Debian and Ubuntu puts its files."""

NUM_CLASSES = 10
MIN_SIDE = 8  # pixels: the models halve a side three times

Batch = tuple[Tensor, Tensor]
"""Pixels, uint8 [B, H, W], and labels, int64 [B]."""


@dataclass(frozen=True, eq=False)
class Images:
    """Images in grey and their labels.

    Args:
        pixels_NHW: uint8 [N, H, W], 0 to 255.
        labels_N: int64 [N], below `NUM_CLASSES`.
    """

    pixels_NHW: Tensor
    labels_N: Tensor

    def __len__(self) -> int:
        return len(self.labels_N)

    def shard(self, learner_index: int, num_learners: int) -> "Images":
        """Return every ``num_learners``-th image from ``learner_index`` on, as views.

        Shards do not overlap, cover everything and differ by at most one image; in files that are sorted by
        class all learners see all classes.

        Raises:
            UserError: no such shard, or it is empty.
        """
        check_learner(learner_index, num_learners)
        part = Images(
            self.pixels_NHW[learner_index::num_learners], self.labels_N[learner_index::num_learners]
        )
        if not len(part):
            raise UserError(
                f"the shard of learner {learner_index} is empty: {len(self)} images for {num_learners} learners: "
                "give more images (data.path) or fewer learners"
            )
        return part

    def spread(self, num_images: int) -> "Images":
        """Return at most ``num_images`` of them, evenly spaced, each once."""
        picked = np.unique(np.linspace(0, len(self) - 1, num_images).astype(np.int64))
        return Images(*self.at(torch.from_numpy(picked)))

    def at(self, positions_B: Tensor) -> Batch:
        """Return the images at these positions, int64 [B]; copies."""
        return self.pixels_NHW[positions_B], self.labels_N[positions_B]

    def split(self, batch_size: int) -> Iterator[Batch]:
        """Go through all images in order."""
        for first in range(0, len(self), batch_size):
            part = slice(first, first + batch_size)
            yield self.pixels_NHW[part], self.labels_N[part]

    def batches(self, batch_size: int, seed: int, learner_index: int) -> ShardBatches:
        """Return endless random batches of ``batch_size`` images."""
        return ShardBatches(self.at, len(self), batch_size, seed, learner_index)


def read_images(path: str | None = None) -> tuple[Images, Images]:
    """Return the images to train on and the held-out ones.

    Args:
        path: a folder with the four files of MNIST or a relative, plain or compressed:
            ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``, ``t10k-...``; None is Fashion-MNIST.

    Raises:
        UserError: nothing is there, or a file is not what it should be.
    """
    folder = FASHION_MNIST if path is None else Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"data.path = {path!r}: no such folder: give one with the four files of MNIST or a relative"
            if path is not None
            else f"the default images (Fashion-MNIST) are not in {FASHION_MNIST}: "
            "apt install dataset-fashion-mnist, or set data.path to a folder with its four files"
        )
    train, held_out = (_read_part(folder, part) for part in ("train", "t10k"))
    sizes = [tuple(images.pixels_NHW.shape[1:]) for images in (train, held_out)]
    if sizes[0] != sizes[1]:
        (a, b), (c, d) = sizes
        raise UserError(
            f"{folder}: images to train on have {a} x {b} pixels, the held-out ones {c} x {d}: "
            "all four files must be of one data set"
        )
    return train, held_out


def _read_part(folder: Path, part: str) -> Images:
    where = _find(folder, f"{part}-images-idx3-ubyte")
    where_labels = _find(folder, f"{part}-labels-idx1-ubyte")
    pixels_NHW, labels_N = read_idx(where, 3), read_idx(where_labels, 1).long()
    if len(pixels_NHW) != len(labels_N):
        raise UserError(
            f"{where_labels}: {len(labels_N)} labels for the {len(pixels_NHW)} images of {where.name}: "
            "both must be of one data set"
        )
    if not len(labels_N) or min(pixels_NHW.shape[1:]) < MIN_SIDE:
        shape = " x ".join(map(str, pixels_NHW.shape))
        raise UserError(f"{where}: holds {shape} pixels: give images of at least {MIN_SIDE} x {MIN_SIDE}")
    if (largest := int(labels_N.max())) >= NUM_CLASSES:
        raise UserError(f"{where_labels}: has label {largest}: labels must be from 0 to {NUM_CLASSES - 1}")
    return Images(pixels_NHW, labels_N)


def _find(folder: Path, name: str) -> Path:
    for file in (folder / name, folder / f"{name}.gz"):
        if file.exists():
            return file
    raise UserError(f"{folder}: there is no {name} or {name}.gz: put the four files of one data set there")
