"""One contract for every method, and the published settings of each."""

import msgspec
import pytest
import torch
from torch import Tensor

from farflung.core.merge import Segment, merge_and_step
from farflung.methods import METHODS, Method, decoupled, diloco, from_policy, make_method, streaming
from farflung.methods.base import Local
from farflung.protocol.policy import Policy

N = 40


def methods() -> dict[str, Method]:
    made = {name: build() for name, build in METHODS.items()}
    return made | {
        "decoupled, rebase": decoupled(adoption="rebase"),
        "decoupled, mix": decoupled(adoption="mix"),
    }


@pytest.fixture(params=sorted(methods()))
def method(request: pytest.FixtureRequest) -> Method:
    return methods()[request.param]


def local(method: Method, zero_delta: bool = False) -> Local:
    gen = torch.Generator().manual_seed(0)
    base, move, later = (torch.randn(N, generator=gen) for _ in range(3))
    x = base.clone() if zero_delta else base - move
    snapshot = (x if zero_delta else x + later) if method.keeps_snapshot else None
    return Local(x=x, base=base, state=method.init(N), snapshot=snapshot)


def everything(local: Local) -> list[Tensor]:
    snapshot = [] if local.snapshot is None else [local.snapshot]
    return [local.x, local.base, *local.state.values(), *snapshot]


def test_functions_are_deterministic_and_leave_their_inputs_alone(method: Method) -> None:
    mine, twin = local(method), local(method)
    result, same = torch.linspace(-1, 1, N), torch.linspace(-1, 1, N)
    for included in (True, False):
        first, second = method.contribute(mine), method.contribute(twin)
        assert torch.equal(first.payload, second.payload)
        states = [method.settle(me.state, c.pending, included) for me, c in ((mine, first), (twin, second))]
        assert states[0].keys() == states[1].keys() == method.init(N).keys()
        one, other = method.adopt(mine, result, included), method.adopt(twin, same, included)
        assert all(map(torch.equal, everything(one), everything(other)))
    assert all(map(torch.equal, everything(mine), everything(local(method))))
    assert torch.equal(result, torch.linspace(-1, 1, N))


def test_no_training_means_no_change(method: Method) -> None:
    mine = local(method, zero_delta=True)
    payload = method.contribute(mine).payload
    codec = method.codec
    decoded = codec.decode(codec.encode(payload), N)
    assert not payload.any()
    assert not decoded.any()
    state = method.outer.init(mine.base)
    new, new_state = torch.empty(N), {name: torch.empty_like(t) for name, t in state.items()}
    whole = [Segment(start=0, stop=N, rule="rda")]
    merge_and_step(mine.base, [decoded, decoded], [0.5, 0.5], whole, method.outer, state, new, new_state)
    assert torch.equal(new, mine.base)
    for included in (True, False):
        assert torch.equal(method.adopt(mine, new, included).x, mine.x)


def test_a_step_against_the_payload_repeats_the_work(method: Method) -> None:
    mine = local(method)
    torch.testing.assert_close(mine.base - method.contribute(mine).payload, mine.x)


def test_the_base_after_an_adoption_is_the_result(method: Method) -> None:
    result = torch.linspace(-1, 1, N)
    for included in (True, False):
        assert torch.equal(method.adopt(local(method), result, included).base, result)


def test_a_policy_builds_its_method_again(method: Method) -> None:
    policy = msgspec.json.decode(msgspec.json.encode(method.policy), type=Policy)
    assert from_policy(policy).policy == method.policy
    assert from_policy(policy).outer == method.outer


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_field_can_be_set_and_an_unknown_one_is_answered_with_the_closest(name: str) -> None:
    assert make_method(name, outer_lr=0.25, sync_every_steps=64, lease_s=3).policy.lease_s == 3
    with pytest.raises(ValueError, match=r"has no option 'outer_rl' \(did you mean 'outer_lr'\?\)"):
        make_method(name, outer_rl=0.25)
    with pytest.raises(ValueError, match="has no option 'method'"):
        METHODS[name](method="diloco")
    with pytest.raises(ValueError, match="sync_every_steps"):
        make_method(name, sync_every_steps="often")


@pytest.mark.parametrize(
    "field", ["codec", "outer", "merge", "merge_embedding", "weighting", "fragment_plan"]
)
def test_a_name_that_does_not_exist_is_refused_when_the_method_is_built(field: str) -> None:
    with pytest.raises(ValueError, match="nonsense"):
        decoupled(**{field: "nonsense"})


def test_an_unknown_method_is_answered_with_the_closest() -> None:
    with pytest.raises(ValueError, match=r"'decopled' is unknown \(did you mean 'decoupled'\?\)"):
        make_method("decopled")
    with pytest.raises(ValueError, match="known: decoupled, diloco, streaming"):
        make_method("zzz")


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="mix_alpha"):
        streaming(adoption="overwrite")
    with pytest.raises(ValueError, match=r"momentum = 0\.9 has no effect"):
        diloco(outer="sgd")
    with pytest.raises(ValueError, match="includes a contribution whose snapshot was not kept"):
        decoupled(adoption="rebase").adopt(
            Local(x=torch.ones(1), base=torch.ones(1), state={}), torch.ones(1), True
        )


def test_the_published_settings() -> None:
    p = diloco().policy
    assert (p.pace, p.num_fragments, p.sync_every_steps, p.overlap_steps, p.quorum) == (
        "lockstep",
        1,
        500,
        0,
        "all",
    )
    assert (p.outer_lr, p.outer_momentum, p.merge, p.weighting) == (0.7, 0.9, "avg", "equal")
    p = streaming().policy
    assert (p.pace, p.fragment_plan, p.codec, p.outer_lr, p.mix_alpha) == (
        "lockstep",
        "strided",
        "int4",
        0.4,
        0.5,
    )
    p = decoupled().policy
    assert (p.pace, p.num_fragments, p.sync_every_steps, p.overlap_steps, p.quorum) == ("free", 24, 24, 2, 1)
    assert (p.merge, p.merge_embedding, p.weighting, p.anchor) == ("rda", "avg", "tokens", "present")
    assert (p.adoption, p.carries_tokens, p.grace_gamma > 0) == ("overwrite", False, True)
