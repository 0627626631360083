"""A gossip run's hub stops and goes on: what it knows survives, and its members come back into a new epoch."""

import json

from farflung.methods import decoupled, gasloc
from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import messages as msg
from farflung.protocol import snapshot
from farflung.protocol.syncer import SyncerMachine

POLICY = gasloc(lease_s=10.0).policy


def machine(policy=POLICY):
    return SyncerMachine(policy, run="r", num_learners=2, budget_tokens=1000)


def stopped():
    """A machine in its fourth epoch, which two learners had saved in."""
    old = machine()
    old.phase, old.admission.fingerprint, old.admission.layout = "suspended", "f", "l"
    gathering = old.merging
    gathering.versions, gathering.kept, gathering.digests = [3], [[3]], {(0, 3): "d"}
    gathering.epoch, gathering.round, gathering.gathered, gathering.half_exchanges = 4, 17, 3, 1
    gathering.meetings, gathering.missed, gathering.distance = 30, {"late": 2}, 0.5
    gathering.direct = {"ada": (3, 8), "bob": (4, 0)}
    for connection, name in enumerate(("ada", "bob")):
        member = old.membership.enter(name, connection)
        member.state, member.address, member.held, member.announced = "saved", f"http://{name}:1", [3], [3]
    return old


def back(hub, name, connection, address, now):
    """A learner reattaches; returns the epochs that the hub sends, by connection."""
    join = msg.Join(
        protocol=msg.PROTOCOL, run="r", learner=name, fingerprint="f", layout="l",
        method=hub.admission.method_digest, incarnation=1, held=[3], address=address,
    )  # fmt: skip
    hub.handle(ev.Connected(connection=connection), now)
    actions = hub.handle(ev.MessageArrived(connection=connection, message=join), now)
    sent = [a for a in actions if isinstance(a, act.Send) and isinstance(a.message, msg.Epoch)]
    return {a.connection: a.message for a in sent}


def test_what_the_hub_knew_survives_a_stop():
    saved = snapshot.decode(snapshot.encode(snapshot.snapshot(stopped())))
    new = machine()
    snapshot.restore(new, saved, now=100.0)
    gathering = new.merging
    assert (gathering.epoch, gathering.round, gathering.gathered, gathering.half_exchanges) == (4, 17, 3, 1)
    assert (gathering.meetings, gathering.missed, gathering.distance) == (30, {"late": 2}, 0.5)
    assert (gathering.bytes_up, gathering.bytes_down) == (7, 8)
    assert "restored" in new.header() and snapshot.snapshot(new).gathering == saved.gathering


def test_an_epoch_begins_when_all_are_back_and_names_where_they_listen_now():
    new = machine()
    snapshot.restore(new, snapshot.snapshot(stopped()), now=100.0)
    assert back(new, "ada", 1, "http://ada:2", 101.0) == {}
    epochs = back(new, "bob", 2, "http://bob:2", 102.0)
    assert sorted(epochs) == [1, 2] and epochs[1].number == 5 and epochs[1].round == 19
    assert [p.address for p in epochs[1].members] == ["http://ada:2", "http://bob:2"]


def test_who_does_not_come_back_is_waited_for_one_lease():
    new = machine()
    snapshot.restore(new, snapshot.snapshot(stopped()), now=100.0)
    assert back(new, "ada", 1, "http://ada:2", 101.0) == {}
    new.handle(ev.MessageArrived(connection=1, message=msg.Heartbeat()), 111.0)
    actions = new.handle(ev.TimerFired(name="lease"), 111.5)
    (epoch,) = [a.message for a in actions if isinstance(a, act.Send) and isinstance(a.message, msg.Epoch)]
    assert [p.name for p in epoch.members] == ["ada"]


def test_a_learner_that_is_to_be_dialled_elsewhere_begins_an_epoch():
    new = machine()
    snapshot.restore(new, snapshot.snapshot(stopped()), now=100.0)
    back(new, "ada", 1, "http://ada:2", 101.0)
    back(new, "bob", 2, "http://bob:2", 102.0)
    new.handle(ev.Disconnected(connection=1), 103.0)
    same = back(new, "ada", 3, "http://ada:2", 104.0)
    assert {m.number for m in same.values()} == {5} and list(same) == [3]
    epochs = back(new, "ada", 4, "http://ada:9", 105.0)
    assert {m.number for m in epochs.values()} == {6} and 2 in epochs


def test_snapshots_of_before_can_be_read():
    saved = json.loads(snapshot.encode(snapshot.snapshot(machine(decoupled().policy))))
    assert saved.pop("gathering") is None
    old = snapshot.decode(json.dumps(saved).encode())
    snapshot.restore(machine(decoupled().policy), old, now=0.0)
    saved = json.loads(snapshot.encode(snapshot.snapshot(stopped())))
    del saved["gathering"]
    new = machine()
    snapshot.restore(new, snapshot.decode(json.dumps(saved).encode()), now=0.0)
    assert new.merging.epoch == 0
