"""A learner's own method state as tensors: described for its disk, and put back after a crash.

Of a contribution without a fate both states are kept, the one without it and the one with it. So keeping once,
before the contribution goes out, is enough for a round: the hub knows which of the two holds.
"""

from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from farflung.engine.held import Held
from farflung.methods import Method
from farflung.methods.base import State
from farflung.protocol.own_state import DAMAGED, OwnFragment, OwnState


@dataclass(frozen=True, kw_only=True)
class Own:
    """Numbers and digests, and the tensors ``P.state.NAME`` and ``P.pending.NAME`` that they are of."""

    about: OwnState
    tensors: dict[str, Tensor]


def own_names(method: Method) -> tuple[str, ...]:
    """Names of state that is a learner's own: with a hub all, in gossip what no donor gives."""
    if method.policy.topology == "gossip":
        return tuple(sorted(method.own_state))
    return tuple(sorted(method.init(0)))


def digest_of(tensors: State) -> str:
    """xxh3-128 over the bytes of all, in the order of their names; of nothing, that of no bytes."""
    hashed = xxhash.xxh3_128()
    for name in sorted(tensors):
        hashed.update(tensors[name].detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def own_digests(held: list[Held], names: tuple[str, ...]) -> list[str]:
    """One digest a fragment, of the state as it is."""
    return [digest_of(_chosen(one.state, names)) for one in held]


def describe_own(held: list[Held], names: tuple[str, ...]) -> tuple[list[OwnFragment], dict[str, Tensor]]:
    """All fragments; the tensors are references: write or clone them before the next boundary."""
    fragments: list[OwnFragment] = []
    tensors: dict[str, Tensor] = {}
    for p, one in enumerate(held):
        state = _chosen(one.state, names)
        tensors |= {f"{p}.state.{name}": t for name, t in state.items()}
        if one.out is None or one.out.merged:
            fragments.append(OwnFragment(digest=digest_of(state)))
            continue
        pending = _chosen(one.out.pending, names)
        tensors |= {f"{p}.pending.{name}": t for name, t in pending.items()}
        fragments.append(
            OwnFragment(digest=digest_of(state), round=one.out.round, pending=digest_of(pending))
        )
    return fragments, tensors


def take_own(held: list[Held], names: tuple[str, ...], own: Own, merged: list[bool]) -> None:
    """Put back what was kept (copied): of each fragment the state with or without its last contribution."""
    for p, (one, sent) in enumerate(zip(held, merged, strict=True)):
        kind = "pending" if sent else "state"
        for name in names:
            one.state[name] = own.tensors[f"{p}.{kind}.{name}"].to(one.base.device, copy=True)


def checked(own: Own, method: Method, num_elements: list[int]) -> Own:
    """What was read from a disk; or that it is damaged: other bits than its digests say, or of another shape."""
    sizes = [method.init(n) for n in num_elements]
    names = own_names(method)
    good = len(own.about.fragments) == len(sizes) and all(
        _fits(own.tensors, p, "state", names, fresh, one.digest)
        and (one.round is None or _fits(own.tensors, p, "pending", names, fresh, one.pending))
        for p, (one, fresh) in enumerate(zip(own.about.fragments, sizes, strict=True))
    )
    return own if good else Own(about=OwnState(problem=DAMAGED), tensors={})


def _fits(
    tensors: dict[str, Tensor], p: int, kind: str, names: tuple[str, ...], fresh: State, digest: str
) -> bool:
    found = {name: tensors.get(f"{p}.{kind}.{name}") for name in names}
    whole: State = {name: t for name, t in found.items() if t is not None and t.shape == fresh[name].shape}
    return len(whole) == len(names) and digest_of(whole) == digest


def _chosen(state: State, names: tuple[str, ...]) -> State:
    return {name: state[name] for name in names}
