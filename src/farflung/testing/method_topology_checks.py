"""The rules of the contract that differ by topology: of a hub's methods, and of gossip methods."""

from dataclasses import replace

import torch

from farflung.methods import Method
from farflung.methods.base import Local, State
from farflung.testing.method_calls import Moves, N, broken, calls_of
from farflung.testing.method_tensors import close, differing, tensors

# ---- a hub's methods -----------------------------------------------------------------------------------


def a_fate_commits_or_rolls_back(method: Method) -> None:
    for call in calls_of(method, "settle"):
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
    moves, rule = Moves(method), "no training means no change"
    idle = moves.idle()
    decoded, pending = moves.send(idle)
    if moves.calls[1].gave.payload.any() or decoded.any():
        raise broken(rule, method, "contribute sends something for a learner that did nothing")
    result, _ = method.outer.update(decoded, idle.base, method.outer.init(idle.base))
    for merged in (True, False):
        settled = moves.call("settle", idle.state, pending, merged)
        snapshot = idle.base.clone() if method.keeps_snapshot else None
        after = moves.call("adopt", replace(idle, state=settled, snapshot=snapshot), result, merged)
        if not close(after.x, idle.base):
            raise broken(rule, method, f"{moves.calls[-1]} moves a learner when nobody did anything")


def the_base_is_what_was_installed(method: Method) -> None:
    """A version becomes the base. Where the outer step publishes increments, the learner's own point does."""
    theta = Moves(method).draw()
    still, _ = method.outer.update(torch.zeros(N), theta, method.outer.init(theta))
    for call in calls_of(method, "adopt"):
        wanted, what = (call.args[1], "the result") if close(still, theta) else (call.gave.x, "its own x")
        if not torch.equal(call.gave.base, wanted):
            how = f"{call} returned a base that is not {what}"
            raise broken("the base is what was installed", method, how)


def own_work_goes_on_if_the_policy_says_so(method: Method) -> None:
    """The ledger books it so."""
    carries, adoption = method.policy.carries_tokens, method.policy.adoption
    for call in calls_of(method, "adopt"):
        if torch.equal(call.gave.x, call.gave.base) == carries:
            rule = "own work goes on after an adoption, or not, as the policy says"
            how = f"{call} {'dropped' if carries else 'kept'} it with adoption = {adoption!r}"
            raise broken(rule, method, how)


def a_rebase_adds_no_work_twice_and_loses_none(method: Method) -> None:
    rule = "rebase goes on with exactly what is not in the result"
    for call in calls_of(method, "adopt") if method.policy.adoption == "rebase" else ():
        (local, _, included), after = call.args, call.gave
        origin = local.snapshot if included else local.base
        if origin is None or not close(after.x - after.base, local.x - origin):
            raise broken(rule, method, f"{call} adds merged work again, or loses some")
        if local.snapshot is not None and not included:  # still under way: it moves along
            moved = after.snapshot
            if moved is None or not close(moved - after.base, local.snapshot - local.base):
                raise broken(rule, method, f"{call} did not move the snapshot into the new frame")


HUB = (
    a_fate_commits_or_rolls_back,
    a_step_against_the_first_payload_repeats_the_work,
    no_training_changes_nothing,
    the_base_is_what_was_installed,
    own_work_goes_on_if_the_policy_says_so,
    a_rebase_adds_no_work_twice_and_loses_none,
)


# ---- gossip methods ------------------------------------------------------------------------------------


def a_round_ends_at_its_next_beginning(method: Method) -> None:
    for call in calls_of(method, "adopt"):
        if not torch.equal(call.gave.x, call.gave.base):
            raise broken("a round ends where the next begins: base = x", method, f"{call}: they differ")


def no_drift_and_no_partner_change_nothing(method: Method) -> None:
    moves = Moves(method)
    idle = moves.idle()
    for included in (False, True):
        after = moves.call("adopt", idle, torch.zeros(N * method.num_vectors), included)
        if not close(after.x, idle.base):
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
    return bool(moves.call("contribute", moves.idle()).payload.any())


def an_offer_changes_no_state(method: Method) -> None:
    rule = "gossip has no fates: only adopt changes the state"
    if method.sent is not None:
        raise broken(rule, method, "sent would never be called")
    for call in calls_of(method, "contribute"):
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


GOSSIP = (
    a_round_ends_at_its_next_beginning,
    no_drift_and_no_partner_change_nothing,
    partners_come_closer_and_keep_their_mean,
    an_offer_changes_no_state,
    a_joiner_can_take_the_state_over,
)
