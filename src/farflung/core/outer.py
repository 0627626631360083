"""Outer optimizers: pure transforms from a merged outer gradient to the next global fragment.

All of them work on flat fp32 vectors and are elementwise, so applying one to the parts of a vector
gives the same bits as applying it to the whole: the blockwise merge relies on that.

``Delta`` is an outer *gradient* (old minus new parameters): the step is taken against it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from farflung.errors import did_you_mean

State = Mapping[str, Tensor]
"""Outer state of one fragment: name -> fp32 vector of the fragment's length."""


class Outer(Protocol):
    """What every outer optimizer offers; see `Nesterov` for the two forms of the same update."""

    @property
    def lr(self) -> float:
        """Outer learning rate, > 0."""
        ...

    def init(self, theta: Tensor) -> dict[str, Tensor]:
        """State before the first update of a fragment shaped like ``theta``."""
        ...

    def update(self, delta: Tensor, theta: Tensor, state: State) -> tuple[Tensor, dict[str, Tensor]]:
        """``(theta', state')``; never modifies an input."""
        ...

    def update_into(
        self, delta: Tensor, theta: Tensor, state: State, out_theta: Tensor, out_state: State
    ) -> None:
        """Write ``theta'`` and ``state'`` into the given buffers, without allocating.

        ``out_theta`` must not share memory with any input; ``out_state`` may be ``state`` itself.
        """
        ...


class Stateless:
    """What outer optimizers without state share: they are their `update_into`."""

    def init(self, theta: Tensor) -> dict[str, Tensor]:
        """No state."""
        return {}

    def update(self: Outer, delta: Tensor, theta: Tensor, state: State) -> tuple[Tensor, dict[str, Tensor]]:
        """``(theta', {})`` in new memory."""
        return _update_in_new_memory(self, delta, theta, state)


@final
@dataclass(frozen=True, kw_only=True)
class Sgd(Stateless):
    """``Theta <- Theta - lr Delta``: with ``lr = 1`` the outer step is plain averaging.

    Args:
        lr: outer learning rate, > 0.

    Raises:
        ValueError: ``lr`` is not a positive finite number.

    >>> theta, _ = Sgd(lr=0.5).update(torch.tensor([2.0]), torch.tensor([10.0]), {})
    >>> theta
    tensor([9.])
    """

    lr: float

    def __post_init__(self) -> None:
        _check(self.lr, 0.0)

    def update_into(
        self, delta: Tensor, theta: Tensor, state: State, out_theta: Tensor, out_state: State
    ) -> None:
        """Write ``theta'`` into ``out_theta``."""
        torch.add(theta, delta, alpha=-self.lr, out=out_theta)


@final
@dataclass(frozen=True, kw_only=True)
class Sign(Stateless):
    """``Theta <- Theta - lr sign(Delta)``, with ``sign(0) = 0`` (DeMo, arXiv 2411.19870).

    Args:
        lr: how far each element moves, > 0.

    Raises:
        ValueError: ``lr`` is not a positive finite number.

    >>> Sign(lr=0.5).update(torch.tensor([2.0, 0.0]), torch.tensor([10.0, 7.0]), {})[0]
    tensor([9.5000, 7.0000])
    """

    lr: float

    def __post_init__(self) -> None:
        _check(self.lr, 0.0)

    def update_into(
        self, delta: Tensor, theta: Tensor, state: State, out_theta: Tensor, out_state: State
    ) -> None:
        """Write ``theta'`` into ``out_theta``."""
        torch.sign(delta, out=out_theta).mul_(-self.lr).add_(theta)


@final
@dataclass(frozen=True, kw_only=True)
class Replace(Stateless):
    """``Theta <- Delta``: contributions are values, their merge is the next version (a consensus average).

    >>> Replace().update(torch.tensor([2.0]), torch.tensor([10.0]), {})[0]
    tensor([2.])
    """

    lr: float = 1.0

    def update_into(
        self, delta: Tensor, theta: Tensor, state: State, out_theta: Tensor, out_state: State
    ) -> None:
        """Write ``theta'`` into ``out_theta``."""
        out_theta.copy_(delta)


@final
@dataclass(frozen=True, kw_only=True)
class Momentum:
    """Heavy ball: ``b <- mu b + Delta;  Theta <- Theta - lr b``. Equal to ``torch.optim.SGD(momentum=mu)``.

    Args:
        lr: outer learning rate, > 0.
        momentum: ``mu`` in [0, 1).

    Raises:
        ValueError: a value is outside its range.

    >>> outer = Momentum(lr=1.0, momentum=0.5)
    >>> ball = {"momentum": torch.tensor([2.0])}
    >>> theta, state = outer.update(torch.tensor([1.0]), torch.tensor([0.0]), ball)
    >>> theta, state["momentum"]
    (tensor([-2.]), tensor([2.]))
    """

    lr: float
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _check(self.lr, self.momentum)

    def init(self, theta: Tensor) -> dict[str, Tensor]:
        """``b = 0``; the first update then gives ``b = Delta``, as PyTorch does."""
        return {"momentum": torch.zeros_like(theta)}

    def update(self, delta: Tensor, theta: Tensor, state: State) -> tuple[Tensor, dict[str, Tensor]]:
        """``(theta', {"momentum": b'})`` in new memory."""
        return _update_in_new_memory(self, delta, theta, state)

    def update_into(
        self, delta: Tensor, theta: Tensor, state: State, out_theta: Tensor, out_state: State
    ) -> None:
        """Write ``theta'`` and ``b'`` into the given buffers."""
        b = torch.mul(state["momentum"], self.momentum, out=out_state["momentum"]).add_(delta)
        torch.add(theta, b, alpha=-self.lr, out=out_theta)


@final
@dataclass(frozen=True, kw_only=True)
class Nesterov:
    """SGD with Nesterov momentum in PyTorch's convention, the outer optimizer of the DiLoCo family.

    ``b <- mu b + Delta;  Theta <- Theta - lr (Delta + mu b)``

    Equal bit for bit to ``torch.optim.SGD(lr, momentum=mu, nesterov=True)``, including the first step
    (PyTorch sets ``b = Delta`` there, which is what ``b = 0`` gives). Source: DiLoCo (arXiv 2311.08105,
    Algorithm 1: lr 0.7, mu 0.9); Streaming DiLoCo (2501.18512: lr 0.4, mu 0.9); Decoupled DiLoCo
    (2604.21428) publishes no values.

    Args:
        lr: outer learning rate, > 0.
        momentum: ``mu`` in [0, 1).

    Raises:
        ValueError: a value is outside its range.

    >>> outer = Nesterov(lr=0.5, momentum=0.5)
    >>> theta = torch.tensor([10.0])
    >>> theta, state = outer.update(torch.tensor([2.0]), theta, outer.init(theta))
    >>> theta, state["momentum"]
    (tensor([8.5000]), tensor([2.]))
    """

    lr: float
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _check(self.lr, self.momentum)

    def init(self, theta: Tensor) -> dict[str, Tensor]:
        """``b = 0``."""
        return {"momentum": torch.zeros_like(theta)}

    def update(self, delta: Tensor, theta: Tensor, state: State) -> tuple[Tensor, dict[str, Tensor]]:
        """``(theta', {"momentum": b'})`` in new memory."""
        return _update_in_new_memory(self, delta, theta, state)

    def update_into(
        self, delta: Tensor, theta: Tensor, state: State, out_theta: Tensor, out_state: State
    ) -> None:
        """Write ``theta'`` and ``b'`` into the given buffers.

        Four passes, not three fused ones: PyTorch rounds ``mu b`` before adding ``Delta``, and so must we.
        """
        b = torch.mul(state["momentum"], self.momentum, out=out_state["momentum"]).add_(delta)
        step = torch.add(delta, b, alpha=self.momentum, out=out_theta)
        torch.add(theta, step, alpha=-self.lr, out=out_theta)


OUTERS: dict[str, Callable[..., Outer]] = {
    "sgd": Sgd, "sign": Sign, "momentum": Momentum, "nesterov": Nesterov,
}  # fmt: skip
"""Name in a recipe -> constructor."""


def make_outer(name: str, lr: float, momentum: float | None = None) -> Outer:
    """Build an outer optimizer from recipe values.

    Args:
        name: a key of `OUTERS`.
        lr: outer learning rate, > 0.
        momentum: ``mu`` in [0, 1); None takes the optimizer's default. ``"sgd"`` and ``"sign"`` have none.

    Raises:
        ValueError: unknown name, a value outside its range, or a momentum that would have no effect.

    >>> make_outer("nesterov", 0.7, 0.9)
    Nesterov(lr=0.7, momentum=0.9)
    >>> make_outer("sgd", 1.0)
    Sgd(lr=1.0)
    """
    if name not in OUTERS:
        raise ValueError(f"outer = {name!r} is unknown{did_you_mean(name, OUTERS)}")
    plain = name in ("sgd", "sign")
    if plain and momentum:
        raise ValueError(
            f"momentum = {momentum} has no effect with outer = {name!r}; use 'momentum' or 'nesterov'"
        )
    if plain or momentum is None:
        return OUTERS[name](lr=lr)
    return OUTERS[name](lr=lr, momentum=momentum)


def _check(lr: float, momentum: float) -> None:
    if not 0.0 < lr < float("inf"):
        raise ValueError(f"outer lr = {lr} must be a positive finite number")
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"outer momentum = {momentum} must be in [0, 1)")


def _update_in_new_memory(
    outer: Outer, delta: Tensor, theta: Tensor, state: State
) -> tuple[Tensor, dict[str, Tensor]]:
    """The pure form: `update_into` fresh buffers."""
    out_theta = torch.empty_like(theta)
    out_state = {name: torch.empty_like(value) for name, value in state.items()}
    outer.update_into(delta, theta, state, out_theta, out_state)
    return out_theta, out_state
