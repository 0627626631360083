"""Two methods whose replicas never agree, written in the shape of `Method`, against the papers' own formulas.

They are sketches that keep the shape honest, in float64 and with the moves of the engine written out: a
method that needs more than these moves would need an edit in a driver.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from farflung.core.outer import State as OuterState
from farflung.methods import Method, diloco
from farflung.methods.base import Contribution, Local, State

N, ROUNDS = 32, 6


def inner(x: Tensor, worker: int) -> Tensor:
    """Some local training: three gradient steps on a quadratic of the worker's own."""
    gen = torch.Generator().manual_seed(worker)
    target, curve = (torch.rand(N, generator=gen, dtype=torch.float64) for _ in range(2))
    for _ in range(3):
        x = x - 0.1 * (0.5 + curve) * (x - 3 * target)
    return x


def start() -> Tensor:
    return torch.linspace(-1, 1, N, dtype=torch.float64)


# ---- the moves of the engine -----------------------------------------------------------------------------


def send(method: Method, local: Local) -> tuple[Tensor, State]:
    """Island: snapshot, encode, tell the method what others will decode."""
    contribution = method.contribute(local)
    decoded = method.codec.decode(method.codec.encode(contribution.payload), N)
    return decoded, method.sent(contribution, decoded) if method.sent else contribution.pending


def take(method: Method, local: Local, pending: State, result: Tensor, included: bool = True) -> Local:
    """Island: fate, then adoption."""
    local = replace(local, state=method.settle(local.state, pending, included))
    return method.adopt(local, result, included)


# ---- DCT-decoupled momentum (arXiv 2510.03371) -----------------------------------------------------------

BETA, ETA, K = 0.95, 0.7, 5


def dct_matrix() -> Tensor:
    """Orthonormal DCT-II."""
    n = torch.arange(N, dtype=torch.float64)
    basis = torch.cos(math.pi / N * (n[None] + 0.5) * n[:, None]) * math.sqrt(2 / N)
    basis[0] /= math.sqrt(2)
    return basis


def top_k(coefficients: Tensor) -> Tensor:
    kept = torch.zeros_like(coefficients)
    index = coefficients.abs().topk(K).indices
    kept[index] = coefficients[index]
    return kept


class DctTopK:
    """The selection is the codec's: bytes hold the K largest coefficients."""

    name = "dct_topk"

    def size_bytes(self, num_elements: int) -> int:
        return num_elements * 8

    def encode(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return top_k(dct_matrix() @ x).view(torch.uint8)

    def decode(self, payload: Tensor, num_elements: int, out: Tensor | None = None) -> Tensor:
        return dct_matrix().T @ payload.view(torch.float64)


@dataclass(frozen=True)
class Publish:
    """Outer optimizer of increments: the next "version" is the merged payload itself."""

    lr: float = 1.0

    def init(self, theta: Tensor) -> dict[str, Tensor]:
        return {}

    def update(self, delta: Tensor, theta: Tensor, state: OuterState) -> tuple[Tensor, dict[str, Tensor]]:
        return delta.clone(), {}

    def update_into(
        self, delta: Tensor, theta: Tensor, state: OuterState, out_theta: Tensor, out_state: OuterState
    ) -> None:
        out_theta.copy_(delta)


def dct_momentum() -> Method:
    def contribute(local: Local) -> Contribution:
        g = local.base - local.x
        m = BETA * local.state["m"] + g
        return Contribution(payload=m, pending={"m": m, "g": g})

    def sent(contribution: Contribution, decoded: Tensor) -> State:
        return contribution.pending | {
            "m": contribution.payload - decoded
        }  # what was sent leaves the momentum

    def adopt(local: Local, result: Tensor, included: bool) -> Local:
        m, g = local.state["m"] + result, local.state["g"]  # the shared part is put back
        x = local.base - ETA * (g + BETA * m)  # from its own previous point
        return Local(x=x, base=x, state={"m": m, "g": torch.zeros_like(g)})

    return Method(
        policy=diloco().policy,
        codec=DctTopK(),
        outer=Publish(),
        adopt=adopt,
        init=lambda n: {name: torch.zeros(n, dtype=torch.float64) for name in ("m", "g")},
        contribute=contribute,
        sent=sent,
    )


def test_dct_momentum_with_put_back_and_rewind_fits_the_shape() -> None:
    method, num = dct_momentum(), 3
    locals_ = [Local(x=start(), base=start(), state=method.init(N)) for _ in range(num)]
    for _ in range(ROUNDS):
        locals_ = [replace(me, x=inner(me.x, w)) for w, me in enumerate(locals_)]
        payloads, pendings = zip(*(send(method, me) for me in locals_), strict=True)
        hub, _ = method.outer.update(sum(payloads) / num, start(), {})
        locals_ = [take(method, me, pending, hub) for me, pending in zip(locals_, pendings, strict=True)]

    theta, m, dct = [start()] * num, [torch.zeros(N, dtype=torch.float64)] * num, dct_matrix()
    for _ in range(ROUNDS):
        g = [theta[w] - inner(theta[w], w) for w in range(num)]
        m = [BETA * m[w] + g[w] for w in range(num)]
        kept = [top_k(dct @ m[w]) for w in range(num)]
        m = [m[w] - dct.T @ kept[w] + dct.T @ (sum(kept) / num) for w in range(num)]
        theta = [theta[w] - ETA * (g[w] + BETA * m[w]) for w in range(num)]
    for w, me in enumerate(locals_):
        torch.testing.assert_close(me.x, theta[w], rtol=0, atol=1e-12)
        torch.testing.assert_close(me.state["m"], m[w], rtol=0, atol=1e-12)
    assert not torch.allclose(theta[0], theta[1])


def test_dct_momentum_that_was_not_merged_keeps_its_old_momentum() -> None:
    method = dct_momentum()
    me = Local(x=inner(start(), 0), base=start(), state=method.init(N))
    _, pending = send(method, me)
    assert pending["m"].any()
    assert not method.settle(me.state, pending, False)["m"].any()


# ---- GASLoC (arXiv 2606.11081), V1 -----------------------------------------------------------------------

RATE, ALPHA, GAMMA = 0.7, 0.75, 0.5


class Exact:
    """float64 as it is."""

    name = "fp64"

    def size_bytes(self, num_elements: int) -> int:
        return num_elements * 8

    def encode(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return x.clone().view(torch.uint8)

    def decode(self, payload: Tensor, num_elements: int, out: Tensor | None = None) -> Tensor:
        return payload.view(torch.float64).clone()


def gasloc() -> Method:
    """The result is the partner's y; a missed exchange is an adoption that includes nothing."""

    def contribute(local: Local) -> Contribution:
        g = local.x - local.base
        v = GAMMA * local.state["v"] + RATE * g - local.state["c"]
        return Contribution(payload=local.base + RATE * g, pending={"v": v, "c": local.state["c"]})

    def sent(contribution: Contribution, decoded: Tensor) -> State:
        return contribution.pending | {"y": decoded}  # each side uses its own decoded y

    def adopt(local: Local, result: Tensor, included: bool) -> Local:
        y, v = local.state["y"], local.state["v"]
        c = ALPHA / 2 * (y - result) if included else torch.zeros_like(y)
        x = y - c + GAMMA * v
        return Local(x=x, base=x, state={"v": v, "c": c, "y": y})

    return Method(
        policy=diloco().policy,
        codec=Exact(),
        outer=Publish(),
        adopt=adopt,
        init=lambda n: {name: torch.zeros(n, dtype=torch.float64) for name in ("v", "c", "y")},
        contribute=contribute,
        sent=sent,
        settle=lambda state, pending, merged: pending,  # the outer step is taken with or without a partner
    )


def pairs(round: int) -> list[tuple[int, int]]:
    """Three matchings of four workers; in the last one a worker pair misses its exchange."""
    return [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 3)]][round % 3]


def test_gasloc_fits_the_shape_without_a_hub() -> None:
    method, num = gasloc(), 4
    locals_ = [Local(x=start() + w, base=start() + w, state=method.init(N)) for w in range(num)]
    for round in range(ROUNDS):
        locals_ = [replace(me, x=inner(me.x, w)) for w, me in enumerate(locals_)]
        ys, pendings = zip(*(send(method, me) for me in locals_), strict=True)
        partner = {i: j for a, b in pairs(round) for i, j in ((a, b), (b, a))}
        locals_ = [
            take(method, me, pendings[w], ys[partner.get(w, w)], w in partner) for w, me in enumerate(locals_)
        ]
        assert torch.stack([me.state["c"] for me in locals_]).sum(0).abs().max() < 1e-12

    theta_WN = torch.stack([start() + w for w in range(num)])
    y_old = theta_WN
    for round in range(ROUNDS):
        drift = torch.stack([inner(theta_WN[w], w) - theta_WN[w] for w in range(num)])
        y, laplacian = theta_WN + RATE * drift, torch.zeros(num, num, dtype=torch.float64)
        for a, b in pairs(round):
            edge = torch.zeros(num, dtype=torch.float64)
            edge[a], edge[b] = 1.0, -1.0
            laplacian += torch.outer(edge, edge) / 2
        theta_WN = y - ALPHA * laplacian @ y + GAMMA * (y - y_old)
        y_old = y
    torch.testing.assert_close(torch.stack([me.x for me in locals_]), theta_WN, rtol=0, atol=1e-12)
