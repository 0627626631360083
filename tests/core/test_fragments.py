"""Fragment plans: every element exactly once, balance, records and JSON."""

import json
import math
import subprocess
import sys
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.core.fragments import PLANS, FragmentPlan, Piece, TensorSpec, make_plan
from farflung.core.partition import even_runs, lightest_bins

EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)


def spec(name, *shape, kind="param", embedding=False):
    return TensorSpec(name=name, shape=shape, dtype="float32", kind=kind, embedding=embedding)


def names(plan):
    return [[piece.name for piece in fragment.pieces] for fragment in plan.fragments]


def sizes(plan):
    return [fragment.num_elements for fragment in plan.fragments]


MODEL = [
    spec("embed.weight", 10, 4, embedding=True),
    spec("blocks.0.w", 4, 4),
    spec("blocks.0.b", 4),
    spec("blocks.1.w", 4, 4),
    spec("blocks.1.b", 4),
    spec("blocks.2.w", 4, 4),
    spec("blocks.2.b", 4),
    spec("scale"),
    spec("empty", 0, 3),
    spec("norm.mean", 4, kind="buffer"),
    spec("norm.var", 4, kind="buffer"),
    spec("norm.count", kind="counter"),
]

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
prefixes = st.sampled_from(["embed", "blocks.0.w", "blocks.1.w", "blocks.2.w", "head", "x"])
params = st.lists(st.tuples(prefixes, shapes), min_size=1, max_size=8).map(
    lambda items: [spec(f"{prefix}.t{i}", *shape) for i, (prefix, shape) in enumerate(items)]
)


def plan_or_refusal(specs, num_fragments, strategy):
    try:
        return make_plan(specs, num_fragments, strategy)
    except ValueError as error:
        assert "num_fragments" in str(error)
        return None


@pytest.mark.parametrize("strategy", PLANS)
@EXAMPLES
@given(specs=params, num_fragments=st.integers(1, 6))
def test_every_element_is_in_exactly_one_fragment(strategy, specs, num_fragments):
    plan = plan_or_refusal(specs, num_fragments, strategy)
    if plan is None:
        return
    seen = [(p.name, i) for f in plan.fragments for p in f.pieces for i in range(p.start, p.start + p.length)]
    assert len(seen) == len(set(seen))
    assert set(seen) == {(s.name, i) for s in specs for i in range(s.num_elements)}
    assert all(size > 0 for size in sizes(plan))


@EXAMPLES
@given(rows=st.lists(st.integers(1, 9), min_size=1, max_size=8), num_fragments=st.integers(1, 8))
def test_balanced_is_within_four_thirds_of_ideal_when_rows_are_small(rows, num_fragments):
    plan = make_plan([spec(f"t{i}", 3 * num_fragments * n) for i, n in enumerate(rows)], num_fragments)
    assert max(sizes(plan)) <= 4 / 3 * (3 * sum(rows))


@EXAMPLES
@given(specs=params, num_fragments=st.integers(1, 6))
def test_balanced_is_within_the_mean_and_a_row_or_a_third(specs, num_fragments):
    plan = plan_or_refusal(specs, num_fragments, "balanced")
    if plan:
        ideal = sum(s.num_elements for s in specs) / num_fragments
        longest_row = max(math.prod(s.shape[1:]) for s in specs if s.num_elements)
        assert max(sizes(plan)) <= max(4 / 3 * ideal, ideal + max(longest_row, math.ceil(ideal / 3)))


@EXAMPLES
@given(specs=params, num_fragments=st.integers(1, 4), seed=st.randoms(use_true_random=False))
def test_balanced_plans_do_not_depend_on_the_order_of_registration(specs, num_fragments, seed):
    plan = plan_or_refusal(specs, num_fragments, "balanced")
    shuffled = list(specs)
    seed.shuffle(shuffled)
    other = plan_or_refusal(shuffled, num_fragments, "balanced")
    assert (plan and plan.fingerprint()) == (other and other.fingerprint())


@EXAMPLES
@given(items=st.lists(st.integers(1, 9), min_size=1, max_size=6), num_bins=st.integers(1, 3))
def test_greedy_partition_is_within_four_thirds_of_the_optimum(items, num_bins):
    def heaviest(bins):
        return max(sum(s for s, b in zip(items, bins, strict=True) if b == k) for k in range(num_bins))

    optimum = min(heaviest(bins) for bins in product(range(num_bins), repeat=len(items)))
    assert heaviest(lightest_bins(items, num_bins)) <= (4 / 3 - 1 / (3 * num_bins)) * optimum + 1e-9


@EXAMPLES
@given(items=st.lists(st.integers(1, 9), min_size=3, max_size=7))
def test_runs_are_contiguous_non_empty_and_the_largest_is_least(items):
    runs = even_runs(items, 3)
    assert runs == sorted(runs)
    assert set(runs) == {0, 1, 2}
    heaviest = max(sum(s for s, r in zip(items, runs, strict=True) if r == k) for k in range(3))
    n = len(items)
    cuts = [(i, j) for i in range(1, n) for j in range(i + 1, n)]
    assert heaviest == min(max(sum(items[:i]), sum(items[i:j]), sum(items[j:])) for i, j in cuts)


def test_largest_goes_first_into_the_lightest_fragment():
    plan = make_plan([spec("a", 6), spec("b", 5), spec("c", 5), spec("d", 4), spec("e", 4)], 2)
    assert names(plan) == [["a", "d", "e"], ["b", "c"]]


def test_equal_sizes_are_ordered_by_name():
    plan = make_plan([spec("c", 2), spec("a", 2), spec("d", 2), spec("b", 2)], 4)
    assert names(plan) == [["a"], ["b"], ["c"], ["d"]]


def test_tensor_larger_than_its_share_is_split_by_rows():
    plan = make_plan([spec("big", 9, 2), spec("small", 6)], 4)
    assert max(sizes(plan)) <= 6
    for fragment in plan.fragments:
        assert all(piece.start % 2 == 0 for piece in fragment.pieces if piece.name == "big")


def test_row_larger_than_a_share_stays_whole():
    plan = make_plan([spec("wide", 2, 10), spec("a", 1), spec("b", 1)], 4)
    assert sorted(sizes(plan)) == [1, 1, 10, 10]


def test_one_tensor_more_than_fragments_is_split_to_keep_the_balance():
    plan = make_plan([spec(name, 6) for name in "abcde"], 4)
    assert max(sizes(plan)) <= 10


def test_neighbouring_rows_in_one_fragment_are_one_piece():
    (fragment,) = make_plan([spec("big", 9, 2)], 1).fragments
    assert fragment.pieces == (Piece(name="big", start=0, length=18, offset=0, embedding=False),)


def test_as_many_fragments_as_rows_get_one_row_each():
    plan = make_plan([spec("wide", 2, 1000), spec("thin", 10)], 12)
    assert sorted(sizes(plan)) == [1] * 10 + [1000] * 2


def test_by_layer_keeps_model_order():
    plan = make_plan(MODEL, 3, "by_layer")
    assert names(plan)[0] == ["embed.weight"]
    assert names(plan)[1:] == [
        ["blocks.0.b", "blocks.0.w", "blocks.1.b", "blocks.1.w"],
        ["blocks.2.b", "blocks.2.w", "scale"],
    ]


def test_strided_deals_whole_layers_round_robin():
    plan = make_plan(MODEL, 2, "strided")
    assert names(plan) == [
        ["blocks.1.b", "blocks.1.w", "embed.weight", "scale"],
        ["blocks.0.b", "blocks.0.w", "blocks.2.b", "blocks.2.w"],
    ]


def test_embedding_marks_reach_the_pieces():
    pieces = [piece for fragment in make_plan(MODEL, 4).fragments for piece in fragment.pieces]
    assert {piece.name for piece in pieces if piece.embedding} == {"embed.weight"}


def test_empty_tensor_is_named_but_in_no_piece():
    plan = make_plan(MODEL, 4)
    assert "empty" in {s.name for s in plan.tensors}
    assert not any("empty" in pieces for pieces in names(plan))


@pytest.mark.parametrize("strategy", PLANS)
def test_buffers_and_counters_are_dealt_in_lists_of_their_own(strategy):
    plan = make_plan(MODEL, 2, strategy)
    assert [[b.name for b in f.buffers] for f in plan.fragments] == [["norm.mean"], ["norm.var"]]
    assert [f.num_buffer_elements for f in plan.fragments] == [4, 4]
    assert [f.num_counters for f in plan.fragments] == [1, 0]
    assert sum(sizes(plan)) == 101


@pytest.mark.parametrize(("strategy", "most"), [("balanced", 35), ("by_layer", 8), ("strided", 5)])
def test_too_many_fragments_are_refused_with_the_largest_possible(strategy, most):
    assert make_plan(MODEL, most, strategy).num_fragments == most
    for num_fragments in (0, most + 1):
        with pytest.raises(ValueError, match=rf"num_fragments = {num_fragments}: .* 1 to {most} "):
            make_plan(MODEL, num_fragments, strategy)


def test_model_without_trainable_elements_is_refused():
    with pytest.raises(ValueError, match="num_fragments = 1: the model has no trainable element"):
        make_plan([spec("empty", 0), spec("mean", 3, kind="buffer")], 1)


def test_unknown_strategy_is_refused_with_a_hint():
    with pytest.raises(ValueError, match=r"strategy = 'balance' is unknown \(did you mean 'balanced'\?\)"):
        make_plan(MODEL, 2, "balance")


def test_repeated_name_is_refused():
    with pytest.raises(ValueError, match="named more than once: a"):
        make_plan([spec("a", 2), spec("a", 2)], 1)


@pytest.mark.parametrize("strategy", PLANS)
def test_json_gives_back_an_equal_plan(strategy):
    plan = make_plan(MODEL, 3, strategy)
    again = FragmentPlan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert again.fingerprint() == plan.fingerprint()


def test_fingerprint_tells_plans_apart():
    changed = [spec("embed.weight", 10, 4), *MODEL[1:]]
    half = [TensorSpec(name="embed.weight", shape=(10, 4), dtype="bfloat16", kind="param"), *MODEL[1:]]
    plans = [make_plan(MODEL, 2), make_plan(MODEL, 3), make_plan(MODEL, 2, "strided")]
    plans += [make_plan(changed, 2), make_plan(half, 2)]
    assert len({plan.fingerprint() for plan in plans}) == len(plans)


def test_fingerprint_is_stable_across_releases():
    plan = make_plan([spec("a", 2), spec("b", 3)], 2)
    assert plan.fingerprint() == "1e7f8cd35e4f3d8f1fd60e355903733d705d86a13a2940e818c192241572ea8c"


def damage(**changes):
    """The JSON of a good plan in which paths such as `fragments__0__index` are replaced or (...) removed."""
    plan = json.loads(make_plan(MODEL, 2).to_json())
    for path, value in changes.items():
        *parents, last = [int(key) if key.isdigit() else key for key in path.split("__")]
        node = plan
        for key in parents:
            node = node[key]
        if value is ...:
            del node[last]
        else:
            node[last] = value
    return json.dumps(plan)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "plan: not JSON"),
        ("[]", "plan: expected an object, got list"),
        ("{}", r"plan: \['fragments', 'strategy', 'tensors'\] missing"),
        (damage(extra=1), r"plan: \['extra'\] unknown"),
        (damage(strategy=3), "strategy = 3: must be a string"),
        (damage(fragments={}), "fragments: expected an array, got dict"),
        (damage(fragments=[]), "fragments: must be at least one"),
        (damage(tensors__0__shape=[-1]), "'embed.weight': shape = "),
        (damage(tensors__0__shape=[1.0]), "'embed.weight': shape = "),
        (damage(tensors__0__shape=[10, 5]), "'embed.weight': pieces cover 40 elements, it has 50"),
        (damage(tensors__0__kind="weight"), "'embed.weight': kind = 'weight'"),
        (damage(tensors__0__kind="buffer"), "piece of 'embed.weight': no param has this name"),
        (damage(tensors__0__name=7), "tensor name = 7"),
        (damage(tensors__0__dtype=None), "'embed.weight': dtype = None"),
        (damage(tensors__0__embedding=1), "'embed.weight': embedding = 1"),
        (damage(tensors__0__embedding=False), "piece of 'embed.weight': embedding = True"),
        (damage(fragments__1__index=0), r"fragments\[1\]: index = 0"),
        (damage(fragments__1__pieces=[]), r"fragments\[1\]: has no parameter element"),
        (damage(fragments__0__buffers=[]), "tensor 'norm.mean': pieces cover 0 elements, it has 4"),
        (damage(fragments__0__pieces__0__length=0), "length = 0, must be at least 1"),
        (damage(fragments__0__pieces__0__length=True), "start, length, offset ="),
        (damage(fragments__0__pieces__0__offset=5), "offset = 5, expected 0"),
        (damage(fragments__0__pieces__0__start=1), "start = 1, expected 0"),
        (damage(fragments__0__pieces__0__start=...), r"piece: \['start'\] missing"),
    ],
)
def test_malformed_plan_is_refused_by_name(text, message):
    with pytest.raises(ValueError, match=message):
        FragmentPlan.from_json(text)


@pytest.mark.slow
def test_plans_import_no_torch():
    code = "import sys; import farflung.core.fragments; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
