import json

import msgspec
import pytest

from farflung.methods import Method, decoupled, diloco, streaming
from farflung.protocol.learner import LearnerMachine
from farflung.protocol.syncer import SyncerMachine
from farflung.tape import Record
from farflung.testing import World, replay

METHODS = {
    "decoupled": decoupled(num_fragments=2, sync_every_steps=4, lease_s=1.0),
    "rebase": decoupled(num_fragments=2, sync_every_steps=4, lease_s=1.0, adoption="rebase", quorum=2),
    "diloco": diloco(sync_every_steps=4, lease_s=1.0),
    "streaming": streaming(num_fragments=2, sync_every_steps=6, overlap_steps=1, lease_s=1.0),
}


def eventful(method: Method) -> World:
    world = World(method, [0.1, 0.13, 0.2], 1200)
    one, two, three = world.islands
    world.at(1.5, one.cut)
    world.at(2.0, two.kill)
    world.at(2.7, two.start)
    world.at(4.0, lambda: three.freeze(2.5))
    return world.run()


def through_json(records: list[Record]) -> list[Record]:
    return [Record(r.t, r.node, r.seq, r.kind, json.loads(msgspec.json.encode(r.data))) for r in records]


@pytest.mark.parametrize("name", METHODS)
def test_every_tape_replays_to_the_same_actions(name: str) -> None:
    world = eventful(METHODS[name])
    policy, header = METHODS[name].policy, world.syncer.header()
    header.pop("machine")
    divergence = replay(through_json(world.tape.of("syncer")), SyncerMachine(policy, **header))
    assert divergence is None, divergence
    processes = [node for node in world.tape.nodes() if node != "syncer"]
    assert len(processes) == 4
    for node in processes:
        machine = LearnerMachine(policy, learner=node.partition(".")[0])
        divergence = replay(through_json(world.tape.of(node)), machine)
        assert divergence is None, divergence


def test_two_runs_of_one_world_write_the_same_tape_and_bits() -> None:
    one, two = (eventful(METHODS["decoupled"]) for _ in range(2))
    assert one.tape.records == two.tape.records
    assert one.hub.digest(0, one.hub.versions[0]) == two.hub.digest(0, two.hub.versions[0])


def test_a_changed_event_diverges_and_is_named() -> None:
    world = eventful(METHODS["decoupled"])
    header = world.syncer.header()
    header.pop("machine")
    records = world.tape.of("syncer")
    index = next(i for i, r in enumerate(records) if r.type == "MergeDone")
    changed = Record(
        records[index].t, "syncer", records[index].seq, "event", {**records[index].data, "finite": False}
    )
    divergence = replay(
        [*records[:index], changed, *records[index + 1 :]], SyncerMachine(world.syncer.policy, **header)
    )
    assert divergence is not None
    assert divergence.record.type == "MergeDone"
    assert "MergeDone" in str(divergence)
