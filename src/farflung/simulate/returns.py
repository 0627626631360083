"""How long failed chips stay away: exponentiated Weibull, as in the simulator of Decoupled DiLoCo."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farflung.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Returns:
    """``P(delay <= x) = (1 - exp(-(x / scale)^shape))^exponent``; exponent 1 is Weibull, shape 1 too exponential.

    Args:
        scale_s: seconds, above 0.
        shape: Weibull's k, above 0; below 1 the tail is heavy.
        exponent: above 0; above 1 very short delays are rare.

    Raises:
        UserError: a value that cannot be.
    """

    scale_s: float
    shape: float = 1.0
    exponent: float = 1.0

    def __post_init__(self) -> None:
        for name in ("scale_s", "shape", "exponent"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise UserError(f"returns: {name} = {value}: must be above 0")

    @classmethod
    def of_mean(cls, mean_s: float, shape: float = 1.0, exponent: float = 1.0) -> "Returns":
        """The distribution of these shapes that has this mean.

        >>> round(Returns.of_mean(60.0, shape=0.7, exponent=2.0).mean_s, 3)
        60.0
        """
        if not 0 < mean_s < math.inf:
            raise UserError(f"returns: mean_s = {mean_s}: must be above 0")
        return cls(
            scale_s=mean_s / cls(scale_s=1.0, shape=shape, exponent=exponent).mean_s,
            shape=shape,
            exponent=exponent,
        )

    @property
    def mean_s(self) -> float:
        """The mean, by quadrature of the survival function ``1 - P`` over ``log x``.

        >>> round(Returns(scale_s=3.0).mean_s, 4)
        3.0
        """
        log_x = np.linspace(-30.0, 4.0, 20_001) / self.shape
        x = np.exp(log_x)
        alive = -np.expm1(self.exponent * np.log(-np.expm1(-(x**self.shape))))
        return float(self.scale_s * np.trapezoid(alive * x, log_x))

    def draw(self, rng: np.random.Generator, num: int) -> NDArray[np.float64]:
        """`num` delays in seconds.

        >>> Returns(scale_s=2.0).draw(np.random.default_rng(0), 3).shape
        (3,)
        """
        chance = rng.random(num) ** (1 / self.exponent)
        delays: NDArray[np.float64] = self.scale_s * (-np.log1p(-chance)) ** (1 / self.shape)
        return delays
