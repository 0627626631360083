"""Nothing grows (P8): the machines alone through 1000 failed rounds and 200 changes of who takes part.

What is compared is all that can be reached from a machine, by path, after 20 to 40 changes and after 180 to 200:
a failure names the container that grows. What stays of every name ever seen is in STAYS, with its reason.
"""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from peer_helpers import BYTES, GossipDesk, Peer
from protocol_helpers import Desk, Island, of, said

from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import gathering, objects
from farflung.protocol import mailbox as box
from farflung.protocol import messages as msg
from farflung.protocol.admission import Admission
from farflung.protocol.learner import LearnerMachine
from farflung.protocol.merging import FATES_KEPT, Merging
from farflung.protocol.peer import PeerExchange
from farflung.protocol.policy import Policy
from farflung.protocol.rounds import Rounds
from farflung.testing import machine_faults as faults
from farflung.testing.growth import Census, census, grown, peak
from farflung.testing.machine_moves import deliver, ring, turn, work
from farflung.testing.machine_process import Process
from farflung.testing.machine_world import MachineWorld

CHANGES = 200  # of who takes part
ROUNDS = 1000  # that fail
P = 2  # fragments of the hub's methods

STAYS = {  # of every name ever seen: path, and the most entries of one name there and at each path below
    ".membership.members": 1,  # its number, which is its share of the data, for whenever it comes back
    ".membership.members[*]": P,  # data position, totals, what it held: a number or a digest a fragment
    ".membership._in_order": 1,  # the same members, sorted
    ".ledger.windows": 1,  # its tokens whose fate is open: a lapsed lease loses none
    ".ledger.windows[*]": P,
    ".merging.fates": P,  # its newest fates of each fragment, so that a repeat changes nothing
    ".merging.fates[*]": P * FATES_KEPT,
    ".merging.direct": 1,  # gossip: its bytes straight to partners, and from them
    ".merging.direct[*]": 2,
}
PASSING = "._out"  # what the last event caused


def growing(early: list[Census], late: list[Census], names: int = 0) -> dict[str, Any]:
    """Paths of a machine that grew although they should not, or above what a name may leave behind."""
    found: dict[str, Any] = {}
    for path, (before, after) in grown(peak(early), peak(late)).items():
        start = max((start for start in STAYS if path.startswith(start)), key=len, default="")
        if after > STAYS.get(start, 0) * names and not path.startswith(PASSING):
            found[path] = f"{before} before, {after} now"
    return found


class Watched:
    """Takes a census early and late in a soak of `changes`."""

    def __init__(self, changes: int) -> None:
        self.changes, self.early, self.late = changes, list[Census](), list[Census]()

    def look(self, change: int, *machines: Any) -> None:
        tenth = self.changes // 10
        if tenth <= change < 2 * tenth:
            self.early += [census(machine) for machine in machines]
        elif change >= 9 * tenth:
            self.late += [census(machine) for machine in machines]

    def growing(self, names: int = 0) -> dict[str, Any]:
        assert self.early and self.late
        return growing(self.early, self.late, names)


# ---- hub methods: syncer and learners ----------------------------------------------------------------------

METHODS: dict[str, dict[str, Any]] = {
    "free": {"quorum": 1, "throttle": False},
    "increments": {"quorum": 1, "throttle": False, "adoption": "rebase", "downlink_codec": "bf16"},
    "lockstep": {"quorum": "all", "pace": "lockstep"},
}
TROUBLE = [
    faults.cut, faults.freeze, faults.freeze, faults.pass_time, faults.repeat, faults.wrong_base,
    faults.wrong_base, faults.poison, faults.poison, faults.spoil_merge, faults.spoil_merge,
    faults.break_transfer, faults.break_transfer, faults.stall, faults.stall,
]  # fmt: skip
MOVES = [(0.67, deliver), (0.78, turn), (0.99, work), (1.0, ring)]  # what happens next, likely a message
CHOICES = {"free": 330, "lockstep": 430}  # of what happens, for each change


class HubSoak:
    """Real machines of a syncer and four learners that are never left alone."""

    def __init__(self, method: str, changes: int = CHANGES) -> None:
        plain = {
            "method": "soak",
            "num_fragments": P,
            "sync_every_steps": 2,
            "overlap_steps": 1,
            "lease_s": 1.0,
        }
        policy = Policy(**{**plain, **METHODS[method]})
        self.world = MachineWorld(policy, [0.05, 0.06, 0.08, 0.11], 10**12)
        self.draw = random.Random(3)
        self.names = len(self.world.processes)
        self.syncer, self.learners = Watched(changes), Watched(changes)
        self.failed: set[tuple[int, int]] = (
            set()
        )  # fragment and number of rounds with a contribution that failed
        self.ways: Counter[str] = Counter()
        for change in range(changes):
            self.befall(change)
            self.go_on(CHOICES[policy.pace])
            alive = [p.machine for p in self.world.processes if p.alive]
            self.syncer.look(change, self.world.syncer)
            self.learners.look(change, *alive)

    # ---- who takes part ------------------------------------------------------------------------------

    def befall(self, change: int) -> None:
        """The next change: five of eight leave a name behind for good, four of them without a word."""
        process = self.world.processes[change % 4]
        kind = change % 8
        if kind < 4:  # killed, and another name comes in its place
            newcomer = self.replaced(process)
            if (
                kind == 1
            ):  # ... which dies while it installs, and so does another one as soon as it has joined
                self.until(newcomer, "installing")
                newcomer = self.replaced(newcomer)
                self.until(newcomer, "joining")
                self.replaced(newcomer)
        elif kind == 4:
            self.tell(process, ev.TrainerGone(reason="crashed"))
            self.replaced(process)
        elif kind == 5:  # fenced by a new process of its name
            process.stop()
            process.start()
        elif kind == 6:
            self.tell(process, ev.Reported(report=box.Ended(reason="enough")))
            process.start()
        else:  # frozen until its lease lapses
            process.frozen = True
            self.go_on(10)
            self.world.now += 1.5 * self.world.policy.lease_s

    def tell(self, process: Process, event: ev.LearnerEvent) -> None:
        process.frozen = False
        if process.alive:
            self.world.feed(process, event)
            self.go_on(10)
        if process.alive:
            process.stop()

    def replaced(self, process: Process) -> Process:
        """Killed for good; a learner with a name of its own begins."""
        if process.alive:
            process.stop(keep_up=self.draw.randrange(3))
        newcomer = Process(f"n{self.names}", self.world, self.draw.uniform(0.04, 0.12))
        self.names += 1
        self.world.processes[self.world.processes.index(process)] = newcomer
        newcomer.start()
        return newcomer

    def until(self, process: Process, phase: str) -> None:
        """Let things happen until a learner is so far, or longer than that takes."""
        for _ in range(300):
            if process.machine.phase == phase:
                return
            self.move()

    # ---- what happens --------------------------------------------------------------------------------

    def move(self) -> None:
        kind, which = self.draw.random(), self.draw.random()
        first = next(i for i, (share, _) in enumerate(MOVES) if kind < share)
        any(MOVES[(first + i) % len(MOVES)][1](self.world, which) for i in range(len(MOVES)))

    def go_on(self, choices: int) -> None:
        """Many choices, some of them trouble; now and then what hangs goes on, and who died by itself is back."""
        for choice in range(choices):
            if self.draw.random() < 0.08:
                self.draw.choice(TROUBLE)(self.world, self.draw.random(), self.draw.random(), 0.0)
            self.move()
            if choice % 50 == 0:
                self.world.go_on()
                for process in self.world.processes:
                    if not process.alive:
                        process.start()
        self.listen()

    def listen(self) -> None:
        """Count what failed, and forget the story."""
        for _, _, event, actions in self.world.log:
            if isinstance(event, ev.UploadFailed):
                self.ways["upload failed"] += 1
            for action in actions:
                if isinstance(action, act.CancelUpload):
                    self.ways["upload cancelled"] += 1
                elif isinstance(action, act.Note):
                    self.ways[action.kind] += 1
                elif isinstance(action, act.Send) and isinstance(action.message, msg.FateOf):
                    self.told(action.message)
        self.world.log.clear()

    def told(self, message: msg.FateOf) -> None:
        if message.fate != "merged":
            self.failed.add((message.fragment, message.round))
            self.ways[f"{message.fate}: {message.reason.split()[0]}"] += 1


WAYS = [
    "rejected: non_finite", "rejected: base", "rejected: merge_not_finite", "late: the", "stale_base: base",
    "upload failed", "upload cancelled", "lost", "left", "lease_lapsed", "start_over", "rejoin_proved",
]  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_a_syncer_and_its_learners_stay_as_small_as_they_were(method: str) -> None:
    soak = HubSoak(method)
    assert not soak.syncer.growing(soak.names)
    assert not soak.learners.growing()
    assert len(soak.failed) >= ROUNDS
    assert soak.names > CHANGES / 2 and soak.world.lives > CHANGES
    assert all(soak.ways[way] >= 3 for way in WAYS), soak.ways


# ---- hub methods: one learner that lives through all of it -------------------------------------------------


class LongLife(Island):
    """One process of a learner: whatever can fail in a round does; it may start over now and then."""

    def __init__(self, starts_over: bool, changes: int = CHANGES) -> None:
        super().__init__(num_fragments=1, max_lead_steps=4)
        self.training()
        self.life, self.version, self.number, self.failed = 1, 0, 0, 0
        self.watched, waiting = Watched(changes), 0
        for change in range(changes):
            for way in range(ROUNDS // CHANGES):
                self.fail((change + way) % 8)
            waiting = max(waiting, len(self.machine.unacked))
            self.change(change % 4 if starts_over else 1 + 2 * (change % 2))
            self.tape.records.clear()
            self.watched.look(change, self.machine)
        self.waiting = waiting  # boundary reports that the hub had not acknowledged, at most

    def fail(self, way: int) -> None:
        """A round whose contribution comes to nothing, each time in another way."""
        self.now += 1.0
        self.number += 1
        self.failed += 1
        number, name = self.number, objects.contribution("a", self.life, 0, self.number)
        self.hear(msg.Invite(fragment=0, round=number))
        if way == 0:  # asked again for a later round before anything was taken
            return
        self.boundary(taken=[box.Taken(fragment=0, round=number, base_version=self.version, steps=1, tokens=10,
                                       num_bytes=4)])  # fmt: skip
        if way == 1:
            self.take(ev.UploadFailed(object=name, reason="refused (size)"))
        elif way == 2:  # cut in the middle: the next invitation finds it on its way
            return
        else:
            self.take(ev.Uploaded(object=name))
        fates: dict[int, msg.Fate] = {3: "late", 4: "stale_base", 5: "rejected", 6: "merged"}
        if way in fates:
            self.hear(msg.FateOf(fragment=0, round=number, fate=fates[way]))
        if way == 6:  # its merge is announced, and is gone before it was fetched
            self.version += 1
            self.announce(self.version, included=number)
            self.take(ev.FetchFailed(fragment=0, version=self.version, reason="cut"))
            self.take(ev.TimerFired(name="fetch.0"))
            self.version += 1
            self.announce(self.version, included=number)
            self.take(ev.FetchFailed(fragment=0, version=self.version - 1, reason="gone", gone=True))
            self.take(ev.Fetched(fragment=0, version=self.version))
            self.boundary(adopted=[(0, self.version)])
        elif way == 7:  # the link breaks before its fate is told
            self.take(ev.LinkDown(reason="cut"))
            self.boundary()
            self.take(ev.LinkUp())
            self.welcome(self.life)
            self.hear(msg.Reattached(installed=True, sequence=self.machine.sequence, syncer_step=0))
            self.hear(msg.FateOf(fragment=0, round=number, fate="late", reason="repeat"))

    def change(self, kind: int) -> None:
        """It, or another learner, goes and comes."""
        if kind == 0:
            self.hear(msg.Stop(reason="reset"))
            self.join()
        elif kind == 1:  # a joiner wants its inner state, and another one while it is busy
            self.hear(msg.Donate(transfer=f"x.{self.number}.a"))
            self.hear(msg.Donate(transfer=f"y.{self.number}.a"))
            donated = box.Donated(
                transfer=f"x.{self.number}.a", num_bytes=4, digest="d", lr=0.1, step=self.step
            )
            self.report(donated)
            self.take(ev.Uploaded(object=objects.state(donated.transfer)))
        elif kind == 2:  # what it is to install is gone, so it begins again
            self.hear(msg.Stop(reason="reset"))
            self.life += 1
            self.welcome(self.life)
            self.asked()
            self.take(ev.FetchFailed(fragment=0, version=self.version, reason="gone", gone=True))
            self.join()
        else:
            self.hear(msg.Progress(tokens=10, sequence=self.machine.sequence))

    def join(self) -> None:
        self.life += 1
        self.welcome(self.life)
        self.asked()
        self.take(ev.Fetched(fragment=0, version=self.version))
        self.step = 0
        self.report(
            box.Loaded(versions=[self.version], digests=["d"], inner_digest=None, lr=None, cursor=0, step=0)
        )

    def asked(self) -> None:
        plain = {"cursor": 0, "step": 0, "syncer_step": 0, "state": None, "reason": "rejoin"}
        self.hear(msg.Install(versions=[self.version], **plain))


@pytest.mark.parametrize("starts_over", [False, True])
def test_a_learner_that_lives_through_all_of_it_stays_as_small_as_it_was(starts_over: bool) -> None:
    life = LongLife(starts_over)
    assert not life.watched.growing()
    assert life.failed == ROUNDS and life.machine.phase == "training"
    assert life.life > CHANGES / 2 if starts_over else life.life == 1
    assert life.waiting < 64


def test_reports_wait_for_a_hub_that_is_away_one_a_step_and_no_longer_than_it_is() -> None:
    """So no token is lost from the books (P9): the one thing that grows, with how long the hub is away."""
    island = Island(num_fragments=1).training()
    counts = []
    for steps in (10, 1000):
        island.take(ev.LinkDown(reason="the hub is away"))
        for _ in range(steps):
            island.boundary()
        counts.append(len(island.machine.unacked))
        island.take(ev.LinkUp())
        island.welcome()
        island.hear(msg.Reattached(installed=True, sequence=island.machine.sequence, syncer_step=0))
        assert not island.machine.unacked
    assert counts == [10, 1000]


# ---- gossip: the hub -----------------------------------------------------------------------------------------


class GossipHub(GossipDesk):
    """A hub whose learners come, go and miss each other, and of whose averages little comes."""

    def __init__(self, changes: int = CHANGES) -> None:
        super().__init__("n0", "n1", "n2", "n3", gathers=99_999, budget_tokens=10**7)  # one each 100 tokens
        self.here, self.names, self.moves, self.number, self.failed = list(self.lines), 4, 0, 0, 0
        self.watched = Watched(changes)
        for change in range(changes):
            self.befall(change)
            for way in range(ROUNDS // CHANGES):
                self.miss((change + way) % 6)
            self.show(change % 5)
            self.tape.records.clear()
            self.watched.look(change, self.machine)

    def befall(self, change: int) -> None:
        """Another name in place of one that left, crashed or fell silent; or the same one anew, or elsewhere."""
        name = self.here[change % 4]
        kind = change % 6
        if kind == 0:
            self.say(name, msg.Leave(reason="enough"))
        elif kind == 1:
            self.say(name, msg.TrainerLost(reason="crashed"))
        elif kind in (2, 3):  # not a word, and its link ends before or after its lease
            if kind == 2:
                self.lose(name)
            others = [one for one in self.here if one != name]
            self.wait(4.0, *others)
            self.wait(4.0, *others)
        elif kind == 4:
            self.enter(name)
            return
        else:
            self.join(name, incarnation=self.member(name).incarnation, address=f"//{name}.{change}")
            return
        if kind != 2:
            self.lose(name)
        if kind == 3:  # one that comes goes no further than that
            self.join(f"n{self.names}", address="//gone")
            self.lose(f"n{self.names}")
            self.names += 1
        self.here[change % 4] = f"n{self.names}"
        self.names += 1
        self.enter(self.here[change % 4])

    def enter(self, name: str) -> None:
        """Join, with the state of whichever donor there is, and prove it."""
        actions = self.join(name, address=f"//{name}")
        for donate in said(actions, msg.Donate):
            donor = donate.transfer.rpartition(".")[2]
            ready = {"num_bytes": 4, "digest": "d", "lr": 0.1, "step": 1, "held": [0]}
            self.say(donor, msg.StateReady(transfer=donate.transfer, **ready))
        self.install(name)

    def lose(self, name: str) -> None:
        """Its link breaks, and it is not heard again."""
        self.take(ev.Disconnected(connection=self.lines[name], reason="cut"))

    def miss(self, way: int) -> None:
        """A round of which something fails at each learner."""
        self.now += 1.0
        self.number = self.machine.merging.round + 1  # type: ignore[attr-defined]
        self.failed += 1
        a, b, c, d = self.here
        pairs = {a: b, b: a, c: d, d: c}
        for name, partner in pairs.items():
            if way == 3 and name in (b, d):
                continue  # only one side tells
            why = ["deadline", "lost", "", "unreachable", "late", ""][way]
            if way == 2 and name == a:
                why = "deadline"  # half of an exchange
            meeting = msg.Meeting(partner=partner, missed=why)
            round = self.number + 5000 * (way == 5)  # a number that cannot be
            self.ended(name, round, meetings=[meeting], number=self.gathering.epoch, bytes_up=7, bytes_down=7)
        name = objects.offer(self.gathering.epoch, self.number, a, b)
        self.say(a, msg.Relay(partner=b, object=name, num_bytes=BYTES))
        self.say(b, msg.Relayed(partner=a, object=name, refusal="late"))
        gone = objects.offer(
            self.gathering.epoch, self.number, c, "n0" if "n0" not in self.here else "nobody"
        )
        self.say(c, msg.Relay(partner=gone.split(".")[4], object=gone, num_bytes=BYTES))

    def show(self, way: int) -> None:
        """The average that is due: not finite, of one learner, given up, or its contributions are refused."""
        number = self.open_round(0)
        if number is None:
            return
        base = self.machine.merging.versions[0]
        if way < 2:
            merges = [m for name in self.here for m in of(self.send(name, number, base=base), act.Merge)]
        else:
            found: dict[str, Any] = [{"problem": "missing: cut"}, {"finite": False}, {}][way - 2]
            self.send(self.here[0], number, base=base, **found)
            self.send(self.here[1], number + 1, base=base)
            self.now += self.policy.lease_s
            for name in self.here:
                self.say(name, msg.Heartbeat())
            merges = of(self.take(ev.TimerFired(name="round.0")), act.Merge)
        for merge in merges:
            self.merged(merge, finite=way != 1)


def test_a_gossip_hub_stays_as_small_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "SIDES_KEPT", 32)  # full before the first census
    hub = GossipHub()
    assert not hub.watched.growing(hub.names)
    assert hub.names > CHANGES / 2 and hub.failed == ROUNDS
    found = hub.gathering
    assert found.epoch > CHANGES / 2 and found.versions[0] > 50
    assert found.half_exchanges > 100 and found.meetings > 100
    assert set(found.missed) == {"deadline", "lost", "unreachable", "late"}
    assert set(hub.machine.refused) >= {"round", "missing", "non_finite"}


# ---- gossip: a learner ---------------------------------------------------------------------------------------


class GossipLife(Peer):
    """One process of a learner that meets another name after every change, and misses it in every round."""

    def __init__(self, changes: int = CHANGES) -> None:
        super().__init__()
        self.training()
        self.life, self.epochs, self.round, self.failed = 1, 0, -1, 0
        self.watched, self.misses = Watched(changes), Counter[str]()
        for change in range(changes):
            self.partner = f"b{change}"
            self.assemble()
            for way in range(ROUNDS // CHANGES):
                self.miss((change + way) % 11)
            self.tape.records.clear()
            self.watched.look(change, self.machine)

    def assemble(self, *also: str) -> list[act.LearnerAction]:
        """An epoch of a and its partner, or of others too."""
        self.epochs += 1
        names = sorted(["a", self.partner, *also])
        peers = [msg.Peer(name=name, address=f"//{name}") for name in names]
        return self.hear(msg.Epoch(number=self.epochs, round=0, seed=7, members=peers))

    def coming(self, round: int) -> str:
        """The vector of its partner for a round."""
        return objects.offer(self.meeting.epoch, round, self.partner, "a")

    def offered(self, round: int) -> str:
        return objects.offer(self.meeting.epoch, round, "a", self.partner)

    def miss(self, way: int) -> None:
        """A round in which nothing comes of the meeting, each time in another way."""
        if (
            self.partner not in self.meeting.partners
        ):  # one of three idles, or the round of an earlier partner
            self.end()
        self.failed += 1
        self.now += 1.0
        round = self.meeting.round
        ours, theirs = self.offered(round), self.coming(round)
        if way == 10:  # its own numbers are broken: it starts over
            self.boundary()
            self.take_offer(round, finite=False)
            self.start_over()
            return
        if way == 4:  # what comes early waits for its round, and its sender leaves before that
            self.knock(self.coming(round + 1))
            self.knock(objects.offer(self.epochs, round + 1, "stranger", "a"))
        self.stand(round)
        unreachable = ev.UploadFailed(object=ours, reason="no route")
        if way == 1:
            self.take(ev.UploadFailed(object=ours, reason="ended", refusal="ended"))
        elif way == 2:  # through the hub, which cannot reach it either
            self.take(unreachable)
            self.take(ev.Uploaded(object=ours))
            self.hear(msg.Relayed(partner=self.partner, object=ours, refusal="unreachable"))
        elif way == 3:  # too early there, again and again
            for _ in range(4):
                self.take(ev.UploadFailed(object=ours, reason="early", refusal="early"))
                self.now += 0.2
                self.take(ev.TimerFired(name=f"offer.{round}.{self.partner}"))
        elif way == 4:
            self.partner += "x"
            self.assemble()
        elif way == 5:  # arrives in the middle of the deadline's last moment, and ours does not
            self.knock(theirs)
            self.take(ev.Arrived(object=theirs, num_bytes=BYTES))
        elif way == 6:  # comes through the hub, which has lost it
            self.hear(msg.Relay(partner=self.partner, object=theirs, num_bytes=BYTES))
            self.take(ev.RelayFailed(object=theirs, reason="gone"))
        elif way == 7:  # half of it came
            self.knock(theirs)
        elif way == 8:  # without the hub, too
            self.take(ev.LinkDown(reason="cut"))
            self.take(unreachable)
            self.take(ev.LinkUp())
            self.welcome(self.life)
            self.hear(msg.Reattached(installed=True, sequence=self.machine.sequence, syncer_step=0))
        elif way == 9:  # the hub wants to see its parameters, and then others before they came
            for shown in (round, round + 1):
                self.hear(msg.Invite(fragment=0, round=shown))
                self.report(box.Shown(round=shown, final=False, steps=2, tokens=20, num_bytes=BYTES))
        self.end()

    def end(self) -> None:
        """The deadline passes, where one still runs; the round is mixed without its partner."""
        meeting = self.meeting
        if meeting.partners and not meeting.mixing:
            if meeting.waits_since_s is None:
                self.stand(meeting.round)
            self.now = max(self.now, meeting.until_s or 0.0)
            self.take(ev.TimerFired(name="meet"))
        elif not meeting.partners:
            self.boundary()
            self.boundary()
        self.misses.update(partner.missed for partner in meeting.partners.values())
        self.mix(meeting.round)
        self.hear(msg.Progress(tokens=0, sequence=self.machine.sequence))

    def start_over(self) -> None:
        self.life += 1
        self.step = 0
        self.welcome(self.life)
        self.install([0])
        self.assemble()


def test_a_gossip_learner_stays_as_small_as_it_was() -> None:
    life = GossipLife()
    assert not life.watched.growing()
    assert life.failed == ROUNDS and life.epochs > CHANGES and life.life > 50
    assert set(life.misses) >= {"deadline", "ended", "unreachable", "lost"}, life.misses


# ---- what a joiner leaves behind ----------------------------------------------------------------------------


def with_joiners(*joiners: str) -> Desk:
    """They were told to install version 1, with a donor's state; since then six more were made without them."""
    desk = Desk("a", "b", num_fragments=1, quorum=2, grace_gamma=0.0, throttle=False)
    for name in desk.lines:
        desk.boundary(name)
    merge(desk)
    donations = [d for name in joiners for d in said(desk.join(name), msg.Donate)]
    for donation in donations:
        ready = {"num_bytes": 4, "digest": "inner", "lr": 0.1, "step": 1, "held": [1]}
        desk.say(donation.transfer.split(".")[2], msg.StateReady(transfer=donation.transfer, **ready))
    for _ in range(6):
        merge(desk)
    assert desk.machine.merging.kept[0] == [1, 4, 5, 6, 7] and len(desk.machine.admission.transfers) == len(
        joiners
    )
    return desk


def merge(desk: Desk) -> None:
    """A round of a and b, half a second long; all others are heard."""
    desk.now += 0.5
    desk.merged(desk.round("a", "b"))
    for name in desk.lines:
        if name in "ab":
            desk.boundary(name, adopted=[(0, desk.machine.merging.versions[0])])
        else:
            desk.say(name, msg.Heartbeat())


def prove(desk: Desk, name: str) -> list[act.SyncerAction]:
    proof = {"versions": [1], "digests": ["0.1"], "inner_digest": "inner", "lr": 0.1}
    return desk.say(name, msg.Installed(**proof, cursor=0, step=0))


def test_for_a_joiner_whose_link_broke_nothing_is_kept() -> None:
    """It joins anew when it is back; what it has installed before it may still prove."""
    desk = with_joiners("c")
    actions = desk.take(ev.Disconnected(connection=desk.lines["c"], reason="cut"))
    assert [a.version for a in of(actions, act.Retire)] == [1], desk.story()
    assert [a.transfer.split(".")[:2] for a in of(actions, act.DiscardState)] == [["c", "1"]]
    assert not desk.machine.admission.transfers
    desk.join("c", incarnation=1)
    prove(desk, "c")
    assert desk.member("c").state == "training", desk.story()


def test_a_joiner_that_falls_silent_loses_its_link_and_what_was_kept_for_it() -> None:
    desk = with_joiners("c")
    desk.wait(4.9, "a", "b")
    assert desk.machine.admission.transfers and 1 in desk.machine.merging.kept[0]
    desk.now += 0.2
    actions = desk.take(ev.TimerFired(name="lease"))
    assert [a.connection for a in of(actions, act.HangUp)] == [desk.lines["c"]], desk.story()
    assert [a.version for a in of(actions, act.Retire)] == [1]
    assert not desk.machine.admission.transfers


def test_the_base_of_what_waits_for_its_merge_stays_when_no_joiner_needs_it_any_more() -> None:
    """Two joiners installed the same old version, and one has contributed before the other is done."""
    desk = with_joiners("c", "d")
    prove(desk, "c")
    desk.boundary("c")
    number = desk.open_round(0)
    assert number is not None
    desk.contribute("c", number, base=1)
    assert not [a for a in of(prove(desk, "d"), act.Retire) if a.version == 1], desk.story()
    (asked,) = of(desk.contribute("a", number, base=7), act.Merge)
    assert {part.base_version for part in asked.parts} == {1, 7}
    assert 1 in [a.version for a in of(desk.merged(asked), act.Retire)]


# ---- it would be seen ----------------------------------------------------------------------------------------

Patch = Callable[[Any, str, Any], None]
FEW = 100  # changes


def fates_of_former_lives(patch: Patch) -> None:
    patch(Merging, "forget_fates", lambda self, learner: None)


def versions_for_joiners_that_are_gone(patch: Patch) -> None:
    def needed(self: Merging, fragment: int) -> set[int]:
        present = self.hub.membership.present()
        return {m.expected.versions[fragment] for m in present if m.expected is not None}

    patch(Merging, "_needed_versions", needed)


def states_for_joiners_that_are_gone(patch: Patch) -> None:
    def unlinked(self: Admission, member: Any) -> None:
        for fragment in range(P):
            self.hub.merging.retire(fragment)

    patch(Admission, "unlinked", unlinked)


def invitations_of_the_dead(patch: Patch) -> None:
    """All who were ever invited are asked once more in every round."""
    start, asked = Rounds.start, dict[int, dict[str, float]]()

    def invite(self: Rounds, *args: Any) -> Any:
        round = start(self, *args)
        round.invited = asked.setdefault(id(self), round.invited)
        return round

    patch(Rounds, "start", invite)


def reports_that_are_acknowledged(patch: Patch) -> None:
    patch(LearnerMachine, "_acknowledge", lambda self, sequence: None)


def meetings_that_only_one_side_told(patch: Patch) -> None:
    patch(gathering, "SIDES_KEPT", 10**9)


def misses_of_partners_that_left(patch: Patch) -> None:
    told = PeerExchange.told

    def remember(self: PeerExchange, message: msg.Epoch) -> None:
        before = self.misses
        told(self, message)
        self.misses = before | self.misses

    patch(PeerExchange, "told", remember)


def hub_soak(method: str) -> dict[str, Any]:
    soak = HubSoak(method, FEW)
    return soak.syncer.growing(soak.names)


def gossip_soak() -> dict[str, Any]:
    hub = GossipHub(FEW)
    return hub.watched.growing(hub.names)


LEAKS: list[tuple[Callable[[Patch], None], Callable[[], dict[str, Any]], str]] = [
    (fates_of_former_lives, lambda: hub_soak("lockstep"), ".merging.fates[*]"),
    (versions_for_joiners_that_are_gone, lambda: hub_soak("free"), ".merging.kept[*]"),
    (states_for_joiners_that_are_gone, lambda: hub_soak("free"), ".admission.transfers[*]"),
    (invitations_of_the_dead, lambda: hub_soak("free"), ".merging.rounds.open[*].invited"),
    (meetings_that_only_one_side_told, gossip_soak, ".merging._sides"),
    (reports_that_are_acknowledged, lambda: LongLife(False, FEW).watched.growing(), ".unacked"),
    (misses_of_partners_that_left, lambda: GossipLife(FEW).watched.growing(), ".exchange.misses"),
]


@pytest.mark.parametrize(("leak", "soak", "path"), LEAKS, ids=[leak.__name__ for leak, _, _ in LEAKS])
def test_what_is_kept_by_mistake_is_seen_and_named(
    leak: Callable[[Patch], None],
    soak: Callable[[], dict[str, Any]],
    path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gathering, "SIDES_KEPT", 32)
    leak(monkeypatch.setattr)
    assert path in soak()
