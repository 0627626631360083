"""Live models and flat vectors: what takes part, and that gather and scatter are exact inverses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from farflung.core.fragments import PLANS, Piece, make_plan
from farflung.core.vectors import describe, gather, live_tensors, scatter_

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


class Leaf(nn.Module):
    """One parameter `w` holding small whole numbers, exact in every dtype."""

    def __init__(self, shape, dtype=torch.float32, transposed=False, frozen=False):
        super().__init__()
        values = (torch.arange(torch.Size(shape).numel()) % 200).reshape(shape).to(dtype)
        if transposed:
            values = values.transpose(0, -1).contiguous().transpose(0, -1)
        self.w = nn.Parameter(values, requires_grad=not frozen)


def tied():
    leaf = Leaf((3, 2))
    leaf.again = leaf.w
    return leaf


LEAVES = [
    lambda dtype: Leaf((4, 3), dtype),
    lambda dtype: Leaf((5, 7), dtype, transposed=True),
    lambda dtype: Leaf((), dtype),
    lambda dtype: Leaf((0, 3), dtype),
    lambda dtype: Leaf((6,), dtype, frozen=True),
    lambda dtype: tied(),
    lambda dtype: nn.BatchNorm1d(3, dtype=dtype),
    lambda dtype: nn.Embedding.from_pretrained(torch.arange(22).view(11, 2).to(dtype), freeze=False),
]
leaves = st.tuples(st.sampled_from(LEAVES), st.sampled_from(DTYPES))


@st.composite
def models(draw):
    parts = draw(st.lists(leaves, max_size=6))
    blocks = nn.ModuleList([make(dtype) for make, dtype in parts])
    return nn.ModuleDict({"first": Leaf((3, 2)), "blocks": blocks})


def every_list(plan):
    for fragment in plan.fragments:
        yield fragment.pieces, torch.float32
        yield fragment.buffers, torch.float32
        yield fragment.counters, torch.int64


@pytest.mark.parametrize("strategy", PLANS)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(model=models(), num_fragments=st.integers(1, 3))
def test_each_trainable_element_is_written_once_and_nothing_else(strategy, model, num_fragments):
    specs, live = describe(model), live_tensors(model)
    try:
        plan = make_plan(specs, num_fragments, strategy)
    except ValueError:
        return
    before = {name: value.clone() for name, value in model.state_dict().items()}
    strides = {name: tensor.stride() for name, tensor in live.items()}

    for pieces, dtype in every_list(plan):
        scatter_(gather(live, pieces, dtype=dtype), live, pieces)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    for pieces, dtype in every_list(plan):
        vector = gather(live, pieces, dtype=dtype) + 1
        scatter_(vector, live, pieces)
        assert torch.equal(gather(live, pieces, dtype=dtype), vector)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, value in model.state_dict().items():
        frozen = name in parameters and not parameters[name].requires_grad
        assert torch.equal(value, before[name] + (0 if frozen else 1)), name
    assert strides == {name: tensor.stride() for name, tensor in live_tensors(model).items()}


def test_tied_parameters_are_counted_once_under_their_first_name():
    assert [spec.name for spec in describe(tied())] == ["w"]


def test_frozen_parameters_are_excluded():
    assert describe(Leaf((3,), frozen=True)) == []


def test_empty_and_scalar_parameters_are_named():
    model = nn.ModuleDict({"empty": Leaf((0, 3)), "scalar": Leaf(())})
    assert [(s.name, s.shape, s.num_elements) for s in describe(model)] == [
        ("empty.w", (0, 3), 0),
        ("scalar.w", (), 1),
    ]


def test_batch_norm_statistics_are_buffers_and_a_counter():
    kinds = {spec.name: spec.kind for spec in describe(nn.BatchNorm1d(3))}
    assert kinds == {
        "weight": "param",
        "bias": "param",
        "running_mean": "buffer",
        "running_var": "buffer",
        "num_batches_tracked": "counter",
    }


def test_local_buffers_are_excluded():
    model = nn.ModuleDict({"inner": nn.Identity()})
    model["inner"].register_buffer("cache", torch.ones(2), persistent=False)
    model["inner"].register_buffer("mask", torch.ones(2, dtype=torch.bool))
    model["inner"].register_buffer("phases", torch.ones(2, dtype=torch.complex64))
    assert describe(model) == []


def test_embedding_is_marked_also_when_tied_under_another_name():
    head, table = nn.Linear(2, 5, bias=False), nn.Embedding(5, 2)
    head.weight = table.weight
    model = nn.ModuleDict({"head": head, "table": table, "bag": nn.EmbeddingBag(3, 2), "out": Leaf((2,))})
    assert {s.name: s.embedding for s in describe(model)} == {
        "head.weight": True,
        "bag.weight": True,
        "out.w": False,
    }


def test_dtypes_are_named_without_prefix():
    assert [spec.dtype for spec in describe(Leaf((2,), torch.bfloat16))] == ["bfloat16"]


def test_lazy_parameters_are_refused():
    model = nn.Linear(2, 2)
    model.weight = nn.UninitializedParameter()
    with pytest.raises(ValueError, match="parameter 'weight' is lazy"):
        describe(model)


def test_complex_parameters_are_refused():
    with pytest.raises(ValueError, match=r"parameter 'w': dtype = torch\.complex64"):
        describe(Leaf((2,), torch.complex64))


def pieces_of(*parts):
    pieces, offset = [], 0
    for name, start, length in parts:
        pieces.append(Piece(name=name, start=start, length=length, offset=offset, embedding=False))
        offset += length
    return pieces


def test_vectors_never_alias_live_tensors():
    weight = torch.arange(4.0)
    pieces = pieces_of(("w", 0, 4))
    vector = gather({"w": weight}, pieces)
    vector += 10
    assert weight.tolist() == [0, 1, 2, 3]
    scatter_(vector, {"w": weight}, pieces)
    vector.zero_()
    assert weight.tolist() == [10, 11, 12, 13]


def test_scatter_keeps_the_storage_that_an_optimizer_holds():
    parameter = nn.Parameter(torch.zeros(2, 2))
    address = parameter.data_ptr()
    scatter_(torch.ones(4), {"w": parameter}, pieces_of(("w", 0, 4)))
    assert parameter.data_ptr() == address
    assert parameter.requires_grad
    assert parameter.grad_fn is None


def test_part_of_a_transposed_tensor_is_written_in_c_order():
    weight = torch.zeros(2, 3).t()
    scatter_(torch.tensor([1.0, 2.0]), {"w": weight}, pieces_of(("w", 1, 2)))
    assert weight.tolist() == [[0, 1], [2, 0], [0, 0]]


def test_gather_fills_the_given_vector_and_its_dtype_counts():
    out = torch.empty(3, dtype=torch.int64)
    tensors = {"a": torch.tensor(2**40), "b": torch.tensor([1, 2], dtype=torch.int32)}
    assert gather(tensors, pieces_of(("a", 0, 1), ("b", 0, 2)), out) is out
    assert out.tolist() == [2**40, 1, 2]


def test_large_counters_survive_as_int64():
    tensors = {"n": torch.tensor(2**53 + 1)}
    pieces = pieces_of(("n", 0, 1))
    vector = gather(tensors, pieces, dtype=torch.int64)
    scatter_(vector, tensors, pieces)
    assert tensors["n"].item() == 2**53 + 1


def test_no_pieces_give_an_empty_vector():
    assert gather({}, []).shape == (0,)


def test_vector_of_the_wrong_length_is_refused():
    pieces = pieces_of(("w", 0, 4))
    with pytest.raises(ValueError, match=r"vector: shape = \(3,\), the pieces need \(4,\)"):
        scatter_(torch.zeros(3), {"w": torch.zeros(4)}, pieces)
    with pytest.raises(ValueError, match=r"out: shape = \(4, 1\)"):
        gather({"w": torch.zeros(4)}, pieces, torch.zeros(4, 1))


def test_bad_piece_is_refused_before_anything_is_written():
    weight = torch.zeros(2)
    with pytest.raises(ValueError, match="piece of 'gone': there is no such tensor"):
        scatter_(torch.ones(3), {"w": weight}, pieces_of(("w", 0, 2), ("gone", 0, 1)))
    with pytest.raises(ValueError, match="piece of 'w': ends at 3, the tensor has 2 elements"):
        scatter_(torch.ones(3), {"w": weight}, pieces_of(("w", 0, 3)))
    assert weight.tolist() == [0, 0]
