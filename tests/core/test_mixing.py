"""Who meets whom: the same at every member, symmetric, doubly stochastic, and connected over time."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.core import mixing
from farflung.core.mixing import MATCHINGS, Matcher, Members, graph, laplacian, mixing_matrix, partners

EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True)
every_matching = pytest.mark.parametrize("matching", MATCHINGS)
pair_matching = pytest.mark.parametrize("matching", ["random", "ring_pairs", "bandwidth"])
names = st.lists(st.text("abé/0", min_size=1, max_size=4), min_size=1, max_size=12, unique=True)
links = st.lists(st.sampled_from([None, 1.0, 30.0, 60.0, 110.0, 450.0, 1000.0]), min_size=2, max_size=12)


def _members(n, mbps=()):
    return Members(tuple(f"m{i:02}" for i in range(n)), tuple(mbps))


def _sizes(matching):
    return (1, 2, 4, 8, 16) if matching == "hypercube" else (1, 2, 3, 4, 5, 7, 8, 12, 16)


def _edges(matching, seed, round, members):
    entries = enumerate(graph(matching, seed, round, members))
    return {(i, j) for i, partners in entries for j, _ in partners if i < j}


def _union(matching, members, rounds):
    union = nx.Graph()
    union.add_nodes_from(range(len(members)))
    union.add_edges_from(edge for t in rounds for edge in _edges(matching, 3, t, members))
    return union


# Members


def test_members_are_told_apart_by_names_and_speeds():
    a = Members(("a", "b"))
    assert a == Members.of(["b", "a"]) and hash(a) == hash(Members.of(["b", "a"]))
    others = [
        Members(("a",)),
        Members(("ab",)),
        Members(("a", "b"), (1.0, None)),
        Members(("a", "b"), (1.0, 2.0)),
    ]
    assert len({a, *others}) == 5 and len({m.digest for m in (a, *others)}) == 5
    assert Members(("a",), (10,)) == Members(("a",), (10.0,))


def test_the_digest_is_the_same_in_every_process_and_version():
    assert Members(("a", "b"), (100.0, None)).digest == "e7a03866"


@pytest.mark.parametrize("wrong", [("b", "a"), ("a", "a")])
def test_unsorted_or_repeated_names_are_refused(wrong):
    with pytest.raises(ValueError, match=r"names = \('.', 'a'\): must be sorted"):
        Members(wrong)


@pytest.mark.parametrize("mbps", [(1.0,), (1.0, 0.0), (1.0, float("nan")), (1.0, float("inf"))])
def test_speeds_that_cannot_be_are_refused(mbps):
    with pytest.raises(ValueError, match="mbps"):
        Members(("a", "b"), mbps)


# What holds for every matching


@every_matching
def test_mixing_is_symmetric_and_doubly_stochastic(matching):
    for n in _sizes(matching):
        for t in range(5):
            m_NN = mixing_matrix(matching, 1, t, _members(n))
            assert np.array_equal(m_NN, m_NN.T)
            assert m_NN.min() >= -1e-15
            assert np.abs(m_NN.sum(1) - 1).max() < 1e-14


@every_matching
def test_partners_are_sorted_mutual_and_within_the_degree(matching):
    for n in _sizes(matching):
        rows = [partners(matching, 1, 3, _members(n), i) for i in range(n)]
        for i, row in enumerate(rows):
            others = [j for j, _ in row]
            assert others == sorted(set(others) - {i})
            assert all((i, weight) in rows[j] for j, weight in row)
        assert max(map(len, rows)) == max(0, mixing.max_degree(matching, n)) or matching == "bandwidth"


@every_matching
def test_a_period_repeats_and_chance_does_not(matching):
    n, period = 8, MATCHINGS[matching].period
    members = _members(n)
    graphs = [graph(matching, seed, t, members) for seed in (1, 2) for t in range(12)]
    assert mixing.is_random(matching) == (period is None)
    assert len(set(graphs)) == period(n) if period else len(set(graphs)) > 12


@every_matching
def test_the_union_over_64_rounds_is_connected(matching):
    for n in _sizes(matching):
        assert nx.is_connected(_union(matching, _members(n), range(64)))


@EXAMPLES
@given(names, st.integers(0, 2**63), st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_all_members_derive_the_same_matching_whatever_order_they_hear_names_in(names, seed, round, rng):
    mine = graph("random", seed, round, Members.of(names))
    heard = rng.sample(names, len(names))
    graph.cache_clear()
    assert graph("random", seed, round, Members.of(heard)) == mine


def test_who_meets_whom_is_pinned():
    members = Members(tuple("abcdefgh"))
    found = ["".join("abcdefgh"[row[0][0]] for row in graph("random", 7, t, members)) for t in range(3)]
    assert found == ["fdebcahg", "edgbahcf", "eghfadbc"]


def test_a_cached_graph_is_drawn_once_for_all_members_and_for_equal_sets():
    graph.cache_clear()
    for i in range(300):
        partners("random", 5, 9, Members.of(f"m{k:03}" for k in range(300)), i)
    assert (graph.cache_info().misses, graph.cache_info().hits) == (1, 299)


def test_rounds_of_a_fixed_graph_share_one_object():
    members = _members(8)
    assert graph("ring", 1, 5, members) is graph("ring", 2, 77, members)
    assert graph("hypercube", 1, 5, members) is graph("hypercube", 2, 2, members)


def test_an_unknown_matching_is_refused_with_a_hint():
    with pytest.raises(ValueError, match=r"matching = 'rnig': unknown \(did you mean 'ring'\?\)"):
        partners("rnig", 0, 0, _members(2), 0)


def test_a_matching_of_ones_own_is_one_entry(monkeypatch):
    star = Matcher(edges=lambda n, seed, round, members: ((0, j, 1 / n) for j in range(1, n)), max_degree=max)
    monkeypatch.setitem(MATCHINGS, "star", star)
    assert partners("star", 0, 0, _members(4), 2) == ((0, 0.25),)


# One by one


@pair_matching
@pytest.mark.parametrize("n", [2, 3, 8, 9])
def test_pairs_leave_nobody_idle_or_one_of_an_odd_number(matching, n):
    for t in range(12):
        degrees = [len(row) for row in graph(matching, 1, t, _members(n))]
        assert degrees.count(0) == n % 2 and degrees.count(1) == n - n % 2


@pair_matching
def test_everyone_idles_some_time(matching):
    idle = {[len(row) for row in graph(matching, 1, t, _members(5))].index(0) for t in range(64)}
    assert idle == set(range(5))


def test_random_pairs_meet_equally_often():
    members = _members(4)
    counts = [sum((0, j) in _edges("random", 2, t, members) for t in range(1500)) for j in (1, 2, 3)]
    assert max(abs(count - 500) for count in counts) < 4 * (1500 * 2 / 9) ** 0.5


@pytest.mark.parametrize("n", [4, 6, 8])
def test_two_peers_are_two_matchings_without_a_shared_edge(n):
    for t in range(20):
        union = nx.Graph(list(_edges("random2", 1, t, _members(n))))
        assert union.number_of_edges() == n and {degree for _, degree in union.degree} == {2}
        assert nx.is_bipartite(union)  # cycles of even length: every other edge is one perfect matching


def test_two_peers_of_few():
    assert partners("random2", 0, 0, _members(2), 0) == ((1, 0.5),)
    assert partners("random2", 0, 0, _members(3), 0) == ((1, 1 / 3), (2, 1 / 3))


def test_ring_weights():
    assert partners("ring", 0, 0, _members(5), 0) == ((1, 1 / 3), (4, 1 / 3))
    assert partners("ring", 0, 0, _members(2), 1) == ((0, 0.5),)
    assert partners("ring", 0, 0, _members(1), 0) == ()


def test_ring_pairs_take_turns():
    assert _edges("ring_pairs", 0, 0, _members(6)) == {(0, 1), (2, 3), (4, 5)}
    assert _edges("ring_pairs", 0, 1, _members(6)) == {(1, 2), (3, 4), (0, 5)}
    odd = [_edges("ring_pairs", 0, t, _members(5)) for t in range(5)]
    assert set.union(*odd) == _edges("ring", 0, 0, _members(5))


def test_exponential_weights():
    assert partners("exponential", 0, 0, _members(8), 0) == ((1, 0.25), (2, 0.25), (4, 0.25))
    assert [j for j, _ in partners("exponential", 0, 0, _members(12), 0)] == [1, 2, 4, 8, 10, 11]


@pytest.mark.parametrize("n", [8, 16])
def test_exponential_keeps_the_spectral_gap_of_the_directed_graph(n):
    d = n.bit_length() - 1
    directed_NN = np.eye(n) / (d + 1)
    for k in range(d):
        directed_NN += np.roll(np.eye(n), 2**k, axis=1) / (d + 1)
    directed = np.sort(np.abs(np.linalg.eigvals(directed_NN)))[-2]
    mine = np.sort(np.abs(np.linalg.eigvalsh(mixing_matrix("exponential", 0, 0, _members(n)))))[-2]
    assert mine == pytest.approx(directed) == pytest.approx(1 - 2 / (d + 1))


@pytest.mark.parametrize("n", [2, 4, 16])
def test_hypercube_averages_exactly_in_log2_n_rounds(n):
    product_NN = np.eye(n)
    for t in range(5, 5 + n.bit_length() - 1):
        product_NN = mixing_matrix("hypercube", 0, t, _members(n)) @ product_NN
    assert np.array_equal(product_NN, np.full((n, n), 1 / n))


def test_hypercube_refuses_other_numbers_and_says_what_to_use():
    with pytest.raises(ValueError, match=r"with 6 members: .* power of two; use 'random' or 'exponential'"):
        graph("hypercube", 0, 0, _members(6))


def test_complete_averages_at_once():
    assert np.allclose(mixing_matrix("complete", 0, 0, _members(5)), 1 / 5, atol=1e-15)


# Bandwidth


def test_without_speeds_or_with_like_ones_bandwidth_is_random():
    for t in range(16):
        want = graph("random", 4, t, _members(9))
        like = _members(9, [60.0, None, 100.0] * 3)
        assert len(want) == 9
        assert {len(row) for row in graph("bandwidth", 4, t, like)} == {0, 1}
        assert mixing.speed_classes(like) == (0,) * 9
    assert graph("bandwidth", 4, 3, _members(8)) == graph("random", 4, 3, _members(8))


def test_slow_members_meet_less_often():
    members = _members(8, [1000.0, 1000.0, 500.0, 400.0, 200.0, 200.0, 10.0, 10.0])
    assert mixing.speed_classes(members) == (0, 0, 1, 1, 2, 2, 3, 3)
    meets = [[bool(row) for row in graph("bandwidth", 1, t, members)] for t in range(16)]
    assert [sum(column) for column in zip(*meets, strict=True)] == [16, 16, 8, 8, 4, 4, 2, 2]


def test_alike_meets_alike_except_where_a_border_is_crossed():
    members = _members(8, [1000.0] * 4 + [100.0] * 4)
    crossing = [sum(i < 4 <= j for i, j in _edges("bandwidth", 1, t, members)) for t in range(32)]
    assert [crossing[t] for t in (0, 8, 16, 24)] == [0, 2, 0, 2] and sum(crossing) == 4


@EXAMPLES
@given(links)
def test_bandwidth_is_connected_over_time_whatever_the_links(links):
    members = _members(len(links), links)
    assert nx.is_connected(_union("bandwidth", members, range(128)))


@pytest.mark.parametrize(
    "links", [[100] * 7 + [1], [100] * 4 + [10] * 4, [100, 50, 20, 10] * 4, [100] + [5] * 5, [None, 1, 2, 3]]
)
def test_bandwidth_is_connected_over_64_rounds(links):
    assert nx.is_connected(_union("bandwidth", _members(len(links), links), range(64)))


# Matrices


def test_alpha_scales_the_laplacian():
    members = _members(6)
    lambda_NN = laplacian("ring", 0, 0, members)
    assert np.array_equal(mixing_matrix("ring", 0, 0, members, 0.3), np.eye(6) - 0.3 * lambda_NN)


@EXAMPLES
@given(st.integers(1, 10), st.integers(0, 10**6))
def test_metropolis_is_the_formula_on_any_graph(n, seed):
    irregular = nx.gnp_random_graph(n, 0.4, seed=seed)
    m_NN = mixing.metropolis(nx.to_numpy_array(irregular))
    for i, j in irregular.edges:
        assert m_NN[i, j] == m_NN[j, i] == 1 / (1 + max(irregular.degree[i], irregular.degree[j]))
    assert np.count_nonzero(m_NN - np.diag(m_NN.diagonal())) == 2 * irregular.number_of_edges()
    assert np.abs(m_NN.sum(1) - 1).max() < 1e-14 and m_NN.min() >= 0


def test_metropolis_refuses_a_directed_graph():
    with pytest.raises(ValueError, match="must be symmetric"):
        mixing.metropolis(np.array([[0.0, 1.0], [0.0, 0.0]]))


@pytest.mark.parametrize("matching", ["ring", "exponential", "complete"])
@pytest.mark.parametrize("n", [2, 3, 8, 12])
def test_chi_2_is_the_largest_resistance_of_an_edge(matching, n):
    """By determinants (Kirchhoff): ``R_ij = det(L without i, j) / det(L without i)``, conductances lambda_ij."""
    members = _members(n)
    kirchhoff_NN = 2 * laplacian(matching, 0, 0, members)

    def minor(*removed):
        kept = [k for k in range(n) if k not in removed]
        return np.linalg.det(kirchhoff_NN[np.ix_(kept, kept)])

    resistances = [minor(i, j) / minor(i) for i, j in _edges(matching, 0, 0, members)]
    assert mixing.spectrum(kirchhoff_NN / 2)[1] == pytest.approx(max(resistances))


def test_spectrum_closed_forms():
    n = 16
    chi_1, chi_2 = mixing.spectrum(laplacian("ring", 0, 0, _members(n)))
    assert chi_1 == pytest.approx(3 / (2 - 2 * np.cos(2 * np.pi / n)))
    assert chi_2 == pytest.approx(1.5 * (n - 1) / n)  # an edge of 3/2 beside n - 1 of them in a row
    assert mixing.spectrum(laplacian("exponential", 0, 0, _members(n)))[0] == pytest.approx((4 + 1) / 2)
    assert mixing.spectrum(laplacian("complete", 0, 0, _members(n))) == pytest.approx((1, 1))
    assert mixing.spectrum(laplacian("random", 0, 0, _members(n))) == (float("inf"), float("inf"))
    assert mixing.spectrum(np.zeros((1, 1))) == (0, 0)


def test_best_momentum_of_a_ring_of_16():
    chi_1, _ = mixing.spectrum(laplacian("ring", 0, 0, _members(16)))
    assert mixing.best_momentum(1 / chi_1) == pytest.approx(0.6, abs=5e-3)
