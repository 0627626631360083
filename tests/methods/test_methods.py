"""One contract for every method, and the published settings of each."""

import pytest
import torch

from farflung.methods import METHODS, Method, decoupled, diloco, gasloc, make_method, streaming
from farflung.methods.base import Local
from farflung.testing import check_method

MADE: dict[str, Method] = {name: build() for name, build in METHODS.items()} | {
    "decoupled, rebase": decoupled(adoption="rebase"),
    "decoupled, mix": decoupled(adoption="mix", mix_alpha=0.25),
    "decoupled, mix of nothing": decoupled(adoption="mix"),
    "streaming, 1 bit": streaming(codec="1bit"),
    "gasloc, local": gasloc(momentum_on="local", overlap_steps=2),
}


@pytest.mark.parametrize("name", sorted(MADE))
def test_a_method_keeps_the_contract(name: str) -> None:
    check_method(MADE[name])


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_field_can_be_set_and_an_unknown_one_is_answered_with_the_closest(name: str) -> None:
    assert make_method(name, sync_every_steps=64, lease_s=3).policy.lease_s == 3
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
    with pytest.raises(ValueError, match=f"known: {', '.join(sorted(METHODS))}"):
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
