"""How tensors are dealt to fragments: the strategies, and the number partitioning beneath. Torch-free.

A strategy sees names and shapes only (non-empty tensors, in model order) and returns P lists of spans
``(name, start, length)`` over flattened tensors. New strategy: one function, one line in `PLANS`.
"""

import heapq
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain, groupby

Shapes = Mapping[str, tuple[int, ...]]
Span = tuple[str, int, int]
Strategy = Callable[[Shapes, int], list[list[Span]]]


def balanced(shapes: Shapes, num_fragments: int) -> list[list[Span]]:
    """Greedy number partitioning (Decoupled DiLoCo): size descending, ties by name, lightest bin first.

    Tensors stay whole where that works. One larger than total/P is split by rows (dim 0) into pieces of at
    most ``ceil(total / P)`` elements. The greedy rule promises 4/3 of the best partition, not of total/P (it
    gives nearly 2 for P + 1 equal tensors); so where the largest fragment exceeds 4/3 of total/P, tensors are
    split at 1/2, then at 1/3 of that size, which suffices unless single rows are larger. The paper keeps
    tensors whole and does not say what it does with large ones. Independent of model order.
    """
    _check_num_fragments("balanced", num_fragments, sum(map(_num_rows, shapes.values())))
    total = sum(map(math.prod, shapes.values()))
    best: list[list[Span]] = []
    for parts in (1, 2, 3):
        bins = _deal(_split(shapes, math.ceil(total / (parts * num_fragments))), num_fragments)
        if all(bins) and (not best or _largest(bins) < _largest(best)):
            best = bins
        if best and 3 * num_fragments * _largest(best) <= 4 * total:
            break
    # Nothing yet: P is so close to the number of rows that some fragment stays empty; deal single rows.
    return best or _deal(_split(shapes, 1), num_fragments)


def by_layer(shapes: Shapes, num_fragments: int) -> list[list[Span]]:
    """Contiguous runs of whole tensors in model order, the largest run as small as can be."""
    _check_num_fragments("by_layer", num_fragments, len(shapes))
    runs = even_runs([math.prod(shape) for shape in shapes.values()], num_fragments)
    return _collect(_wholes(shapes), runs, num_fragments)


def strided(shapes: Shapes, num_fragments: int) -> list[list[Span]]:
    """Layers dealt round-robin (Streaming DiLoCo, arXiv 2501.18512): fragment p gets layers p, p + P, ...

    A layer is a run of tensors that share a block prefix, the name up to its first number (``blocks.3.``);
    tensors outside blocks form layers of their own by the first part of their name (``embed``).
    """
    layers = [list(run) for _, run in groupby(_wholes(shapes), key=lambda span: _layer_of(span[0]))]
    _check_num_fragments("strided", num_fragments, len(layers))
    return [list(chain.from_iterable(layers[p::num_fragments])) for p in range(num_fragments)]


PLANS: dict[str, Strategy] = {"balanced": balanced, "by_layer": by_layer, "strided": strided}


def deal_whole(shapes: Shapes, num_fragments: int) -> list[list[Span]]:
    """Deal whole tensors, balanced by size; fragments may stay empty (buffers and counters).

    >>> deal_whole({"a": (2,), "b": (3,)}, 3)
    [[('b', 0, 3)], [('a', 0, 2)], []]
    """
    return _deal(sorted(_wholes(shapes)), num_fragments)


def lightest_bins(sizes: Sequence[int], num_bins: int) -> list[int]:
    """Return the bin of each item: largest first, each into the lightest bin (greedy number partitioning).

    Ties between items go to the earlier one, ties between bins to the lower index. The heaviest bin is at
    most ``4/3 - 1/(3 num_bins)`` of the best possible (Graham 1969), and at most the mean plus one item.

    >>> lightest_bins([3, 1, 4, 2], 2)
    [1, 0, 0, 1]
    """
    heap = [(0, index) for index in range(num_bins)]
    bins = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, index = heap[0]
        bins[item] = index
        heapq.heapreplace(heap, (load + sizes[item], index))
    return bins


def even_runs(sizes: Sequence[int], num_runs: int) -> list[int]:
    """Return the run of each item: `num_runs` non-empty contiguous runs whose largest sum is least.

    Exact (binary search on the capacity). Needs ``1 <= num_runs <= len(sizes)``.

    >>> even_runs([1, 2, 3, 4], 2)
    [0, 0, 0, 1]
    """
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if _fill(sizes, num_runs, middle)[-1] < num_runs:
            high = middle
        else:
            low = middle + 1
    return _fill(sizes, num_runs, low)


def row_spans(num_rows: int, row_size: int, limit: int) -> list[tuple[int, int]]:
    """Return ``(start, length)`` in elements of runs of whole rows, each of at most `limit` elements.

    A row longer than `limit` stays whole, alone in its span.

    >>> row_spans(5, 2, limit=4)
    [(0, 4), (4, 4), (8, 2)]
    """
    rows = max(1, limit // row_size)
    lengths = [min(rows, num_rows - row) * row_size for row in range(0, num_rows, rows)]
    return list(zip(accumulate(lengths, initial=0), lengths, strict=False))


def _fill(sizes: Sequence[int], num_runs: int, capacity: int) -> list[int]:
    """Fill runs up to `capacity`; once only as many items as runs are left, each gets a run of its own."""
    runs: list[int] = []
    run, load = 0, 0
    for item, size in enumerate(sizes):
        items_left, new_runs_left = len(sizes) - item, num_runs - 1 - run
        if item > 0 and (load + size > capacity or items_left <= new_runs_left):
            run, load = run + 1, 0
        load += size
        runs.append(run)
    return runs


def _check_num_fragments(strategy: str, num_fragments: int, largest: int) -> None:
    if not largest:
        raise ValueError(f"num_fragments = {num_fragments}: the model has no trainable element")
    if not 1 <= num_fragments <= largest:
        raise ValueError(
            f"num_fragments = {num_fragments}: {strategy!r} can fill 1 to {largest} for this model"
        )


def _layer_of(name: str) -> str:
    block = re.match(r"(.*?\.)?\d+\.", name)
    return block[0] if block else name.split(".", 1)[0]


def _num_rows(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 1


def _wholes(shapes: Shapes) -> list[Span]:
    return [(name, 0, math.prod(shape)) for name, shape in shapes.items()]


def _split(shapes: Shapes, limit: int) -> list[Span]:
    spans: list[Span] = []
    for name, shape in sorted(shapes.items()):
        size, num_rows = math.prod(shape), _num_rows(shape)
        cuts = row_spans(num_rows, size // num_rows, limit) if size > limit else [(0, size)]
        spans += [(name, start, length) for start, length in cuts]
    return spans


def _deal(spans: Sequence[Span], num_fragments: int) -> list[list[Span]]:
    return _collect(spans, lightest_bins([length for _, _, length in spans], num_fragments), num_fragments)


def _collect(spans: Iterable[Span], bins: Iterable[int], num_bins: int) -> list[list[Span]]:
    out: list[list[Span]] = [[] for _ in range(num_bins)]
    for span, index in zip(spans, bins, strict=True):
        out[index].append(span)
    return out


def _largest(bins: Iterable[Iterable[Span]]) -> int:
    return max(sum(length for _, _, length in spans) for spans in bins)
