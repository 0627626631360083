"""One learner whose work is a thousand times too large, among healthy ones: `clip` bounds what it can do."""

import pytest

from farflung.methods import decoupled, diloco
from farflung.testing import World

TARGETS = [1.0, 1.1, 0.9, 1000.0]
METHODS = {
    "diloco": lambda **options: diloco(sync_every_steps=4, **options),
    "decoupled": lambda **options: decoupled(num_fragments=2, sync_every_steps=4, quorum=4, **options),
}


def furthest(name: str, **options: str) -> float:
    """Largest parameter at the end, where healthy learners pull to 1."""
    method = METHODS[name](
        lease_s=2.0, outer="sgd", outer_lr=1.0, outer_momentum=0.0, final="none", **options
    )
    world = World(method, [0.1] * 4, 3000, targets=TARGETS).run()
    assert world.syncer.phase == "finished", world.story()
    return max(float(t.abs().max()) for t in world.hub.model_tensors().values())


@pytest.mark.parametrize("name", METHODS)
def test_an_outlier_decides_a_plain_mean_and_not_a_clipped_one(name: str) -> None:
    assert furthest(name) > 50
    assert furthest(name, clip="median") < 5
