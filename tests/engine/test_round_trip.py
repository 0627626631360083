"""Every element exactly once, through every plan and codec: parameters, buffers, counters of odd models."""

import pytest
import torch
from engine_helpers import World
from torch import Tensor, nn

from farflung.core.codecs import CODECS
from farflung.core.fragments import PLANS, make_plan
from farflung.core.vectors import describe, live_tensors
from farflung.methods import decoupled


class Odd(nn.Module):
    """Tied, frozen, empty, 0-dim, non-contiguous and mixed-dtype parameters; buffers of all kinds."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4 + i) for i in range(3))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.scale = nn.Parameter(torch.randn(()))
        self.turned = nn.Parameter(torch.randn(5, 3).t())
        self.narrow = nn.Parameter(torch.randn(6).bfloat16())
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.tensor([1, 2, 3]))


def trained(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Move every element by an amount of its own."""
    with torch.no_grad():
        for tensor in tensors.values():
            if tensor.is_floating_point():
                tensor += torch.arange(1.0, tensor.numel() + 1).view(tensor.shape) / 8
            else:
                tensor += torch.arange(tensor.numel()).view(tensor.shape)
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("codec", ["bf16", "fp32", "int4", "int8"])  # fewer bits don't tell elements apart
@pytest.mark.parametrize("strategy", sorted(PLANS))
def test_a_delta_reaches_every_element_once(strategy: str, codec: str) -> None:
    method = decoupled(
        num_fragments=3,
        fragment_plan=strategy,
        codec=codec,
        merge="avg",
        outer="sgd",
        outer_lr=1.0,
        outer_momentum=0.0,
    )
    models: list[nn.Module] = [Odd(0), Odd(1)]
    world = World(models, method, make_plan(describe(models[0]), 3, strategy)).birth()
    frozen = [model.frozen.clone() for model in models]
    before = {name: t.detach().clone() for name, t in live_tensors(models[0]).items()}
    want = trained(live_tensors(models[0]))
    world.islands[0].boundary(1)
    for fragment in world.fragments:
        world.take(0, fragment)
        world.merge(fragment, {0: 1.0})
        world.adopt(1, fragment, included=None)
    got = live_tensors(models[1])
    assert got.keys() == want.keys() == world.hub.model_tensors().keys()
    for name, spec in ((s.name, s) for s in world.plan.tensors):
        if spec.kind != "param" or codec == "fp32":
            torch.testing.assert_close(
                got[name].detach(), want[name], rtol=1e-2 if "narrow" in name else 1e-6, atol=1e-6
            )
        else:  # coarse codecs: nobody's element was forgotten, doubled or swapped
            moved, wanted = got[name].detach() - before[name], want[name] - before[name]
            torch.testing.assert_close(moved, wanted, rtol=0.34, atol=0.1)
    assert all(torch.equal(m.frozen, f) for m, f in zip(models, frozen, strict=True))


def test_reported_sizes_are_the_real_ones() -> None:
    model = Odd(0)
    for name, codec in CODECS.items():
        plan = make_plan(describe(model), 2)
        world = World([model], decoupled(num_fragments=2, codec=name), plan).birth()
        world.islands[0].boundary(1)
        for i, fragment in enumerate(plan.fragments):
            report = world.take(0, i)
            assert report is not None
            assert report.taken[0].num_bytes == world.up[0](i).numel() == world.hub.payload_size(i)
            assert world.hub.payload_size(i) >= codec.size_bytes(fragment.num_elements)
