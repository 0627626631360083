"""Public helpers for tests of methods, machines and drivers.

`World` runs the whole protocol with real tensors under virtual time; `walk` and `walk_gossip` send one through
random faults; `Crowd` is gossip machines by the thousand;
`MemoryTape` tells what happened, and `replay` proves that a tape determines a machine. `check_method` holds a
method of your own to the contract of all methods. None of it needs a test framework.

>>> from farflung.methods import diloco
>>> world = World(diloco(sync_every_steps=4), step_s=[0.1, 0.1], budget_tokens=160).run()
>>> world.finished, world.hub.versions, world.syncer.ledger.summary()["token_fragments"]["in_flight"]
('finished', [2], 0)
"""

from farflung.lab.island import VirtualIsland
from farflung.lab.virtual_time import Timers, VirtualTime
from farflung.testing.crowd import Crowd
from farflung.testing.gossip_walk import walk_gossip
from farflung.testing.method_checks import check_method
from farflung.testing.quadratic import QuadraticInner, quadratic_model
from farflung.testing.tapes import Divergence, MemoryTape, replay
from farflung.testing.walk import walk
from farflung.testing.world import World

__all__ = [
    "Crowd", "Divergence", "MemoryTape", "QuadraticInner", "Timers", "VirtualIsland", "VirtualTime", "World",
    "check_method", "quadratic_model", "replay", "walk", "walk_gossip",
]  # fmt: skip
