"""Muon: singular values near one, PyTorch's steps, and a state that travels."""

import pytest
import torch
from torch import nn

from farflung.train.muon import Muon, muon, orthogonal
from farflung.train.state import load_state_bytes, pack_optimizer, state_bytes, unpack_optimizer


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.up, self.down = nn.Embedding(11, 6), nn.Linear(6, 9), nn.Linear(9, 6, bias=False)

    def forward(self, i_B):
        return self.down(self.up(self.table(i_B)).tanh()) @ self.table.weight.T


def train(model, optimizer, steps):
    for step in steps:
        i_B = torch.randint(11, (8,), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(i_B), (i_B + 1) % 11).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("shape", [(8, 8), (16, 5), (5, 16), (1, 7)])
def test_an_update_has_singular_values_near_one_and_the_same_directions(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    made = orthogonal(matrix)
    values = torch.linalg.svdvals(made)
    assert ((values > 0.4) & (values < 1.3)).all()
    U, _, Vh = torch.linalg.svd(matrix, full_matrices=False)
    inner = U.T @ made @ Vh.T
    torch.testing.assert_close(inner, torch.diag(inner.diag()), rtol=0, atol=2e-3)


def test_zero_stays_zero():
    assert not orthogonal(torch.zeros(3, 4)).any()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon")
def test_matrices_step_as_with_pytorchs_muon_up_to_its_bf16():
    start = torch.randn(6, 10, generator=torch.Generator().manual_seed(2))
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    group = {"params": [ours], "orthogonal": True, "weight_decay": 0.1}
    pair = [
        (ours, Muon([group], lr=0.02)),
        (theirs, torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")),
    ]
    for step in range(5):
        grad = torch.randn(6, 10, generator=torch.Generator().manual_seed(step))
        for p, optimizer in pair:
            p.grad = grad.clone()
            optimizer.step()
    moved = torch.dist(theirs.detach(), start)
    assert torch.dist(ours.detach(), theirs.detach()) < 0.02 * moved


def test_the_rest_steps_as_with_adamw():
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 7)) for _ in range(2))
    pair = [
        (ours, Muon([{"params": [ours], "orthogonal": False, "weight_decay": 0.1}], lr=0.02)),
        (theirs, torch.optim.AdamW([theirs], lr=0.02, weight_decay=0.1, betas=(0.9, 0.95))),
    ]
    for step in range(5):
        for p, optimizer in pair:
            p.grad = torch.randn(7, generator=torch.Generator().manual_seed(step))
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_embeddings_and_vectors_are_left_to_adamw():
    model = Net()
    groups = muon(model, lr=0.01).param_groups
    names = {p: name for name, p in model.named_parameters()}
    by = [({names[p] for p in group["params"]}, group["orthogonal"]) for group in groups]
    assert by == [({"up.weight", "down.weight"}, True), ({"table.weight"}, False), ({"up.bias"}, False)]


@pytest.mark.parametrize("before", [0, 3])
def test_training_resumed_from_bytes_equals_training_never_stopped(before):
    whole = Net()
    whole_optimizer = muon(whole, lr=0.01)
    train(whole, whole_optimizer, range(before + 3))
    stopped = Net()
    stopped_optimizer = muon(stopped, lr=0.01)
    train(stopped, stopped_optimizer, range(before))
    saved = state_bytes(pack_optimizer(stopped, stopped_optimizer))
    resumed = Net()
    resumed_optimizer = muon(resumed, lr=0.01)
    resumed.load_state_dict(stopped.state_dict())
    unpack_optimizer(resumed, resumed_optimizer, load_state_bytes(saved))
    train(resumed, resumed_optimizer, range(before, before + 3))
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), resumed.parameters(), strict=True))
