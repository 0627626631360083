import pytest

from farflung.methods import Method, decoupled, diloco, streaming
from farflung.protocol import events as ev
from farflung.testing import World
from farflung.testing.world import trainer_of

METHODS = {
    "decoupled": decoupled(num_fragments=2, sync_every_steps=4, lease_s=1.0),
    "rebase": decoupled(num_fragments=2, sync_every_steps=4, lease_s=1.0, adoption="rebase"),
    "diloco": diloco(sync_every_steps=4, lease_s=1.0),
    "streaming": streaming(num_fragments=2, sync_every_steps=6, overlap_steps=1, lease_s=1.0),
}


def suspended(method: Method, at_s: float, **world: float) -> World:
    made = World(method, [0.1, 0.13, 0.2], 10**6, **world)  # type: ignore[arg-type]
    made.at(at_s, lambda: made.take(ev.StopRequested(mode="suspend")))
    return made.run()


def assert_nothing_is_lost(world: World) -> None:
    ledger = world.syncer.ledger
    assert world.finished == world.syncer.phase == "suspended", world.story()
    ledger.validate()
    assert ledger.in_flight > 0
    assert "learner_lost" not in ledger.discarded, world.story()
    reported = sum(
        r.data["message"]["tokens"]
        for r in world.tape.of("syncer")
        if r.type == "MessageArrived" and r.data["message"]["type"] == "Boundary"
    )
    assert ledger.tokens_trained == reported


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("at_s", [2.0, 2.51, 3.3])
def test_a_suspended_run_loses_nothing(name: str, at_s: float) -> None:
    assert_nothing_is_lost(suspended(METHODS[name], at_s))


def test_every_learner_saves_before_the_checkpoint_is_written() -> None:
    world = suspended(METHODS["decoupled"], 2.0)
    assert all(trainer_of(island).saved for island in world.islands), world.story()
    kinds = [
        r.data["message"]["type"] if r.type == "MessageArrived" else r.type for r in world.tape.of("syncer")
    ]
    assert kinds.count("Saved") == 3
    assert kinds.index("WriteCheckpoint") > max(i for i, kind in enumerate(kinds) if kind == "Saved")


def test_what_a_learner_still_holds_is_what_the_ledger_calls_in_flight() -> None:
    world = suspended(METHODS["decoupled"], 2.51, transfer_s=0.2)
    islands = [trainer_of(island).island for island in world.islands]
    held = sum(island.counters(p)[1] for island in islands for p in range(2))
    merged_but_not_adopted = sum(
        h.out.tokens for island in islands for h in island._held if h.out is not None and h.out.merged
    )
    assert world.syncer.ledger.in_flight == held - merged_but_not_adopted, world.story()


def test_a_link_that_breaks_while_the_run_is_suspended_loses_nothing() -> None:
    world = World(METHODS["decoupled"], [0.1, 0.13, 0.2], 10**6)
    world.at(2.0, lambda: world.take(ev.StopRequested(mode="suspend")))
    world.at(2.005, world.islands[0].cut)  # the request is on its way
    assert_nothing_is_lost(world.run())


def test_a_run_asked_to_stop_before_it_was_born_is_suspended_at_once() -> None:
    world = suspended(METHODS["decoupled"], 0.005)
    assert world.finished == "suspended", world.story()
    assert world.syncer.ledger.tokens_trained == 0


def test_a_run_asked_to_finish_hands_everything_in() -> None:
    world = World(METHODS["decoupled"], [0.1, 0.13, 0.2], 10**6)
    world.at(2.0, lambda: world.take(ev.StopRequested(mode="finish")))
    world.run()
    assert world.finished == "finished", world.story()
    assert world.syncer.ledger.in_flight == 0


def test_what_the_last_merges_made_is_announced_to_nobody() -> None:
    world = World(METHODS["decoupled"], [0.1, 0.13, 0.2], 10**6)
    world.at(2.0, lambda: world.take(ev.StopRequested(mode="finish")))
    world.run()
    syncer = world.tape.of("syncer")
    last = {(r.data["fragment"], r.data["version"]) for r in syncer if r.type == "Merge" and r.data["final"]}
    told = [r.data["message"] for r in syncer if r.type == "Send" and r.data["message"]["type"] == "Announce"]
    assert len(last) == 2 and told, world.story()
    assert not last & {(m["fragment"], m["version"]) for m in told}, world.story()
