"""Inner-optimizer state as bytes: keyed by parameter name, no pickle, equal states give equal bytes.

Layout: a safetensors file with one tensor per entry, called ``parameter/key``
(``blocks.0.mlp.up.weight/exp_avg``), and one metadata string ``farflung``, JSON with sorted keys: groups,
scalar entries and the caller's extras.
"""

import json
from typing import Any, NamedTuple

import safetensors.torch
import torch
import xxhash
from torch import Tensor, nn

from farflung.errors import UserError

FORMAT = 1
_META_KEY = "farflung"
_LENGTH_BYTES = 8  # a safetensors file starts with the length of its JSON header
_HOW_NOT_WHAT = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
_SCALARS = (bool, int, float, str, type(None))

Extra = dict[str, int | float | str]


class PackedState(NamedTuple):
    """Tensors by ``parameter/key``, and the rest as JSON."""

    tensors: dict[str, Tensor]
    meta: str


def pack_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, extra: Extra | None = None
) -> PackedState:
    """Describe an optimizer's state by parameter names; works before its first step too.

    The tensors are references, not copies: write them out, or clone them, before the optimizer steps again.
    Settings that say how to compute and not what (``fused``, ``foreach``, ...) are left out, so that they may
    differ between machines. ``extra`` travels along: counters, the data cursor.

    Raises:
        UserError: a parameter that ``model`` does not name, or an entry that is neither tensor nor scalar.
    """
    names = _names(model, optimizer)
    tensors: dict[str, Tensor] = {}
    entries: dict[str, dict[str, Any]] = {}
    for p, state in optimizer.state.items():
        if not state:  # reading a missing entry creates an empty one: both mean the same
            continue
        name = names[p]
        entries[name] = {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{key}"] = value.detach()
                entries[name][key] = {"tensor": f"{name}/{key}"}
            else:
                entries[name][key] = {"scalar": _scalar(value, f"{name}/{key}")}
    meta = {
        "format": FORMAT,
        "optimizer": type(optimizer).__name__,
        "groups": [
            {
                "params": _members(group, names),
                "settings": {k: _setting(v, k) for k, v in group.items() if k not in _HOW_NOT_WHAT},
            }
            for group in optimizer.param_groups
        ],
        "state": entries,
        "extra": extra or {},
    }
    return PackedState(dict(sorted(tensors.items())), json.dumps(meta, sort_keys=True, separators=(",", ":")))


def unpack_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, packed: PackedState) -> Extra:
    """Put a packed state into ``optimizer``, in place of what it held, and return the extras.

    Tensors are copied, bits unchanged. Nothing is changed unless everything fits.

    Raises:
        UserError: another optimizer class, other groups, or a tensor that is missing.
    """
    meta = json.loads(packed.meta)
    names = _names(model, optimizer)
    _check_fits(meta, optimizer, names)
    params = {name: p for p, name in names.items()}
    group_of = {names[p]: group for group in optimizer.param_groups for p in group["params"]}
    restored = {
        params[name]: {
            key: _value(entry, packed.tensors, params[name], key, group_of[name])
            for key, entry in state.items()
        }
        for name, state in meta["state"].items()
    }
    optimizer.state.clear()
    optimizer.state.update(restored)
    for group, saved in zip(optimizer.param_groups, meta["groups"], strict=True):
        for key, value in saved["settings"].items():
            _set_setting(group, key, value)
    extra: Extra = meta["extra"]
    return extra


def state_bytes(packed: PackedState) -> bytes:
    """Write a packed state as safetensors bytes; equal states give equal bytes."""
    tensors = {name: tensor.cpu().contiguous() for name, tensor in packed.tensors.items()}
    return safetensors.torch.save(tensors, metadata={_META_KEY: packed.meta})


def load_state_bytes(data: bytes) -> PackedState:
    """Read what ``state_bytes`` wrote; UserError if it is anything else."""
    try:
        tensors = safetensors.torch.load(data)
        header_end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
        meta = json.loads(data[_LENGTH_BYTES:header_end])["__metadata__"][_META_KEY]
        version = json.loads(meta)["format"]
    except Exception as error:
        raise UserError(f"not a packed optimizer state ({len(data)} bytes): {error!r}") from error
    if version != FORMAT:
        raise UserError(
            f"packed optimizer state has format {version}, this version reads {FORMAT}: update one side"
        )
    return PackedState(dict(sorted(tensors.items())), meta)


def digest(data: bytes) -> str:
    """Return the xxh3 128-bit hash of some bytes, 32 hex digits.

    >>> digest(b"")
    '99aa06d3014798d86001c324468d497f'
    """
    return xxhash.xxh3_128_hexdigest(data)


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    named = {p: name for name, p in model.named_parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    strangers = sum(p not in named for p in held)
    if strangers:
        raise UserError(
            f"the optimizer holds {strangers} parameters that are not the model's: build it from this model"
        )
    return {p: named[p] for p in held}


def _members(group: dict[str, Any], names: dict[Tensor, str]) -> list[list[Any]]:
    """Sorted [name, shape] of a group's parameters."""
    return sorted([names[p], list(p.shape)] for p in group["params"])


def _check_fits(meta: dict[str, Any], optimizer: torch.optim.Optimizer, names: dict[Tensor, str]) -> None:
    ours = type(optimizer).__name__
    if meta["optimizer"] != ours:
        raise UserError(f"the state is of {meta['optimizer']}, the optimizer is {ours}: use the same class")
    groups = [_members(group, names) for group in optimizer.param_groups]
    if groups != [group["params"] for group in meta["groups"]] or not set(meta["state"]) <= set(
        names.values()
    ):
        raise UserError(
            "the state's parameter groups (names, shapes) differ from the optimizer's: "
            "build model and optimizer in the same way on both sides"
        )


def _value(
    entry: dict[str, Any], tensors: dict[str, Tensor], p: Tensor, key: str, group: dict[str, Any]
) -> Any:
    if "scalar" in entry:
        return entry["scalar"]
    if entry["tensor"] not in tensors:
        raise UserError(f"the state lacks the tensor {entry['tensor']!r}: it is incomplete")
    on_host = key == "step" and not (
        group.get("fused") or group.get("capturable")
    )  # where PyTorch keeps counts
    return tensors[entry["tensor"]].detach().to("cpu" if on_host else p.device, copy=True)


def _scalar(value: Any, where: str) -> Any:
    if not isinstance(value, _SCALARS):
        raise UserError(
            f"optimizer state {where} is a {type(value).__name__}: only tensors and scalars can travel"
        )
    return value


def _setting(value: Any, key: str) -> Any:
    """A group's setting as JSON: learning rates may be tensors, betas are tuples."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, tuple | list):
        return [_setting(v, key) for v in value]
    return _scalar(value, f"param_groups/{key}")


def _set_setting(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group.get(key), Tensor):
        group[key].fill_(value)
    else:
        group[key] = tuple(value) if isinstance(value, list) else value
