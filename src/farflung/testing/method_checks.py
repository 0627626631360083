"""The contract of every method, as checks that need no test framework.

Each rule looks at a method's calls. A broken rule is a `Broken`, an AssertionError of one line: the rule, then
which function of which method broke it, and how.
"""

from typing import Any

import msgspec
import torch
from torch import Tensor

from farflung.methods import Method, from_policy
from farflung.methods.base import Local
from farflung.protocol.policy import Policy
from farflung.testing.method_calls import Call, Moves, N, answer, broken, calls_of
from farflung.testing.method_tensors import differing, same_bits, signature, tensors
from farflung.testing.method_topology_checks import GOSSIP, HUB

CUT = 16  # where a fragment is cut in two

ENGINE = ("local.x", "local.base", "local.snapshot", "result", "decoded")
"""Whose memory is the engine's, which reuses it."""


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
    own = GOSSIP if method.policy.topology == "gossip" else HUB
    for check in (*COMMON, *own, the_policy_says_everything):
        check(method)


def inputs_are_left_alone(method: Method) -> None:
    for call in calls_of(method):
        if names := differing(call.before, call.after):
            raise broken("functions never write to their inputs", method, f"{call} wrote to {names}")


def the_same_inputs_give_the_same_bits(method: Method) -> None:
    rule = "the same inputs give the same bits, also after a resume"
    for call, again in zip(calls_of(method), calls_of(method, resumed=True), strict=True):
        if names := differing(call.vectors, again.vectors):
            raise broken(rule, method, f"{call} returned another {names} the second time")


def everything_is_finite(method: Method) -> None:
    for call in calls_of(method):
        for name, vector in call.vectors.items():
            if vector.is_floating_point() and not torch.isfinite(vector).all():
                raise broken("finite inputs give finite results", method, f"{call}: {name} is not finite")


def the_engines_memory_is_not_kept(method: Method) -> None:
    owner: dict[int, str] = {}
    for call in calls_of(method):
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
    if signature(new_state) != signature(dict.fromkeys(outer.init(theta), theta)):
        how = f"outer.update returned {signature(new_state) or 'none'}"
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
    for call, other in zip(calls_of(method), calls_of(again), strict=False):
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


COMMON = (
    inputs_are_left_alone,
    the_same_inputs_give_the_same_bits,
    everything_is_finite,
    the_engines_memory_is_not_kept,
    the_codec_keeps_its_word,
    the_outer_step_is_elementwise,
)
