"""Inner-optimizer state as bytes: by name, exact, equal for equal states."""

import json

import pytest
import torch
from torch import nn

from farflung.errors import UserError
from farflung.train.state import digest, load_state_bytes, pack_optimizer, state_bytes, unpack_optimizer

OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "adamw_fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "adam_amsgrad": lambda ps: torch.optim.Adam(ps, lr=1e-2, amsgrad=True),
    "adam_tensor_lr": lambda ps: torch.optim.Adam(ps, lr=torch.tensor(0.01)),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2),
    "sgd_momentum": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3, momentum=0.5),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=1e-2),
}


def build(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return model, OPTIMIZERS[name](model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps_before", [0, 3])
def test_training_resumed_from_bytes_equals_training_never_stopped(name, steps_before):
    whole, whole_optimizer = build(name)
    train(whole, whole_optimizer, range(steps_before + 3))

    stopped, stopped_optimizer = build(name)
    train(stopped, stopped_optimizer, range(steps_before))
    saved = state_bytes(pack_optimizer(stopped, stopped_optimizer, {"own_steps": steps_before}))

    resumed, resumed_optimizer = build(name)
    resumed.load_state_dict(stopped.state_dict())
    extra = unpack_optimizer(resumed, resumed_optimizer, load_state_bytes(saved))
    assert extra == {"own_steps": steps_before}
    train(resumed, resumed_optimizer, range(steps_before, steps_before + 3))

    for p, q in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)
    whole_bytes, resumed_bytes = (
        state_bytes(pack_optimizer(m, o)) for m, o in ((whole, whole_optimizer), (resumed, resumed_optimizer))
    )
    assert digest(whole_bytes) == digest(resumed_bytes)


def test_entries_are_keyed_by_parameter_name_in_sorted_order():
    model, optimizer = build("sgd_momentum")
    train(model, optimizer, range(1))
    names = ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert list(pack_optimizer(model, optimizer).tensors) == [f"{n}/momentum_buffer" for n in names]


def test_the_order_in_which_parameters_were_given_does_not_matter():
    states = []
    for order in (1, -1):
        model, _ = build("adamw")
        optimizer = torch.optim.AdamW(list(model.parameters())[::order], lr=1e-2)
        train(model, optimizer, range(2))
        states.append(state_bytes(pack_optimizer(model, optimizer)))
    assert states[0] == states[1]


def test_how_an_optimizer_computes_is_not_part_of_its_state():
    model, optimizer = build("adamw")
    fused_model, fused_optimizer = build("adamw_fused")
    assert pack_optimizer(model, optimizer).meta == pack_optimizer(fused_model, fused_optimizer).meta


def test_an_entry_that_was_only_looked_at_does_not_change_the_bytes():
    model, optimizer = build("adamw")
    before = state_bytes(pack_optimizer(model, optimizer))
    assert optimizer.state[model[0].weight] == {}
    assert state_bytes(pack_optimizer(model, optimizer)) == before


def test_one_changed_bit_changes_the_digest():
    model, optimizer = build("adamw")
    train(model, optimizer, range(1))
    before = digest(state_bytes(pack_optimizer(model, optimizer)))
    optimizer.state[model[0].weight]["exp_avg"][0, 0] += 1e-7
    assert digest(state_bytes(pack_optimizer(model, optimizer))) != before


def test_unpacking_copies_and_brings_the_learning_rate_along():
    model, optimizer = build("adamw")
    train(model, optimizer, range(1))
    optimizer.param_groups[0]["lr"] = 0.123
    other, other_optimizer = build("adamw")
    unpack_optimizer(other, other_optimizer, pack_optimizer(model, optimizer))
    assert other_optimizer.param_groups[0]["lr"] == 0.123
    assert other_optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    kept = other_optimizer.state[other[0].weight]["exp_avg"].clone()
    train(model, optimizer, range(1, 2))
    assert torch.equal(other_optimizer.state[other[0].weight]["exp_avg"], kept)


def test_tied_and_frozen_parameters_travel_once_or_not_at_all():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    parts = [name.split("/")[0] for name in pack_optimizer(model, optimizer).tensors]
    assert parts == ["0.bias", "0.weight", "1.bias"]


def test_state_of_another_class_or_shape_is_refused_and_changes_nothing():
    model, optimizer = build("adamw")
    train(model, optimizer, range(1))
    packed = pack_optimizer(model, optimizer)
    other, sgd = build("sgd_momentum")
    with pytest.raises(UserError, match="the state is of AdamW, the optimizer is SGD"):
        unpack_optimizer(other, sgd, packed)
    wide = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
    wide_optimizer = torch.optim.AdamW(wide.parameters())
    with pytest.raises(UserError, match="parameter groups"):
        unpack_optimizer(wide, wide_optimizer, packed)
    del packed.tensors["0.bias/exp_avg"]
    fresh, fresh_optimizer = build("adamw")
    with pytest.raises(UserError, match=r"lacks the tensor .0\.bias/exp_avg"):
        unpack_optimizer(fresh, fresh_optimizer, packed)
    assert not fresh_optimizer.state


def test_an_optimizer_of_another_model_is_refused():
    model, _ = build("sgd")
    _, optimizer = build("sgd")
    with pytest.raises(UserError, match="4 parameters that are not the model's"):
        pack_optimizer(model, optimizer)


def test_entries_that_cannot_travel_are_named():
    model, optimizer = build("sgd")
    optimizer.state[model[0].weight]["history"] = [torch.zeros(1)]
    with pytest.raises(UserError, match=r"0\.weight/history is a list"):
        pack_optimizer(model, optimizer)


@pytest.mark.parametrize("data", [b"", b"\x00" * 7, b"hello, this is not safetensors"])
def test_bytes_that_are_no_state_are_refused(data):
    with pytest.raises(UserError, match="not a packed optimizer state"):
        load_state_bytes(data)


def test_a_newer_format_is_refused():
    model, optimizer = build("sgd")
    packed = pack_optimizer(model, optimizer)
    newer = packed._replace(meta=json.dumps(json.loads(packed.meta) | {"format": 2}))
    with pytest.raises(UserError, match="format 2, this version reads 1"):
        load_state_bytes(state_bytes(newer))
