"""Fragment plans: which elements of the model travel together. Torch-free, so that a sidecar can read them.

A plan names every tensor of a model and puts each element of each trainable parameter into exactly one of P
fragments. Buffers (floating) and counters (integer) ride along in lists of their own: they bypass codec,
merge rule and outer optimizer. Plans depend on names and shapes only, so every node computes the same one.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from typing import Any, Literal

from farflung.core.partition import PLANS as PLANS
from farflung.core.partition import Span, deal_whole
from farflung.errors import did_you_mean

Kind = Literal["param", "buffer", "counter"]
KINDS: tuple[Kind, ...] = ("param", "buffer", "counter")


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A named tensor of a model: shape, dtype (``"float32"``), kind, and whether it is an embedding table.

    >>> TensorSpec(name="w", shape=(4, 3), dtype="float32", kind="param").num_elements
    12
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind
    embedding: bool = False

    def __post_init__(self) -> None:
        _require(isinstance(self.name, str), f"tensor name = {self.name!r}: must be a string")
        of = f"tensor {self.name!r}"
        _require(all(map(_is_count, self.shape)), f"{of}: shape = {self.shape}: must be whole numbers >= 0")
        _require(isinstance(self.dtype, str), f"{of}: dtype = {self.dtype!r}: must be a string")
        _require(self.kind in KINDS, f"{of}: kind = {self.kind!r}: must be one of {', '.join(KINDS)}")
        _require(isinstance(self.embedding, bool), f"{of}: embedding = {self.embedding!r}: must be a bool")

    @property
    def num_elements(self) -> int:
        """Number of elements; 1 for a 0-dim tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Elements ``[start, start + length)`` of the flattened (C-order) tensor `name`.

    They lie at ``[offset, offset + length)`` of the fragment's vector.
    """

    name: str
    start: int
    length: int
    offset: int
    embedding: bool

    def __post_init__(self) -> None:
        counts = (self.start, self.length, self.offset)
        _require(isinstance(self.name, str), f"piece name = {self.name!r}: must be a string")
        _require(all(map(_is_count, counts)), f"piece of {self.name!r}: start, length, offset = {counts}")
        _require(self.length > 0, f"piece of {self.name!r}: length = 0, must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """What is synchronised together: parameter pieces, and the buffers and counters that ride along.

    The three lists are laid out in three vectors, in name order and without gaps.
    """

    index: int
    pieces: tuple[Piece, ...]
    buffers: tuple[Piece, ...]
    counters: tuple[Piece, ...]

    @property
    def num_elements(self) -> int:
        """Length of the parameter vector (fp32)."""
        return sum(piece.length for piece in self.pieces)

    @property
    def num_buffer_elements(self) -> int:
        """Length of the buffer vector (fp32)."""
        return sum(piece.length for piece in self.buffers)

    @property
    def num_counters(self) -> int:
        """Length of the counter vector (int64)."""
        return sum(piece.length for piece in self.counters)


@dataclass(frozen=True, kw_only=True)
class FragmentPlan:
    """All tensors of a model and the fragment of each element; checked when built, so it can be trusted.

    Every element of every tensor is in exactly one piece; empty tensors are named and in none. Every fragment
    has at least one parameter element.

    Raises:
        ValueError: the parts contradict each other; says which and how.
    """

    strategy: str
    tensors: tuple[TensorSpec, ...]
    fragments: tuple[Fragment, ...]

    def __post_init__(self) -> None:
        _require(isinstance(self.strategy, str), f"strategy = {self.strategy!r}: must be a string")
        _check_fragments(self.fragments)
        specs = {spec.name: spec for spec in self.tensors}
        repeated = [name for name, num in Counter(spec.name for spec in self.tensors).items() if num > 1]
        _require(not repeated, f"tensors: named more than once: {', '.join(repeated)}")
        for kind in KINDS:
            _check_cover(specs, kind, [p for f in self.fragments for p in _lists(f)[kind]])

    @property
    def num_fragments(self) -> int:
        """P, the number of fragments."""
        return len(self.fragments)

    def fingerprint(self) -> str:
        """Return the sha256 (hex) of names, shapes, dtypes, kinds, strategy and fragments.

        Tensors are sorted by name first. Members of one run agree on it.
        """
        record = asdict(self) | {"tensors": [asdict(s) for s in sorted(self.tensors, key=lambda s: s.name)]}
        return hashlib.sha256(_canonical_json(record).encode()).hexdigest()

    def to_json(self) -> str:
        """Return canonical JSON (sorted keys, no spaces); `from_json` gives back an equal plan."""
        return _canonical_json(asdict(self))

    @staticmethod
    def from_json(text: str) -> "FragmentPlan":
        """Read a plan written by `to_json`.

        Raises:
            ValueError: not JSON, a missing, unknown or ill-typed field, or parts that contradict each other.
        """
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"plan: not JSON ({error})") from error
        plan = _record(FragmentPlan, raw, "plan")
        return FragmentPlan(
            strategy=plan["strategy"],
            tensors=tuple(_read_tensor(item) for item in _array(plan["tensors"], "tensors")),
            fragments=tuple(_read_fragment(item) for item in _array(plan["fragments"], "fragments")),
        )


def make_plan(tensors: Sequence[TensorSpec], num_fragments: int, strategy: str = "balanced") -> FragmentPlan:
    """Put every element of every tensor into one of `num_fragments` fragments.

    Args:
        tensors: all tensors of the model, in model order.
        num_fragments: P, at least 1.
        strategy: a key of `PLANS`: ``"balanced"``, ``"by_layer"`` or ``"strided"``.

    Raises:
        ValueError: unknown strategy, or more fragments than the strategy can fill.

    >>> sizes = {"a": 4, "b": 3, "c": 2, "d": 1}
    >>> specs = [TensorSpec(name=n, shape=(k,), dtype="float32", kind="param") for n, k in sizes.items()]
    >>> [[piece.name for piece in fragment.pieces] for fragment in make_plan(specs, 2).fragments]
    [['a', 'd'], ['b', 'c']]
    """
    if strategy not in PLANS:
        raise ValueError(f"strategy = {strategy!r} is unknown{did_you_mean(strategy, PLANS)}")
    specs = {spec.name: spec for spec in tensors}
    shapes = {kind: {s.name: s.shape for s in tensors if s.kind == kind and s.num_elements} for kind in KINDS}
    pieces = PLANS[strategy](shapes["param"], num_fragments)
    buffers, counters = (deal_whole(shapes[kind], num_fragments) for kind in KINDS[1:])
    fragments = tuple(
        Fragment(index=i, pieces=_lay(p, specs), buffers=_lay(b, specs), counters=_lay(c, specs))
        for i, (p, b, c) in enumerate(zip(pieces, buffers, counters, strict=True))
    )
    return FragmentPlan(strategy=strategy, tensors=tuple(tensors), fragments=fragments)


def _lay(spans: Iterable[Span], specs: Mapping[str, TensorSpec]) -> tuple[Piece, ...]:
    """Lay spans out in name order; neighbours within one tensor become one piece."""
    joined: list[Span] = []
    for name, start, length in sorted(spans):
        if joined and joined[-1][0] == name and joined[-1][1] + joined[-1][2] == start:
            joined[-1] = (name, joined[-1][1], joined[-1][2] + length)
        else:
            joined.append((name, start, length))
    offsets = accumulate((length for _, _, length in joined), initial=0)
    return tuple(
        Piece(name=name, start=start, length=length, offset=offset, embedding=specs[name].embedding)
        for (name, start, length), offset in zip(joined, offsets, strict=False)
    )


# --- checks and JSON


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _lists(fragment: Fragment) -> dict[Kind, tuple[Piece, ...]]:
    return {"param": fragment.pieces, "buffer": fragment.buffers, "counter": fragment.counters}


def _check_fragments(fragments: Sequence[Fragment]) -> None:
    _require(len(fragments) > 0, "fragments: must be at least one")
    for index, fragment in enumerate(fragments):
        _require(fragment.index == index, f"fragments[{index}]: index = {fragment.index}")
        _require(len(fragment.pieces) > 0, f"fragments[{index}]: has no parameter element")
        for pieces in _lists(fragment).values():
            offset = 0
            for piece in pieces:
                where = f"fragments[{index}], piece of {piece.name!r}"
                _require(piece.offset == offset, f"{where}: offset = {piece.offset}, expected {offset}")
                offset += piece.length


def _check_cover(specs: dict[str, TensorSpec], kind: Kind, pieces: Iterable[Piece]) -> None:
    """Every element of every tensor of this kind lies in exactly one piece."""
    next_start = {spec.name: 0 for spec in specs.values() if spec.kind == kind}
    for piece in sorted(pieces, key=lambda piece: (piece.name, piece.start)):
        of = f"piece of {piece.name!r}"
        _require(piece.name in next_start, f"{of}: no {kind} has this name")
        expected, embedding = next_start[piece.name], specs[piece.name].embedding
        _require(piece.start == expected, f"{of}: start = {piece.start}, expected {expected}")
        _require(piece.embedding is embedding, f"{of}: embedding = {piece.embedding}, expected {embedding}")
        next_start[piece.name] += piece.length
    for name, end in next_start.items():
        num = specs[name].num_elements
        _require(end == num, f"tensor {name!r}: pieces cover {end} elements, it has {num}")


def _canonical_json(record: object) -> str:
    return json.dumps(record, sort_keys=True, separators=(",", ":"))


def _record(cls: type, raw: object, where: str) -> dict[str, Any]:
    names = {field.name for field in fields(cls)}
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: expected an object, got {type(raw).__name__}")
    _require(names <= raw.keys(), f"{where}: {sorted(names - raw.keys())} missing")
    _require(raw.keys() <= names, f"{where}: {sorted(raw.keys() - names)} unknown")
    return raw


def _array(raw: object, where: str) -> list[Any]:
    if not isinstance(raw, list):
        raise ValueError(f"{where}: expected an array, got {type(raw).__name__}")
    return raw


def _read_tensor(raw: object) -> TensorSpec:
    spec = _record(TensorSpec, raw, "tensor")
    return TensorSpec(**(spec | {"shape": tuple(_array(spec["shape"], "shape"))}))


def _read_fragment(raw: object) -> Fragment:
    record = _record(Fragment, raw, "fragment")
    lists = {
        name: tuple(Piece(**_record(Piece, item, "piece")) for item in _array(record[name], name))
        for name in ("pieces", "buffers", "counters")
    }
    return Fragment(index=record["index"], **lists)
