"""Sends a method through an engine's moves with one fragment; each call is kept with what went in and came out."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from farflung.methods import Method
from farflung.methods.base import Contribution, Local, State
from farflung.testing.method_tensors import signature, tensors
from farflung.testing.stubs import Broken

N = 40  # elements of the fragment

ARGUMENTS: dict[str, tuple[str, ...]] = {
    "init": ("num_elements",),
    "contribute": ("local",),
    "sent": ("contribution", "decoded"),
    "settle": ("state", "pending", "merged"),
    "adopt": ("local", "result", "included"),
}
GIVES: dict[str, tuple[type, str]] = {
    "init": (dict, "state"),
    "contribute": (Contribution, "contribution"),
    "sent": (dict, "pending"),
    "settle": (dict, "state"),
    "adopt": (Local, "local"),
}


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call: its arguments by name as they were (copies) and as they are after it, and what it gave."""

    function: str
    args: tuple[Any, ...]
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    gave: Any

    @property
    def vectors(self) -> dict[str, Tensor]:
        """Every tensor that it gave, by name."""
        return tensors(GIVES[self.function][1], self.gave)

    @property
    def state(self) -> State:
        """The method state that it gave, pending or not."""
        holder = {"contribute": "pending", "adopt": "state"}.get(self.function)
        state: State = getattr(self.gave, holder) if holder else self.gave
        return state

    def __str__(self) -> str:
        return label(self.function, self.args)


class Moves:
    """Calls a method's functions as an engine does, keeps the calls, and draws vectors for them.

    Args:
        method: whose functions.
        resumed: state is saved and loaded between any two calls.
    """

    def __init__(self, method: Method, resumed: bool = False) -> None:
        self.method, self.resumed = method, resumed
        self.calls: list[Call] = []
        self._gen = torch.Generator().manual_seed(0)

    def draw(self, size: int = N) -> Tensor:
        return torch.randn(size, generator=self._gen)

    def call(self, function: str, *args: Any) -> Any:
        """Call one function of the method; types, shapes and names of what it gives are right, else `Broken`."""
        before = {name: vector.clone() for name, vector in self._given(function, args).items()}
        gave = answer(self.method, label(function, args), lambda: getattr(self.method, function)(*args))
        call = Call(function=function, args=args, before=before, after=self._given(function, args), gave=gave)
        self.calls.append(call)
        _check_shapes(self.method, call)
        _check_state(self.method, call, self.calls[0])
        return _saved_and_loaded(gave) if self.resumed else gave

    def idle(self) -> Local:
        """A newborn learner that did nothing."""
        base = self.draw()
        return Local(x=base.clone(), base=base, state=self.call("init", N))

    def send(self, local: Local) -> tuple[Tensor, State]:
        """Snapshot, encode, tell the method what others decode: that, and the pending state."""
        contribution = self.call("contribute", local)
        codec, payload = self.method.codec, contribution.payload
        decoded = answer(self.method, "codec", lambda: codec.decode(codec.encode(payload), payload.numel()))
        if self.method.sent is None:
            return decoded, contribution.pending
        return decoded, self.call("sent", contribution, decoded)

    def _given(self, function: str, args: tuple[Any, ...]) -> dict[str, Tensor]:
        given = zip(ARGUMENTS[function], args, strict=True)
        return {name: vector for arg, value in given for name, vector in tensors(arg, value).items()}


def calls_of(method: Method, function: str | None = None, resumed: bool = False) -> list[Call]:
    """The calls of a few rounds, with every fate that a contribution can have; of one function, or of all."""
    walk = _gossip_moves if method.policy.topology == "gossip" else _hub_moves
    return [call for call in walk(Moves(method, resumed)) if function in (None, call.function)]


def _hub_moves(moves: Moves) -> list[Call]:
    """Contributions that are merged, refused, and overtaken by a version that came before their own."""
    state: State = moves.call("init", N)
    base = moves.draw()
    x = base.clone()
    for fate in ("merged", "overtaken", "refused", "merged"):
        x = x - moves.draw()
        _, pending = moves.send(Local(x=x, base=base, state=state))
        snapshot = x.clone() if moves.method.keeps_snapshot else None
        x = x - moves.draw()
        if fate == "overtaken":
            local = Local(x=x, base=base, state=state, snapshot=snapshot)
            local = moves.call("adopt", local, moves.draw(), False)
            x, base, state, snapshot = local.x - moves.draw(), local.base.clone(), local.state, local.snapshot
        merged = fate != "refused"
        state = moves.call("settle", state, pending, merged)
        local = Local(x=x, base=base, state=state, snapshot=snapshot if merged else None)
        local = moves.call("adopt", local, moves.draw(), merged)
        x, base, state = local.x.clone(), local.base.clone(), local.state
    return moves.calls


def _gossip_moves(moves: Moves) -> list[Call]:
    """Rounds with a partner, and one whose partner did not come; state moves on at their ends only."""
    state: State = moves.call("init", N)
    base = moves.draw()
    for came in (True, False, True):
        x = base + moves.draw()
        moves.send(Local(x=x, base=base, state=state))
        size = N * moves.method.num_vectors
        correction = 0.1 * moves.draw(size) if came else torch.zeros(size)
        local = Local(x=x + moves.draw(), base=base, state=state)
        local = moves.call("adopt", local, correction, came)
        base, state = local.base.clone(), local.state
    return moves.calls


def answer(method: Method, who: str, ask: Callable[[], Any]) -> Any:
    """What `ask` gives; an exception of it is a broken rule."""
    try:
        return ask()
    except Broken:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise broken("nothing raises on a healthy run", method, f"{who} raised {why}") from error


def label(function: str, args: tuple[Any, ...]) -> str:
    """The call as it is named in a line: ``adopt(included=True)``."""
    flags = zip(ARGUMENTS[function], args, strict=True)
    return f"{function}({', '.join(f'{name}={value}' for name, value in flags if isinstance(value, bool))})"


def broken(rule: str, method: Method, how: str) -> Broken:
    return Broken(rule, f"{method.policy.method}: {how}")


def _saved_and_loaded(gave: Any) -> Any:
    if isinstance(gave, Local):
        return replace(gave, state=_saved_and_loaded(gave.state))
    if isinstance(gave, Contribution):
        return replace(gave, pending=_saved_and_loaded(gave.pending))
    return {name: value.clone() for name, value in gave.items()}


def _check_shapes(method: Method, call: Call) -> None:
    kind, rule, gave = GIVES[call.function][0], "every function returns what base.py says", call.gave
    if not isinstance(gave, kind):
        raise broken(rule, method, f"{call} returned a {type(gave).__name__}, not a {kind.__name__}")
    for key, value in call.state.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            how = f"{call}: {key!r} is a {type(value).__name__}"
            raise broken("a state is a dict of tensors", method, how)
    sizes = {"contribute": {"payload": N * method.num_vectors}, "adopt": {"x": N, "base": N, "snapshot": N}}
    for name, size in sizes.get(call.function, {}).items():
        value = getattr(gave, name)
        if value is None and name == "snapshot":
            continue
        what = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        if what != f"torch.float32 [{size}]":
            raise broken(rule, method, f"{call} returned a {name} of {what}, not torch.float32 [{size}]")


def _check_state(method: Method, call: Call, born: Call) -> None:
    """Pending state may hold more, until `settle`."""
    now, wanted = signature(call.state), signature(born.state)
    if call.function in ("settle", "adopt") and now != wanted:
        how = f"{call} returned {now or 'no state'}, init gave {wanted or 'none'}"
        raise broken("state keeps the names and shapes of init", method, how)
