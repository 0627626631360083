"""How long a learner's next step takes: its usual time, with jitter, the same in every method."""

import random
from typing import Any

from farflung.recipe import Recipe

LEAST = 0.2  # of the usual time, however the jitter falls


class StepTimes:
    """Draws one time after the other, for each learner from a source of its own.

    Args:
        recipe: its seed and its [lab] table.
    """

    def __init__(self, recipe: Recipe) -> None:
        names = recipe.learners()
        self._jitter = recipe.lab.jitter
        self._usual_s: dict[str, float] = dict(zip(names, per_learner(recipe, "step_s"), strict=True))
        self._chance = {name: random.Random(f"{recipe.seed}.{name}") for name in names}

    def next_s(self, learner: str) -> float:
        """Virtual seconds of its next step."""
        usual_s = self._usual_s[learner]
        if not self._jitter:
            return usual_s
        return usual_s * max(LEAST, 1 + self._chance[learner].gauss(0.0, self._jitter))


def per_learner(recipe: Recipe, field: str) -> list[Any]:
    """A lab option as a list with one entry a learner."""
    value = getattr(recipe.lab, field)
    return list(value) if isinstance(value, list) else [value] * recipe.num_learners
