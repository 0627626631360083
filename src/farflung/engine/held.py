"""What a learner holds of one fragment: base, counters, method state, and its open contribution."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from farflung.core.fragments import Fragment
from farflung.methods.base import State

_SCALARS = ("round", "base_version", "steps", "tokens", "merged", "in_x")


@dataclass(kw_only=True)
class Outstanding:
    """A contribution from its snapshot until it is refused, or merged and adopted.

    `steps` and `tokens` are those of its window; `snapshot` is fp32 ``[N]``, kept where the method needs it.
    `in_x`: its work is still part of the live value, so that it must not be sent again once it is merged.
    """

    round: int
    base_version: int
    steps: int
    tokens: int
    pending: State
    snapshot: Tensor | None = None
    merged: bool = False
    in_x: bool = True


@dataclass(kw_only=True)
class Held:
    """One fragment at one learner.

    Attributes:
        fragment: what it is.
        base: fp32 ``[N]``, the bits last installed.
        version: their version; -1 before the first.
        state: method state.
        c_steps, c_tokens: trained since the base, less what was merged.
        last_round: newest round taken; older and equal ones are repeats.
    """

    fragment: Fragment
    base: Tensor
    state: State
    version: int = -1
    c_steps: int = 0
    c_tokens: int = 0
    last_round: int = -1
    out: Outstanding | None = None

    def count(self, tokens: int) -> None:
        """One more step."""
        self.c_steps += 1
        self.c_tokens += tokens

    def settle(self, state: State, merged: bool) -> None:
        """The fate of the open contribution is known; unless merged nothing of it remains."""
        assert self.out is not None
        self.state = state
        self.out.merged = merged
        if not (merged and self.out.in_x):
            self.out = None

    def restart(self, included: bool, carries: bool) -> None:
        """After an adoption: counters restart where the work that is still in the live value does."""
        if not carries:
            self.c_steps = self.c_tokens = 0
        elif included and self.out is not None:
            self.c_steps -= self.out.steps
            self.c_tokens -= self.out.tokens
        if self.out is not None:
            self.out.in_x = carries
            if included or (self.out.merged and not carries):
                self.out = None


@dataclass(frozen=True, kw_only=True)
class SavedIsland:
    """Everything of an island but the live parameters: `tensors` by name, `meta` as JSON-able builtins."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)


def save_held(held: list[Held], step: int) -> SavedIsland:
    """Describe all fragments; the tensors are references: write or clone them before the next boundary."""
    tensors: dict[str, Tensor] = {}
    fragments = []
    for index, one in enumerate(held):
        tensors[f"{index}.base"] = one.base
        tensors |= {f"{index}.state.{name}": values for name, values in one.state.items()}
        meta: dict[str, Any] = {
            name: getattr(one, name) for name in ("version", "c_steps", "c_tokens", "last_round")
        }
        meta["state"] = sorted(one.state)
        if one.out is not None:
            meta["out"] = {name: getattr(one.out, name) for name in _SCALARS}
            meta["out"]["pending"] = sorted(one.out.pending)
            tensors |= {f"{index}.pending.{name}": values for name, values in one.out.pending.items()}
            if one.out.snapshot is not None:
                tensors[f"{index}.snapshot"] = one.out.snapshot
        fragments.append(meta)
    return SavedIsland(tensors=tensors, meta={"step": step, "fragments": fragments})


def load_held(held: list[Held], saved: SavedIsland) -> int:
    """Put a saved description back, in place; return the step.

    Raises:
        ValueError: it belongs to another number of fragments, or a tensor is missing.
    """
    fragments = saved.meta["fragments"]
    if len(fragments) != len(held):
        raise ValueError(f"saved island: {len(fragments)} fragments, the plan has {len(held)}")
    for index, (one, meta) in enumerate(zip(held, fragments, strict=True)):
        one.base.copy_(_tensor(saved, f"{index}.base", one.base))
        one.state = {n: _tensor(saved, f"{index}.state.{n}", one.base) for n in meta["state"]}
        for name in ("version", "c_steps", "c_tokens", "last_round"):
            setattr(one, name, meta[name])
        one.out = _outstanding(saved, index, meta["out"], one.base) if "out" in meta else None
    return int(saved.meta["step"])


def _outstanding(saved: SavedIsland, index: int, meta: dict[str, Any], like: Tensor) -> Outstanding:
    pending = {name: _tensor(saved, f"{index}.pending.{name}", like) for name in meta["pending"]}
    name = f"{index}.snapshot"
    snapshot = _tensor(saved, name, like) if name in saved.tensors else None
    return Outstanding(**(meta | {"pending": pending}), snapshot=snapshot)


def _tensor(saved: SavedIsland, name: str, like: Tensor) -> Tensor:
    if name not in saved.tensors:
        raise ValueError(f"saved island: no tensor {name!r}")
    return torch.empty_like(saved.tensors[name], device=like.device).copy_(saved.tensors[name])
