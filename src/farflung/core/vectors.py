"""Between a live model and flat fragment vectors: describe, gather, scatter."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from farflung.core.fragments import Kind, Piece, TensorSpec


def describe(model: nn.Module) -> list[TensorSpec]:
    """List the tensors of a model that take part in a run, in model order: parameters, then buffers.

    * Trainable parameters of any floating dtype, empty ones too; tied ones once, under their first name.
    * Frozen parameters (``requires_grad`` False) are excluded: they never change, so they never travel.
    * Persistent buffers: floating ones are of kind ``"buffer"`` (averaged), integer ones ``"counter"``
      (maximum). Excluded as local: non-persistent, bool (masks) and complex ones.
    * ``embedding`` marks a parameter that any `nn.Embedding` or `nn.EmbeddingBag` owns, also when tied.

    Raises:
        ValueError: a trainable parameter is complex or still lazy (has no shape yet).

    >>> [(spec.name, spec.shape, spec.kind) for spec in describe(nn.Linear(3, 2))]
    [('weight', (2, 3), 'param'), ('bias', (2,), 'param')]
    """
    tables = {
        id(param)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for param in module.parameters(recurse=False)
    }
    return [
        TensorSpec(
            name=name,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            kind=kind,
            embedding=id(tensor) in tables,
        )
        for name, tensor, kind in _members(model)
    ]


def live_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the live parameter or buffer for each name that `describe` lists (no copies)."""
    return {name: tensor for name, tensor, _ in _members(model)}


def gather(
    tensors: Mapping[str, Tensor],
    pieces: Sequence[Piece],
    out: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Copy pieces into one flat vector ``[n]``; never a view of a live tensor.

    Args:
        tensors: name -> tensor of any layout, dtype or device.
        pieces: one of a fragment's three lists.
        out: vector ``[n]`` to fill, whose dtype then counts. Default: a new one on the first piece's device.
        dtype: dtype of a new vector: fp32 (float64 parameters are rounded), ``torch.int64`` for counters.

    Raises:
        ValueError: a piece names no tensor or lies outside it, or `out` has another shape.

    >>> piece = Piece(name="w", start=1, length=2, offset=0, embedding=False)
    >>> gather({"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, [piece])
    tensor([2., 3.])
    """
    if out is None:
        device = _tensor_of(tensors, pieces[0]).device if pieces else None
        out = torch.empty(_length(pieces), dtype=dtype, device=device)
    _check_vector("out", out, pieces)
    if not pieces:
        return out
    with torch.no_grad():
        flats = [_flat(tensors, piece) for piece in pieces]
        if all(flat.device == out.device for flat in flats):
            torch.cat(flats, out=out)  # one call instead of one a piece
        else:
            for piece, flat in zip(pieces, flats, strict=True):
                out[piece.offset : piece.offset + piece.length].copy_(flat)
    return out


def scatter_(vector: Tensor, tensors: Mapping[str, Tensor], pieces: Sequence[Piece]) -> None:
    """Write a flat vector ``[n]`` into the live tensors in place, cast to their dtype (inverse of `gather`).

    Copies: the tensors keep their storage and layout and never alias the vector (unlike
    `torch.nn.utils.vector_to_parameters`). Everything is checked before the first write.

    Raises:
        ValueError: a piece names no tensor or lies outside it, or `vector` has another shape.

    >>> weight = torch.zeros(2, 2)
    >>> piece = Piece(name="w", start=2, length=1, offset=0, embedding=False)
    >>> scatter_(torch.tensor([5.0]), {"w": weight}, [piece])
    >>> weight
    tensor([[0., 0.],
            [5., 0.]])
    """
    _check_vector("vector", vector, pieces)
    targets = [_tensor_of(tensors, piece).detach() for piece in pieces]
    with torch.no_grad():
        for piece, target in zip(pieces, targets, strict=True):
            _write(vector[piece.offset : piece.offset + piece.length], target, piece.start)


def _write(values: Tensor, target: Tensor, start: int) -> None:
    if target.is_contiguous():
        target.view(-1)[start : start + len(values)].copy_(values)
    elif len(values) == target.numel():
        target.copy_(values.view(target.shape))
    else:  # part of a tensor that has no flat view: through a copy
        flat = target.reshape(-1)
        flat[start : start + len(values)].copy_(values)
        target.copy_(flat.view(target.shape))


def _members(model: nn.Module) -> Iterator[tuple[str, Tensor, Kind]]:
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        if is_lazy(param):
            raise ValueError(
                f"parameter {name!r} is lazy: run one forward pass first, so that it has a shape"
            )
        if not param.is_floating_point():
            raise ValueError(f"parameter {name!r}: dtype = {param.dtype}, must be a floating dtype")
        yield name, param, "param"
    local = _non_persistent(model)
    for name, buffer in model.named_buffers():
        if name in local or buffer.dtype is torch.bool or buffer.is_complex():
            continue
        yield name, buffer, "buffer" if buffer.is_floating_point() else "counter"


def _non_persistent(model: nn.Module) -> set[str]:
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }


def _flat(tensors: Mapping[str, Tensor], piece: Piece) -> Tensor:
    """The elements of a piece, ``[length]``; a view where the tensor's layout has one."""
    return _tensor_of(tensors, piece).detach().reshape(-1)[piece.start : piece.start + piece.length]


def _length(pieces: Sequence[Piece]) -> int:
    return sum(piece.length for piece in pieces)


def _check_vector(name: str, vector: Tensor, pieces: Sequence[Piece]) -> None:
    if tuple(vector.shape) != (_length(pieces),):
        raise ValueError(f"{name}: shape = {tuple(vector.shape)}, the pieces need ({_length(pieces)},)")


def _tensor_of(tensors: Mapping[str, Tensor], piece: Piece) -> Tensor:
    if piece.name not in tensors:
        raise ValueError(f"piece of {piece.name!r}: there is no such tensor")
    tensor = tensors[piece.name]
    if piece.start + piece.length > tensor.numel():
        end = piece.start + piece.length
        raise ValueError(f"piece of {piece.name!r}: ends at {end}, the tensor has {tensor.numel()} elements")
    return tensor
