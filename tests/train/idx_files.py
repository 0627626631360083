"""IDX files as tests write them, and a data set of ten classes that is learnt in a few steps."""

import gzip
from pathlib import Path

import numpy as np

NAMES = {
    "images": "train-images-idx3-ubyte",
    "labels": "train-labels-idx1-ubyte",
    "held-out images": "t10k-images-idx3-ubyte",
    "held-out labels": "t10k-labels-idx1-ubyte",
}


def idx(values: np.ndarray) -> bytes:
    """The bytes of an IDX file, written after the format's own description."""
    header = b"\0\0\x08" + bytes([values.ndim])
    return (
        header + b"".join(side.to_bytes(4, "big") for side in values.shape) + values.astype(">u1").tobytes()
    )


def write_images(folder: Path, num_train: int = 240, num_held_out: int = 60, side: int = 16) -> str:
    """A folder with the four files, two of them compressed; classes are patterns under noise. Returns its path."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 256, (10, side, side))
    for part, num in (("", num_train), ("held-out ", num_held_out)):
        labels = rng.permutation(np.arange(num) % 10)
        noisy = patterns[labels] * 0.7 + rng.integers(0, 77, (num, side, side))
        (folder / NAMES[f"{part}images"]).write_bytes(idx(noisy))
        (folder / f"{NAMES[f'{part}labels']}.gz").write_bytes(gzip.compress(idx(labels)))
    return str(folder)
