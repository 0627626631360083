"""How a flat vector is cut into chunks: one after another, or along the tensors it holds.

A group is a run of chunks of one size. Its elements are read as a matrix of ``y h`` rows and ``x w`` columns,
which ``y x`` chunks of h rows and w columns tile. Legend: n chunks of h x w elements, B = h w.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.core.codecs.base import STRIP
from farflung.core.codecs.dct import SIDE, dct, idct
from farflung.core.fragments import Piece, TensorSpec


@dataclass(frozen=True, kw_only=True)
class Group:
    """Chunks of one size; ``stop - start`` may be smaller than they are: the rest is zeros.

    Attributes:
        start, stop: elements of the vector.
        y, x: chunks below one another, and side by side.
        h, w: rows and columns of a chunk.
        k: coefficients of each chunk that travel; B: all of them.
        dct: whether coefficients are those of a DCT, or the elements.
    """

    start: int
    stop: int
    y: int = 1
    x: int = 1
    h: int
    w: int
    k: int
    dct: bool = False

    @property
    def num(self) -> int:
        """Number of chunks, K."""
        return self.y * self.x

    @property
    def size(self) -> int:
        """Coefficients of a chunk, B."""
        return self.h * self.w

    @property
    def is_plain(self) -> bool:
        """Every element travels as it is."""
        return self.k == self.size and not self.dct and self.num * self.size == self.stop - self.start

    def coefficients(self, vector: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Strip by strip: which chunks, and their coefficients ``[n, B]``, valid until the next strip."""
        chunks = self._chunks(self._whole(vector))
        memory = self._memory(vector, 2)
        for at, ys, xs in self._strips():
            part = chunks[ys, xs].reshape(-1, self.h, self.w).contiguous()  # a copy only along tensors
            yield at, (dct(part, *memory[:, : len(part)]) if self.dct else part).view(-1, self.size)

    def restored(self, vector: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Strip by strip: which chunks, and zeros ``[n, B]`` to put their coefficients into.

        Each strip of the vector is written when the next one is asked for: take them all.
        """
        padded = self.num * self.size != self.stop - self.start
        whole = vector.new_empty(self.num * self.size) if padded else vector[self.start : self.stop]
        chunks = self._chunks(whole)
        memory = self._memory(vector, 3)
        for at, ys, xs in self._strips():
            part, *rooms = memory[:, : at.stop - at.start]
            yield at, part.zero_().view(-1, self.size)
            chunks[ys, xs] = (idct(part, *rooms) if self.dct else part).view(chunks[ys, xs].shape)
        if padded:
            vector[self.start : self.stop] = whole[: self.stop - self.start]

    def _whole(self, vector: Tensor) -> Tensor:
        part = vector[self.start : self.stop]
        missing = self.num * self.size - part.numel()
        return torch.nn.functional.pad(part, (0, missing)) if missing else part

    def _chunks(self, whole: Tensor) -> Tensor:
        """A view ``[y, x, h, w]`` of the group's elements."""
        return whole.view(self.y, self.h, self.x, self.w).transpose(1, 2)

    def _memory(self, like: Tensor, rooms: int) -> Tensor:
        """Room for as many strips, ``[rooms, n, h, w]``, reused from strip to strip."""
        return like.new_empty(rooms, min(self.num, max(1, STRIP // self.size)), self.h, self.w)

    def _strips(self) -> Iterator[tuple[slice, slice, slice]]:
        """Number of the chunks, their y and their x; about `STRIP` elements, in the order of the chunks."""
        most = max(1, STRIP // self.size)
        tall, wide = max(1, most // self.x), min(self.x, most)
        for y in range(0, self.y, tall):
            for x in range(0, self.x, wide):
                ys, xs = slice(y, min(y + tall, self.y)), slice(x, min(x + wide, self.x))
                first = y * self.x + x
                yield slice(first, first + (ys.stop - y) * (xs.stop - x)), ys, xs


def flat_groups(
    num_elements: int, chunk: int, dct: bool, rows: bool, k_of: Callable[[int], int]
) -> list[Group]:
    """Chunks of ``chunk`` elements one after another, and the rest of the vector as a smaller one.

    With a DCT or ``rows`` the rest is padded with zeros to whole rows of `SIDE`, not to a whole chunk: the same
    k then covers more of it. A rest that travels whole is not transformed.

    Args:
        k_of: number of elements -> how many of them travel.
    """
    k, whole = k_of(chunk), num_elements // chunk * chunk
    if k == chunk and not dct:
        return (
            [Group(start=0, stop=num_elements, h=1, w=num_elements, k=num_elements)] if num_elements else []
        )
    groups, rest = [], num_elements - whole
    if whole:
        h, w = max(1, chunk // SIDE), min(chunk, SIDE)
        groups.append(Group(start=0, stop=whole, y=whole // chunk, h=h, w=w, k=k, dct=dct))
    if rest:
        k = k_of(rest)
        h, w = (-(-rest // SIDE), SIDE) if (dct or rows) and rest > SIDE and k < rest else (1, rest)
        groups.append(Group(start=whole, stop=num_elements, h=h, w=w, k=k, dct=dct and k < rest))
    return groups


def tensor_groups(shapes: Sequence[Sequence[int]], dct: bool, k_of: Callable[[int], int]) -> list[Group]:
    """One group for each tensor that is not empty, in chunks by `tensor_chunks`."""
    groups, start = [], 0
    for shape in shapes:
        stop = start + math.prod(shape)
        if stop > start:
            y, x, h, w = tensor_chunks(shape)
            groups.append(Group(start=start, stop=stop, y=y, x=x, h=h, w=w, k=k_of(h * w), dct=dct))
        start = stop
    return groups


def tensor_chunks(shape: Sequence[int]) -> tuple[int, int, int, int]:
    """``(y, x, h, w)`` of a tensor by the authors' rule: more than two dimensions are ``(first, the rest)``.

    A side is cut by its largest divisor up to `SIDE`, so a prime side longer than that is cut into ones; a
    vector is one row. (arXiv 2510.03371's code, DeMo, SparseLoCo.)

    >>> tensor_chunks((50257, 768)), tensor_chunks((128,)), tensor_chunks((8, 3, 3, 3))
    ((1733, 12, 29, 64), (1, 2, 1, 64), (1, 1, 8, 27))
    """
    rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
    h, w = _largest_divisor(rows), _largest_divisor(columns)
    return rows // h, columns // w, h, w


def piece_shapes(pieces: Sequence[Piece], tensors: Sequence[TensorSpec]) -> tuple[tuple[int, ...], ...]:
    """Shapes of the tensors, or of their parts, that follow one another in a fragment's vector.

    A piece of whole rows keeps the tensor's other sides; another part of a tensor is a vector.

    Raises:
        ValueError: a piece of a tensor that is not listed.

    >>> weight = TensorSpec(name="w", shape=(4, 3), dtype="float32", kind="param")
    >>> piece_shapes([Piece(name="w", start=3, length=6, offset=0, embedding=False)], [weight])
    ((2, 3),)
    """
    shapes = {spec.name: spec.shape for spec in tensors}
    missing = sorted({piece.name for piece in pieces} - shapes.keys())
    if missing:
        raise ValueError(f"pieces of unknown tensors: {', '.join(missing)}")
    return tuple(_piece_shape(piece, shapes[piece.name]) for piece in pieces)


def _piece_shape(piece: Piece, shape: tuple[int, ...]) -> tuple[int, ...]:
    row = math.prod(shape[1:])
    if len(shape) > 1 and piece.start % row == 0 and piece.length % row == 0:
        return (piece.length // row, *shape[1:])
    return (piece.length,)


def _largest_divisor(side: int) -> int:
    return next(divisor for divisor in range(min(side, SIDE), 0, -1) if side % divisor == 0)
