"""The contract of every method, as checks that need no test framework.

A method is sent through the engine's moves with one fragment; each call is kept with what went in and what came
out, and each rule looks at the calls. A broken rule is a `Broken`, an AssertionError of one line: the rule, then
which function of which method broke it, and how. Rules of topology "hub" and "gossip" differ: see `checks_of`.

Legend: N elements of the fragment, V vectors of N elements in a payload (1 but for some gossip methods).
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from farflung.methods import Method, from_policy
from farflung.methods.base import Contribution, Local, State
from farflung.protocol.policy import Policy
from farflung.testing.stubs import Broken

N = 40
CUT = 16  # where a fragment is cut in two

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
ENGINE = ("local.x", "local.base", "local.snapshot", "result", "decoded")
"""Whose memory is the engine's, which reuses it."""

Check = Callable[[Method], None]


def check_method(method: Method) -> None:
    """Check every rule of the contract in `farflung.methods.base`, the plainest explanation first.

    Args:
        method: of any topology. Its name must be in `farflung.methods.METHODS`, as a run builds methods again
            from their policies.

    Raises:
        AssertionError: one line: the rule that is broken, and by what.

    >>> from dataclasses import replace
    >>> from farflung.methods import diloco
    >>> check_method(diloco())
    >>> try:
    ...     check_method(replace(diloco(), adopt=lambda local, result, included: local))
    ... except AssertionError as error:
    ...     print(error)
    the base is what was installed: diloco: adopt(included=True) returned a base that is not the result
    """
    for check in checks_of(method):
        check(method)


def checks_of(method: Method) -> tuple[Check, ...]:
    """The checks of a method's topology; each can be called alone."""
    own = GOSSIP if method.policy.topology == "gossip" else HUB
    return (*COMMON, *own, the_policy_says_everything)


# ---- the engine's moves ----------------------------------------------------------------------------------


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

    def send(self, local: Local) -> tuple[Tensor, State]:
        """Snapshot, encode, tell the method what others decode: that, and the pending state."""
        contribution = self.call("contribute", local)
        codec, payload = self.method.codec, contribution.payload
        decoded = answer(self.method, "codec", lambda: codec.decode(codec.encode(payload), payload.numel()))
        if self.method.sent is None:
            return decoded, contribution.pending
        return decoded, self.call("sent", contribution, decoded)

    def _given(self, function: str, args: tuple[Any, ...]) -> dict[str, Tensor]:
        parts = [tensors(name, value) for name, value in zip(ARGUMENTS[function], args, strict=True)]
        return {name: vector for part in parts for name, vector in part.items()}


def moves_of(method: Method, resumed: bool = False) -> list[Call]:
    """The calls of a few rounds, with every fate that a contribution can have."""
    walk = _gossip_moves if method.policy.topology == "gossip" else _hub_moves
    return walk(Moves(method, resumed))


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
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise broken("nothing raises on a healthy run", method, f"{who} raised {why}") from error


def label(function: str, args: tuple[Any, ...]) -> str:
    """The call as it is named in a line: ``adopt(included=True)``."""
    flags = zip(ARGUMENTS[function], args, strict=True)
    return f"{function}({', '.join(f'{name}={value}' for name, value in flags if isinstance(value, bool))})"


def tensors(name: str, value: Any) -> dict[str, Tensor]:
    """Every tensor in an argument or a return value, with a name that finds it: ``local.state['m']``."""
    if isinstance(value, Tensor):
        return {name: value}
    parts: dict[str, Any] = {}
    if isinstance(value, dict):
        parts = {f"{name}[{key!r}]": part for key, part in value.items()}
    elif isinstance(value, Local | Contribution):
        parts = {f"{name}.{field.name}": getattr(value, field.name) for field in fields(value)}
    return {found: vector for part, inner in parts.items() for found, vector in tensors(part, inner).items()}


def broken(rule: str, method: Method, how: str) -> Broken:
    return Broken(rule, f"{method.policy.method}: {how}")


def same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    flat = (t.detach().reshape(-1).contiguous().view(torch.uint8) for t in (one, other))
    return torch.equal(*flat)


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> str:
    """Names whose bits are not the same, or that only one of both has."""
    both = one.keys() & other.keys()
    changed = {name for name in both if not same_bits(one[name], other[name])}
    return ", ".join(sorted(changed | (one.keys() ^ other.keys())))


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
    now, wanted = _signature(call.state), _signature(born.state)
    if call.function in ("settle", "adopt") and now != wanted:
        how = f"{call} returned {now or 'no state'}, init gave {wanted or 'none'}"
        raise broken("state keeps the names and shapes of init", method, how)


def _signature(state: State) -> str:
    sizes = [f"{name} {list(t.shape)} {str(t.dtype)[6:]}" for name, t in sorted(state.items())]
    return ", ".join(sizes)


# ---- the rules of all methods ----------------------------------------------------------------------------


def inputs_are_left_alone(method: Method) -> None:
    for call in moves_of(method):
        if names := differing(call.before, call.after):
            raise broken("functions never write to their inputs", method, f"{call} wrote to {names}")


def the_same_inputs_give_the_same_bits(method: Method) -> None:
    rule = "the same inputs give the same bits, also after a resume"
    for call, again in zip(moves_of(method), moves_of(method, resumed=True), strict=True):
        if names := differing(call.vectors, again.vectors):
            raise broken(rule, method, f"{call} returned another {names} the second time")


def everything_is_finite(method: Method) -> None:
    for call in moves_of(method):
        for name, vector in call.vectors.items():
            if vector.is_floating_point() and not torch.isfinite(vector).all():
                raise broken("finite inputs give finite results", method, f"{call}: {name} is not finite")


def the_engines_memory_is_not_kept(method: Method) -> None:
    owner: dict[int, str] = {}
    calls = moves_of(method)
    for call in calls:
        owner |= {v.untyped_storage().data_ptr(): n for n, v in call.after.items() if n in ENGINE}
        for name, vector in tensors("state", call.state).items():
            if vector.numel() and (whose := owner.get(vector.untyped_storage().data_ptr())):
                how = f"{call} kept {whose} as {name}; keep a clone"
                raise broken("no state holds a vector of the engine", method, how)
        _check_snapshot(method, call)


def _check_snapshot(method: Method, call: Call) -> None:
    if not isinstance(call.gave, Local) or call.gave.snapshot is None:
        return
    others = {name: call.after[name] for name in ("local.x", "local.base", "result")}
    others |= {"its own x": call.gave.x, "its own base": call.gave.base}
    mine = call.gave.snapshot.untyped_storage().data_ptr()
    for name in (n for n, other in others.items() if other.untyped_storage().data_ptr() == mine):
        raise broken("a moved snapshot has memory of its own", method, f"{call}: it shares that of {name}")


def the_codec_keeps_its_word(method: Method) -> None:
    answer(method, "codec", lambda: _check_codec(method))


def _check_codec(method: Method) -> None:
    codec, rule, size = method.codec, "a payload is as long as the codec says", N * method.num_vectors
    values = Moves(method).draw(size)
    payload = codec.encode(before := values.clone())
    said = codec.size_bytes(size)
    if payload.dtype != torch.uint8 or payload.numel() != said:
        got = f"{payload.numel()} elements of {payload.dtype}"
        raise broken(rule, method, f"{codec.name} says {said} bytes, and gives {got}")
    slot = torch.zeros(said + 1, dtype=torch.uint8)[1:]  # payloads lie at any address
    codec.encode(values, out=slot)
    decoded, out = codec.decode(payload, size), torch.empty(size)
    codec.decode(slot, size, out=out)
    if not (same_bits(slot, payload) and same_bits(out, decoded) and same_bits(values, before)):
        raise broken("a codec gives the same bits into any memory", method, codec.name)
    if codec.decode(codec.encode(torch.zeros(size)), size).any():
        raise broken("a codec sends zeros as zeros", method, codec.name)
    values[CUT] = torch.nan
    if torch.isfinite(codec.decode(codec.encode(values), size)).all():
        raise broken("a codec never hides a NaN", method, codec.name)


def the_outer_step_is_elementwise(method: Method) -> None:
    answer(method, "outer", lambda: _check_outer(method))


def _check_outer(method: Method) -> None:
    outer, moves = method.outer, Moves(method)
    theta, delta = moves.draw(), moves.draw()
    _, state = outer.update(moves.draw(), theta, outer.init(theta))
    given = {"theta": theta, "delta": delta, **tensors("state", state)}
    before = {name: vector.clone() for name, vector in given.items()}
    new, new_state = outer.update(delta, theta, state)
    if names := differing(before, given):
        raise broken("functions never write to their inputs", method, f"outer.update wrote to {names}")
    if _signature(new_state) != _signature(dict.fromkeys(outer.init(theta), theta)):
        how = f"outer.update returned {_signature(new_state) or 'none'}"
        raise broken("outer state keeps its names, each fp32 [N]", method, how)
    parts, parts_state = torch.empty(N), {name: vector.clone() for name, vector in state.items()}
    for part in (slice(0, CUT), slice(CUT, N)):
        own = {name: vector[part] for name, vector in parts_state.items()}
        outer.update_into(delta[part], theta[part], own, parts[part], own)
    whole = {"theta": new, **tensors("state", new_state)}
    if names := differing(whole, {"theta": parts, **tensors("state", parts_state)}):
        rule = "an outer step is the same in parts, and in place, as whole"
        raise broken(rule, method, f"outer.update_into gave another {names}")


def the_policy_says_everything(method: Method) -> None:
    rule = "a policy builds its method again"
    policy = msgspec.json.decode(msgspec.json.encode(method.policy), type=Policy)
    try:
        again = from_policy(policy)
    except ValueError as error:
        raise broken(rule, method, f"{error}; is it in farflung.methods.METHODS?") from error
    for field, mine in _data(method).items():
        if mine != (theirs := _data(again)[field]):
            raise broken(rule, method, f"{field} is {mine!r}, and {theirs!r} when built again")
    if not all(map(same_bits, *(_outer_steps(one) for one in (method, again)))):
        raise broken(rule, method, "its outer step is another when built again")
    for call, other in zip(moves_of(method), moves_of(again), strict=False):
        if names := differing(call.vectors, other.vectors):
            raise broken(rule, method, f"{call} returned another {names}: a setting is not in the policy")


def _data(method: Method) -> dict[str, Any]:
    fields = ("policy", "keeps_snapshot", "num_vectors", "own_state")
    return {field: getattr(method, field) for field in fields} | {"codec": method.codec.name}


def _outer_steps(method: Method) -> list[Tensor]:
    moves, outer = Moves(method), method.outer
    theta = moves.draw()
    one, state = outer.update(moves.draw(), theta, outer.init(theta))
    return [one, outer.update(moves.draw(), one, state)[0]]


# ---- the rules of a hub's methods ------------------------------------------------------------------------


def a_fate_commits_or_rolls_back(method: Method) -> None:
    for call in moves_of(method):
        if call.function == "settle":
            state, pending, merged = call.args
            kept = pending if merged else state
            if names := differing(tensors("state", kept), tensors("state", call.gave)):
                how = f"{call} returned another {names} than {'pending' if merged else 'the old state'}"
                raise broken("pending state counts if merged, else the old one", method, how)


def a_step_against_the_first_payload_repeats_the_work(method: Method) -> None:
    moves = Moves(method)
    local = Local(x=moves.draw(), base=moves.draw(), state=moves.call("init", N))
    payload = moves.call("contribute", local).payload
    if not close(local.base - payload, local.x):
        off = float((local.base - payload - local.x).abs().max())
        raise broken("a first payload is base - x", method, f"contribute is off by up to {off:.3g}")


def no_training_changes_nothing(method: Method) -> None:
    moves = Moves(method)
    base, state = moves.draw(), moves.call("init", N)
    idle, rule = Local(x=base.clone(), base=base, state=state), "no training means no change"
    decoded, pending = moves.send(idle)
    if moves.calls[1].gave.payload.any() or decoded.any():
        raise broken(rule, method, "contribute sends something for a learner that did nothing")
    result, _ = method.outer.update(decoded, base, method.outer.init(base))
    for merged in (True, False):
        settled = moves.call("settle", state, pending, merged)
        snapshot = base.clone() if method.keeps_snapshot else None
        after = moves.call("adopt", replace(idle, state=settled, snapshot=snapshot), result, merged)
        if not close(after.x, base):
            raise broken(rule, method, f"{moves.calls[-1]} moves a learner when nobody did anything")


def the_base_is_what_was_installed(method: Method) -> None:
    """A version becomes the base. Where the outer step publishes increments, the learner's own point does."""
    theta = Moves(method).draw()
    still, _ = method.outer.update(torch.zeros(N), theta, method.outer.init(theta))
    for call in moves_of(method):
        if call.function == "adopt":
            wanted, what = (call.args[1], "the result") if close(still, theta) else (call.gave.x, "its own x")
            if not torch.equal(call.gave.base, wanted):
                how = f"{call} returned a base that is not {what}"
                raise broken("the base is what was installed", method, how)


def own_work_goes_on_if_the_policy_says_so(method: Method) -> None:
    """The ledger books it so."""
    carries, adoption = method.policy.carries_tokens, method.policy.adoption
    for call in moves_of(method):
        if call.function == "adopt" and torch.equal(call.gave.x, call.gave.base) == carries:
            rule = "own work goes on after an adoption, or not, as the policy says"
            how = f"{call} {'dropped' if carries else 'kept'} it with adoption = {adoption!r}"
            raise broken(rule, method, how)


def a_rebase_adds_no_work_twice_and_loses_none(method: Method) -> None:
    rule = "rebase goes on with exactly what is not in the result"
    for call in moves_of(method) if method.policy.adoption == "rebase" else ():
        if call.function != "adopt":
            continue
        (local, _, included), after = call.args, call.gave
        origin = local.snapshot if included else local.base
        if origin is None or not close(after.x - after.base, local.x - origin):
            raise broken(rule, method, f"{call} adds merged work again, or loses some")
        if local.snapshot is not None and not included:  # still under way: it moves along
            moved = after.snapshot
            if moved is None or not close(moved - after.base, local.snapshot - local.base):
                raise broken(rule, method, f"{call} did not move the snapshot into the new frame")


# ---- the rules of gossip methods -------------------------------------------------------------------------


def a_round_ends_at_its_next_beginning(method: Method) -> None:
    for call in moves_of(method):
        if call.function == "adopt" and not torch.equal(call.gave.x, call.gave.base):
            raise broken("a round ends where the next begins: base = x", method, f"{call}: they differ")


def no_drift_and_no_partner_change_nothing(method: Method) -> None:
    moves = Moves(method)
    base, state = moves.draw(), moves.call("init", N)
    idle = Local(x=base.clone(), base=base, state=state)
    for included in (False, True):
        after = moves.call("adopt", idle, torch.zeros(N * method.num_vectors), included)
        if not close(after.x, base):
            how = f"{moves.calls[-1]} moves a learner that did nothing, with a correction of zero"
            raise broken("no training means no change", method, how)


def partners_come_closer_and_keep_their_mean(method: Method) -> None:
    """Corrections sum to zero, so they move no mean; and exact averaging of a pair spreads nobody."""
    moves, num = Moves(method), N * method.num_vectors
    bases = [moves.draw() for _ in range(2)]
    pair = [Local(x=b + 0.01 * moves.draw(), base=b, state=moves.call("init", N)) for b in bases]
    offers = [moves.send(local)[0] for local in pair]
    half = (offers[0] - offers[1]) / 2
    alone = [moves.call("adopt", local, torch.zeros(num), False).x for local in pair]
    mixed = [moves.call("adopt", local, c, True).x for local, c in zip(pair, (half, -half), strict=True)]
    if not close(alone[0] + alone[1], mixed[0] + mixed[1]):
        how = "adopt moved the mean of two partners"
        raise broken("corrections that sum to zero move no mean", method, how)
    before, after = (float(torch.dist(*xs)) for xs in (alone, mixed))
    if after >= before and _offers_its_point(method):
        how = f"adopt left them {after:.3g} apart, and {before:.3g} without the exchange"
        raise broken("an exchange brings partners together", method, how)


def _offers_its_point(method: Method) -> bool:
    """Whether a learner that did nothing offers something. Shared momentum alone brings no points together."""
    moves = Moves(method)
    base = moves.draw()
    idle = Local(x=base.clone(), base=base, state=moves.call("init", N))
    return bool(moves.call("contribute", idle).payload.any())


def an_offer_changes_no_state(method: Method) -> None:
    rule = "gossip has no fates: only adopt changes the state"
    if method.sent is not None:
        raise broken(rule, method, "sent would never be called")
    for call in moves_of(method):
        if call.function == "contribute":
            state = tensors("state", call.args[0].state)
            if names := differing(state, tensors("state", call.state)):
                raise broken(rule, method, f"contribute() returned another {names}, which is dropped")


def a_joiner_can_take_the_state_over(method: Method) -> None:
    """What is not its own comes from a donor, as fp32 vectors."""
    born: State = Moves(method).call("init", N)
    if unknown := sorted(set(method.own_state) - born.keys()):
        how = f"own_state names {', '.join(unknown)}; init gives {', '.join(sorted(born)) or 'nothing'}"
        raise broken("own_state names what init gives", method, how)
    for name, value in born.items():
        if name not in method.own_state and (value.dtype != torch.float32 or value.dim() != 1):
            how = f"{name} is {value.dtype} {list(value.shape)}"
            raise broken("a donor gives fp32 vectors", method, how)


COMMON: tuple[Check, ...] = (
    inputs_are_left_alone,
    the_same_inputs_give_the_same_bits,
    everything_is_finite,
    the_engines_memory_is_not_kept,
    the_codec_keeps_its_word,
    the_outer_step_is_elementwise,
)
HUB: tuple[Check, ...] = (
    a_fate_commits_or_rolls_back,
    a_step_against_the_first_payload_repeats_the_work,
    no_training_changes_nothing,
    the_base_is_what_was_installed,
    own_work_goes_on_if_the_policy_says_so,
    a_rebase_adds_no_work_twice_and_loses_none,
)
GOSSIP: tuple[Check, ...] = (
    a_round_ends_at_its_next_beginning,
    no_drift_and_no_partner_change_nothing,
    partners_come_closer_and_keep_their_mean,
    an_offer_changes_no_state,
    a_joiner_can_take_the_state_over,
)
