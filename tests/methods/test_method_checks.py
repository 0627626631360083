"""`check_method` bites: methods that break one rule each are refused with the line that names it."""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import torch
from torch import Tensor

import farflung.testing
from farflung.core.codecs.cast import FP32
from farflung.core.outer import Sgd, _update_in_new_memory
from farflung.methods import METHODS, Method, decoupled, diloco, dsgd, gasloc
from farflung.methods.base import Contribution, Local, mix, overwrite, rebase
from farflung.methods.gossip import settled
from farflung.testing import check_method

DOCS = Path(__file__).parents[2] / "docs" / "add-a-method.md"
BROKEN: dict[str, tuple[Method, str]] = {}
"""What is wrong -> the method, and the line that it gets."""


def case(method: Method, line: str) -> Callable[[Callable], Callable]:
    """Put a broken function, named after what is wrong, in the place of the method's own."""

    def register(broken: Callable) -> Callable:
        place, _, what = broken.__name__.partition("_")
        BROKEN[what] = (replace(method, **{place: broken}), line)
        return broken

    return register


def sum_of_work(**changes: Callable) -> Method:
    """DiLoCo with a state, so that the state can be broken."""

    def contribute(local: Local) -> Contribution:
        payload = local.base - local.x
        return Contribution(payload=payload, pending={"sum": local.state["sum"] + payload})

    made = replace(diloco(), init=lambda n: {"sum": torch.zeros(n)}, contribute=contribute)
    return replace(made, **changes)


@case(diloco(), "functions never write to their inputs: diloco: contribute() wrote to local.x")
def contribute_in_place(local: Local) -> Contribution:
    return Contribution(payload=local.x.sub_(local.base).neg_(), pending=local.state)


@case(
    sum_of_work(), "functions never write to their inputs: diloco: settle(merged=True) wrote to state['sum']"
)
def settle_into_the_old_state(state: dict, pending: dict, merged: bool) -> dict:
    return (state.update(pending) or state) if merged else state


@case(
    diloco(), "the same inputs give the same bits, also after a resume: diloco: contribute() returned another"
)
def contribute_by_chance(local: Local) -> Contribution:
    return Contribution(payload=local.base - local.x + 1e-6 * torch.rand(local.x.numel()), pending={})


@case(
    sum_of_work(), "no state holds a vector of the engine: diloco: contribute() kept local.x as state['sum']"
)
def contribute_and_keep_x(local: Local) -> Contribution:
    return Contribution(payload=local.base - local.x, pending={"sum": local.x})


@case(
    decoupled(adoption="rebase"), "a moved snapshot has memory of its own: decoupled: adopt(included=False)"
)
def adopt_with_x_as_snapshot(local: Local, result: Tensor, included: bool) -> Local:
    after = rebase(local, result, included)
    return after if after.snapshot is None else replace(after, snapshot=after.x)


@case(
    sum_of_work(),
    "names and shapes of init: diloco: settle(merged=True) returned no state, init gave sum [40] float32",
)
def settle_and_forget(state: dict, pending: dict, merged: bool) -> dict:
    return {}


@case(diloco(), "contribute() returned a payload of torch.float32 [20], not torch.float32 [40]")
def contribute_a_half(local: Local) -> Contribution:
    return Contribution(payload=(local.base - local.x)[:20], pending={})


@case(diloco(), "every function returns what base.py says: diloco: adopt(included=True) returned a Tensor")
def adopt_a_bare_vector(local: Local, result: Tensor, included: bool) -> Tensor:
    return result


@case(diloco(), "a state is a dict of tensors: diloco: contribute(): 'rounds' is a int")
def contribute_a_counter(local: Local) -> Contribution:
    return Contribution(payload=local.base - local.x, pending={"rounds": 1})


@case(diloco(), "finite inputs give finite results: diloco: contribute(): contribution.payload is not finite")
def contribute_a_logarithm(local: Local) -> Contribution:
    return Contribution(payload=(local.base - local.x).log(), pending={})


@case(diloco(), "nothing raises on a healthy run: diloco: adopt(included=True) raised KeyError: 'v'")
def adopt_a_state_that_is_not_there(local: Local, result: Tensor, included: bool) -> Local:
    return replace(overwrite(local, result, included), state={"v": local.state["v"]})


@case(sum_of_work(), "pending state counts if merged, else the old one: diloco: settle(merged=False)")
def settle_whatever_the_fate(state: dict, pending: dict, merged: bool) -> dict:
    return pending


@case(diloco(), "a first payload is base - x: diloco: contribute is off by up to")
def contribute_new_minus_old(local: Local) -> Contribution:
    return Contribution(payload=local.x - local.base, pending={})


@case(diloco(), "no training means no change: diloco: contribute sends something")
def contribute_from_nothing(local: Local) -> Contribution:
    return Contribution(payload=local.base - local.x + 1e-8, pending={})


@case(
    diloco(),
    "the base is what was installed: diloco: adopt(included=True) returned a base that is not the result",
)
def adopt_without_a_base(local: Local, result: Tensor, included: bool) -> Local:
    return replace(local, x=result, base=local.base, snapshot=None)


@case(diloco(), "diloco: adopt(included=True) kept it with adoption = 'overwrite'")
def adopt_more_than_the_policy_says(local: Local, result: Tensor, included: bool) -> Local:
    return mix(0.5)(local, result, included)


@case(decoupled(adoption="rebase"), "decoupled: adopt(included=True) adds merged work again, or loses some")
def adopt_merged_work_again(local: Local, result: Tensor, included: bool) -> Local:
    return replace(rebase(local, result, False), snapshot=None if included else local.snapshot)


@case(decoupled(adoption="rebase"), "adopt(included=False) did not move the snapshot into the new frame")
def adopt_and_leave_the_snapshot_where_it_was(local: Local, result: Tensor, included: bool) -> Local:
    return replace(rebase(local, result, included), snapshot=None if included else local.snapshot)


@case(gasloc(), "a round ends where the next begins: base = x: gasloc: adopt(included=True)")
def adopt_with_the_old_base(local: Local, correction: Tensor, included: bool) -> Local:
    return replace(settled(local, local.x - correction, **local.state), base=local.base)


@case(
    gasloc(),
    "only adopt changes the state: gasloc: contribute() returned another state['v'], which is dropped",
)
def contribute_and_count_on_a_fate(local: Local) -> Contribution:
    return Contribution(payload=local.x, pending={"v": local.x - local.base})


@case(dsgd(), "an exchange brings partners together: dsgd: adopt left them")
def adopt_the_wrong_way_round(local: Local, correction: Tensor, included: bool) -> Local:
    return settled(local, local.x + correction)


@case(dsgd(), "corrections that sum to zero move no mean: dsgd: adopt moved the mean of two partners")
def adopt_a_square(local: Local, correction: Tensor, included: bool) -> Local:
    return settled(local, local.x - correction.square())


@case(dsgd(), "no training means no change: dsgd: adopt(included=False) moves a learner that did nothing")
def adopt_with_decay(local: Local, correction: Tensor, included: bool) -> Local:
    return settled(local, 0.9 * local.x - correction)


@case(
    gasloc(momentum_on="local"),
    "no state holds a vector of the engine: gasloc: adopt(included=True) kept result as state['c']",
)
def adopt_and_keep_the_correction(local: Local, correction: Tensor, included: bool) -> Local:
    return settled(local, local.x - correction, v=local.state["v"], c=correction)


@dataclass(frozen=True)
class Optimist:
    """fp32, but it promises half the bytes."""

    name: str = "fp32"

    def size_bytes(self, num_elements: int) -> int:
        return 2 * num_elements

    def encode(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return FP32.encode(x, out)

    def decode(self, payload: Tensor, num_elements: int, out: Tensor | None = None) -> Tensor:
        return FP32.decode(payload, num_elements, out)


@dataclass(frozen=True)
class Clipped:
    """SGD with a norm over what it is given: a block, when the hub merges blockwise."""

    lr: float = 1.0

    def init(self, theta: Tensor) -> dict[str, Tensor]:
        return {}

    def update(self, delta: Tensor, theta: Tensor, state: dict) -> tuple[Tensor, dict[str, Tensor]]:
        return _update_in_new_memory(self, delta, theta, state)

    def update_into(self, delta: Tensor, theta: Tensor, state: dict, out: Tensor, out_state: dict) -> None:
        torch.sub(theta, delta / delta.norm().clamp(min=1.0), out=out)


BROKEN |= {
    "a codec that promises too little": (
        replace(diloco(), codec=Optimist()),
        "a payload is as long as the codec says: diloco: fp32 says 80 bytes, and gives 160 elements",
    ),
    "an outer step over the norm": (
        replace(diloco(), outer=Clipped()),
        "an outer step is the same in parts, and in place, as whole: diloco: outer.update_into gave another theta",
    ),
    "an outer rate that is not in the policy": (
        replace(diloco(), outer=Sgd(lr=0.5)),
        "a policy builds its method again: diloco: its outer step is another when built again",
    ),
    "a setting that is not in the policy": (
        sum_of_work(),
        "a policy builds its method again: diloco: init() returned another state['sum']",
    ),
    "a name that is not registered": (
        replace(diloco(), policy=msgspec.structs.replace(diloco().policy, method="mine")),
        "a policy builds its method again: mine: method = 'mine' is unknown",
    ),
    "half of a payload of two vectors": (
        replace(dsgd(), num_vectors=2),
        "dsgd: contribute() returned a payload of torch.float32 [40], not torch.float32 [80]",
    ),
    "a counter that a donor can't give": (
        replace(
            dsgd(),
            init=lambda n: {"rounds": torch.zeros((), dtype=torch.int64)},
            adopt=lambda local, c, included: settled(local, local.x - c, rounds=local.state["rounds"] + 1),
        ),
        "a donor gives fp32 vectors: dsgd: rounds is torch.int64 []",
    ),
    "own state that is not there": (
        replace(gasloc(), own_state=("c",)),
        "own_state names what init gives: gasloc: own_state names c; init gives v",
    ),
}


@pytest.mark.parametrize("what", sorted(BROKEN))
def test_a_broken_method_is_refused_with_the_line_that_says_why(what: str) -> None:
    method, line = BROKEN[what]
    with pytest.raises(AssertionError, match=re.escape(line)) as caught:
        check_method(method)
    assert len(str(caught.value).splitlines()) == 1


def test_the_worked_example_of_the_docs_keeps_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    file, _, check, *tests = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    feedback = ModuleType("farflung.methods.feedback")
    monkeypatch.setitem(sys.modules, feedback.__name__, feedback)
    exec(file, vars(feedback))
    monkeypatch.setitem(METHODS, "feedback", feedback.feedback)
    exec(check, {})
    for source in tests:
        exec(source, names := {})
        [run() for name, run in names.items() if name.startswith("test_")]
    assert (
        farflung.testing.World(feedback.feedback(sync_every_steps=4), step_s=[0.1, 0.1], budget_tokens=320)
        .run()
        .finished
        == "finished"
    )
