"""The built-in model: sizes, seeds, causality."""

import pytest
import torch

from farflung.errors import UserError
from farflung.train.gpt import GPT, SCALES, GPTConfig, scale_config


@pytest.mark.parametrize(
    ("scale", "millions"), [("micro", 0.035), ("tiny", 0.12), ("small", 0.84), ("medium", 3.25)]
)
def test_each_scale_has_its_stated_number_of_parameters(scale, millions):
    num_parameters = sum(p.numel() for p in GPT(SCALES[scale]).parameters())
    assert num_parameters == pytest.approx(millions * 1e6, rel=0.05)


def test_same_seed_gives_the_same_bits_and_another_seed_does_not():
    first, again, other = (GPT(SCALES["micro"], seed=s).state_dict() for s in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["blocks.0.attn.qkv.weight"], other["blocks.0.attn.qkv.weight"])


def test_building_a_model_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    GPT(SCALES["micro"], seed=3)
    assert torch.equal(before, torch.get_rng_state())


def test_a_position_sees_no_later_token():
    model = GPT(SCALES["micro"])
    tokens = torch.arange(16)[None] % 256
    changed = tokens.clone()
    changed[0, 9:] = 200
    with torch.no_grad():
        a, b = model(tokens), model(changed)
    assert a.shape == (1, 16, 256)
    torch.testing.assert_close(a[:, :9], b[:, :9])
    assert not torch.allclose(a[:, 9], b[:, 9])


def test_residual_maps_start_smaller_and_norms_at_one():
    model = GPT(SCALES["tiny"])
    block = model.blocks[0]
    assert block.attn.qkv.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert block.mlp.proj.weight.std().item() == pytest.approx(0.01, rel=0.1)
    assert torch.equal(block.attn_norm.weight, torch.ones(64))


def test_wrong_sizes_and_unknown_scales_are_named():
    with pytest.raises(UserError, match="dim = 30 is not divisible by num_heads = 4"):
        GPTConfig(dim=30, num_layers=1, num_heads=4, context=8)
    with pytest.raises(UserError, match="num_layers = 0"):
        GPTConfig(dim=32, num_layers=0, num_heads=4, context=8)
    with pytest.raises(UserError, match=r"unknown scale 'tinny' \(did you mean 'tiny'\?\)"):
        scale_config("tinny")
