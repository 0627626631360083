"""When disagreement contracts: the specification's table, closed forms, and the dynamics written naively."""

import math
from itertools import permutations

import numpy as np
import pytest

from farflung.core import mixing
from farflung.core.mixing import MATCHINGS, Matcher, Members, laplacian, mixing_matrix
from farflung.core.stability import _FORMS, check, largest_stable_mixing, rate

both_forms = pytest.mark.parametrize("momentum_on", ["local", "mixed"])

TABLE = {  # section 3 of the specification: n = 8, 16, infinity
    (0.5, "local"): (1.62, 1.55, 1.50),
    (0.7, "local"): (1.13, 1.07, 1.02),
    (0.8, "local"): (0.81, 0.76, 0.72),
    (0.9, "local"): (0.44, 0.40, 0.38),
    (0.5, "mixed"): (1.34, 1.32, 1.30),
    (0.7, "mixed"): (1.15, 1.12, 1.09),
    (0.8, "mixed"): (1.06, 1.02, 0.98),
    (0.9, "mixed"): (0.96, 0.90, 0.85),
}


def _members(n, mbps=()):
    return Members(tuple(f"m{i:02}" for i in range(n)), tuple(mbps))


def _disagreement(matching, gamma, alpha, n, momentum_on, rounds, width=64):
    """The norm of the disagreement after each round, from the definition, without gradients."""
    y = np.random.default_rng(0).standard_normal((n, width))
    y -= y.mean(0)
    before, norms = y, []
    for t in range(rounds):
        mixed = mixing_matrix(matching, 0, t, _members(n), alpha) @ y
        if momentum_on == "local":
            y, before = mixed + gamma * (y - before), y
        else:
            y, before = mixed + gamma * (mixed - before), mixed
        y, before = y - y.mean(0), before - before.mean(0)  # rounding of the mean would stay
        norms.append(np.linalg.norm(y))
    return norms


@pytest.mark.parametrize(("gamma", "momentum_on"), TABLE)
def test_the_table_of_the_specification(gamma, momentum_on):
    found = [largest_stable_mixing("random", gamma, n, momentum_on) for n in (8, 16, math.inf)]
    assert found == pytest.approx(TABLE[gamma, momentum_on], abs=0.01)


@pytest.mark.parametrize(("gamma", "factor"), [(0, 0.949), (0.6, 0.781), (0.9, 0.949)])
def test_ring_of_16(gamma, factor):
    assert rate("ring", gamma, 1.0, 16) == pytest.approx(factor, abs=1e-3)


def test_the_best_momentum_contracts_fastest():
    chi_1, _ = mixing.spectrum(laplacian("ring", 0, 0, _members(16)))
    best = mixing.best_momentum(1 / chi_1)
    assert rate("ring", best, 1.0, 16) < min(rate("ring", best + d, 1.0, 16) for d in (-0.05, 0.05))


def test_full_averaging_with_momentum_of_diloco_diverges_and_the_bound_converges():
    assert _disagreement("random", 0.9, 1.0, 8, "local", 400)[-1] > 1e6
    assert _disagreement("random", 0.9, 0.35, 8, "local", 800)[-1] < 1e-3
    assert rate("random", 0.9, 1.0, 8) > 1 > rate("random", 0.9, 0.35, 8)


# Against the dynamics


SEQUENCES = [("ring", 7), ("exponential", 8), ("exponential", 6), ("complete", 5), ("hypercube", 8)]
SEQUENCES += [("ring_pairs", 6), ("ring_pairs", 5)]


@both_forms
@pytest.mark.parametrize(("matching", "n"), SEQUENCES)
def test_the_rate_of_a_sequence_is_what_the_dynamics_do(matching, n, momentum_on):
    norms = _disagreement(matching, 0.6, 0.5, n, momentum_on, 240)
    assert (norms[-1] / norms[119]) ** (1 / 120) == pytest.approx(
        rate(matching, 0.6, 0.5, n, momentum_on), rel=0.01
    )


@both_forms
@pytest.mark.parametrize(("matching", "n"), [("random", 4), ("random", 5), ("random2", 4), ("random2", 5)])
def test_second_moments_are_exact_over_all_draws(monkeypatch, matching, n, momentum_on):
    """One round from any disagreement, averaged over every order of the members, against the 4 x 4 map."""
    f0, f1 = _FORMS[momentum_on](0.8, 0.7)
    s_2N = np.random.default_rng(1).standard_normal((2, n))
    s_2N -= s_2N.mean(1, keepdims=True)
    after, members = [], _members(n)
    for order in permutations(range(n)):
        monkeypatch.setattr(mixing, "shuffled", lambda *_, order=order: list(order))
        mixing.graph.cache_clear()
        next_2N = f0 @ s_2N + f1 @ s_2N @ laplacian(matching, 0, 0, members)
        after.append(next_2N @ next_2N.T)
    mixing.graph.cache_clear()
    mean = n // 2 / (n - 1) if matching == "random" else 2 * n / (3 * (n - 1))
    cross = np.kron(f0, f1) + np.kron(f1, f0)
    moments = np.kron(f0, f0) + mean * (cross + np.kron(f1, f1))
    assert np.mean(after, 0).ravel() == pytest.approx(moments @ (s_2N @ s_2N.T).ravel(), abs=1e-12)
    assert rate(matching, 0.8, 0.7, n, momentum_on) ** 2 == pytest.approx(
        np.abs(np.linalg.eigvals(moments)).max()
    )


@pytest.mark.parametrize("matching", ["ring", "exponential", "complete"])
@pytest.mark.parametrize("n", [2, 3, 6, 8, 13])
def test_closed_form_eigenvalues_are_those_of_the_laplacian(matching, n):
    mu = np.linalg.eigvalsh(laplacian(matching, 0, 0, _members(n)))[1:]
    assert rate(matching, 0.0, 0.4, n) == pytest.approx(np.abs(1 - 0.4 * mu).max())
    assert rate(matching, 0.0, 2.5, n) == pytest.approx(np.abs(1 - 2.5 * mu).max())


@both_forms
@pytest.mark.parametrize("links", [[100.0] * 7 + [10.0], [100.0] + [5.0] * 5, [100.0, 50.0, 25.0, 10.0] * 2])
def test_the_bound_of_bandwidth_holds_for_any_speeds(links, momentum_on):
    """Second moments over 16 rounds, each averaged over 40 draws of the real graphs."""
    n, gamma = len(links), 0.7
    alpha = largest_stable_mixing("bandwidth", gamma, n, momentum_on) - 0.02
    f0, f1 = _FORMS[momentum_on](gamma, alpha)
    members, centre = _members(n, links), np.kron(np.eye(2), np.eye(n) - 1 / n)
    rounds = [
        np.array(
            [
                np.kron(f0, np.eye(n)) + np.kron(f1, laplacian("bandwidth", seed, t, members))
                for seed in range(40)
            ]
        )
        for t in range(16)
    ]
    moments, traces = centre, []
    for _ in range(30):
        for f_SXX in rounds:
            moments = (f_SXX @ moments @ f_SXX.transpose(0, 2, 1)).mean(0)
        moments = centre @ moments @ centre
        traces.append(np.trace(moments))
    assert traces[-1] < traces[-10] < traces[-20]


@both_forms
def test_bandwidth_is_judged_by_its_slowest_class_so_never_better_than_random(momentum_on):
    for gamma in (0.5, 0.9):
        bound = largest_stable_mixing("bandwidth", gamma, 8, momentum_on)
        assert 2 * (1 - gamma) < bound + 0.01 < largest_stable_mixing("random", gamma, 8, momentum_on)


# The bound, and what is said


@both_forms
@pytest.mark.parametrize("matching", MATCHINGS)
def test_the_bound_is_where_the_rate_reaches_one(matching, momentum_on):
    for n in (2, 8):
        bound = largest_stable_mixing(matching, 0.7, n, momentum_on)
        assert (
            rate(matching, 0.7, bound, n, momentum_on)
            < 1
            <= rate(matching, 0.7, bound + 2e-3, n, momentum_on)
        )


@pytest.mark.parametrize(
    ("matching", "bound"), [("random", 2), ("ring", 1.5), ("complete", 2), ("hypercube", 2)]
)
def test_without_momentum_the_bound_is_two_over_the_largest_eigenvalue(matching, bound):
    assert largest_stable_mixing(matching, 0.0, 8) == pytest.approx(bound, abs=2e-3)


def test_the_first_resonance_bounds_an_odd_number_of_ring_pairs():
    assert (
        largest_stable_mixing("ring_pairs", 0.9, 9) < 0.56 < 1 < largest_stable_mixing("ring_pairs", 0.9, 8)
    )


@pytest.mark.parametrize("matching", [m for m in MATCHINGS if m != "hypercube"])
@pytest.mark.parametrize("n", [1001, math.inf])
def test_many_members_are_judged_too(matching, n):
    assert 0 < largest_stable_mixing(matching, 0.5, n) < 4


@both_forms
def test_starting_points_of_the_specification_are_accepted(momentum_on):
    gamma, alpha = {"local": (0.5, 0.75), "mixed": (0.7, 0.6)}[momentum_on]
    for matching in MATCHINGS:
        assert check(matching, gamma, alpha, 8, momentum_on) is None


def test_a_refusal_is_one_line_with_the_setting_and_the_bound():
    line = check("random", 0.9, 1.0, 8)
    assert line == (
        "outer_momentum = 0.9 with mixing = 1.0 diverges in disagreement for 8 learners (matching = 'random', "
        "momentum_on = 'local'): largest stable mixing is 0.43; lower mixing or outer_momentum"
    )


def test_no_mixing_helps_a_momentum_of_one():
    assert check("ring", 1.0, 0.5, 4).endswith("largest stable mixing is 0.00; lower outer_momentum")


def test_nothing_diverges_alone_or_without_mixing():
    assert check("random", 0.9, 5.0, 1) is None
    assert check("random", 0.9, 0.0, 8) is None
    assert largest_stable_mixing("random", 0.9, 1) == math.inf


def test_hypercube_of_another_size_and_unknown_names_are_refused():
    with pytest.raises(ValueError, match="power of two"):
        check("hypercube", 0.5, 0.5, 6)
    with pytest.raises(ValueError, match=r"matching = 'rign'.*'ring'"):
        check("rign", 0.5, 0.5, 6)
    with pytest.raises(ValueError, match=r"momentum_on = 'loca': unknown \(did you mean 'local'"):
        check("ring", 0.5, 0.5, 6, "loca")


def test_a_matching_of_ones_own_is_judged(monkeypatch):
    ring = Matcher(edges=mixing.ring, max_degree=lambda n: 2, period=lambda n: 1)
    monkeypatch.setitem(MATCHINGS, "my ring", ring)
    monkeypatch.setitem(MATCHINGS, "my chance", Matcher(edges=mixing.random2, max_degree=lambda n: 2))
    assert rate("my ring", 0.5, 0.7, 6) == pytest.approx(rate("ring", 0.5, 0.7, 6))
    assert rate("my chance", 0.5, 0.7, 6) == rate("random", 0.5, 0.7, 6)
