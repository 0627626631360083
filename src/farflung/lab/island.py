"""One learner under virtual time: real machine and trainer in a pretended process, on a pretended link."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farflung.engine.own_state import own_names
from farflung.lab.body import Body
from farflung.lab.in_flight import InFlight
from farflung.lab.offers import Offers
from farflung.lab.trouble import LinkTrouble
from farflung.lab.virtual_time import Timers, What
from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import mailbox as box
from farflung.protocol import objects
from farflung.protocol.learner import LearnerMachine

if TYPE_CHECKING:
    from farflung.lab.virtual_run import VirtualRun

RECONNECT_S = 0.2  # from a lost link to the next attempt
RETRY_S = 0.1  # an upload without a link


def download_name(action: act.Fetch) -> str:
    return objects.download(action.fragment, action.version, action.base_version)


class VirtualIsland:
    """Process, sidecar and mailbox of one learner. A restarted process is a new `generation`.

    Args:
        name: the learner's, the same after a restart.
        run: where it lives.
    """

    def __init__(self, name: str, run: VirtualRun) -> None:
        self.name, self.run = name, run
        self.alive = False
        self.generation = 0
        self.connection: int | None = None
        self.slowdown = 1.0  # its steps take so many times longer
        self.trouble = LinkTrouble()  # of its link
        self._skew_s = 0.0  # how far its clock is ahead
        self._frozen_until_s: float | None = None
        self._frozen_since_s = 0.0
        self._stood_s = 0.0  # so long its process was frozen, in all
        self._backlog: list[What] = []  # what a frozen process will find when it goes on
        self.finished: str | None = None  # why it ended by itself
        self.body: Body | None = None
        self.offers = Offers(self)

    @property
    def node(self) -> str:
        """Its name on the tape."""
        return self.name if self.generation == 1 else f"{self.name}.{self.generation}"

    # ---- what may befall it --------------------------------------------------------------------------

    def start(self) -> None:
        """A new process: fresh model, empty slots, and a Join as soon as the link is up."""
        self.generation += 1
        self.alive, self.busy, self.finished = True, False, None
        self._frozen_until_s, self._backlog, self._stood_s = None, [], 0.0
        self.cancelled: set[str] = set()
        self.in_flight = {"up": InFlight(), "down": InFlight()}
        self._fetching: dict[int, act.Fetch] = {}  # the newest download of each fragment
        self._posted = False
        generation = self.generation
        self.timers = Timers(
            self.run.time, lambda name, late_s: self._timer_fired(generation, name, late_s), self._skew_s
        )
        former, self.body = self.body, self.run.make_body(self)
        if former is not None:
            self.body.inherit(former)
            former.close()
        policy = self.run.method.policy
        where: dict[str, Any] = {}
        if policy.topology == "gossip":
            hidden = self.name in self.run.hidden
            where = {"address": None if hidden else f"lab://{self.name}", "mbps": self.run.mbps(self)}
        self.machine = LearnerMachine(policy, learner=self.name, **where)
        self.run.tape.open(self.node, self.machine)
        self.feed(ev.Reported(report=self._ready()))
        self.link_up()

    def kill(self) -> None:
        """The process and its sidecar are gone; the syncer sees the connection close."""
        self.alive = False
        for direction, line in self.in_flight.items():
            for name, num_bytes in line.end_all(self.run.now).items():
                self.run.count(self, direction, name, num_bytes)
        self._hang_up()

    def cut(self) -> None:
        """The link breaks: whatever is on its way is lost, and the driver dials again."""
        if self.alive and self.connection is not None:
            self._hang_up()
            self.feed(ev.LinkDown(reason="cut"))

    def jump(self, by_s: float) -> None:
        """The clock that drives it leaps ahead."""
        self._skew_s += by_s
        if self.alive:
            self.timers.jump(by_s)

    def freeze(self, for_s: float) -> None:
        """Process and sidecar stand still."""
        if self.alive:
            if self._frozen_until_s is None:
                self._frozen_since_s = self.run.now
            self._frozen_until_s = self.run.now + for_s
            self.run.time.after(for_s, self._thaw)

    @property
    def frozen(self) -> bool:
        return self._frozen_until_s is not None

    def _thaw(self) -> None:
        if self._frozen_until_s is not None and self._frozen_until_s <= self.run.now:
            self._frozen_until_s = None
            self._stood_s += self.run.now - self._frozen_since_s
            backlog, self._backlog = self._backlog, []
            for what in backlog:
                what()

    def link_up(self) -> None:
        if self.connection is not None:
            return
        if not self.run.reachable(self):
            self.later(RECONNECT_S, self.link_up)
            return
        self.connection = self.run.connect(self)
        self.feed(ev.LinkUp())

    def _hang_up(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            self.run.disconnected(connection)

    # ---- its machine ---------------------------------------------------------------------------------

    def feed(self, event: ev.LearnerEvent) -> None:
        """Let the machine take an event, and perform what it asks for."""
        if self._frozen_until_s is not None:
            self._backlog.append(lambda: self.feed(event))
        elif self.alive:
            for action in self.run.tape.handle(self.node, self.machine, event, self.timers.now):
                self._perform(action)

    def when_awake(self, what: What) -> None:
        """Now, or when a frozen process goes on."""
        if self._frozen_until_s is not None:
            self._backlog.append(what)
        else:
            what()

    def later(self, delay_s: float, what: What) -> None:
        generation = self.generation

        def run() -> None:
            if not self.alive or self.generation != generation:
                return
            if self._frozen_until_s is not None:
                self._backlog.append(run)
            else:
                what()

        self.run.time.after(delay_s, run)

    def _perform(self, action: act.LearnerAction) -> None:
        match action:
            case act.Say():
                self.run.say(self, action.message)
            case act.Post():
                self.trainer.take(action.command)
                self._posted = True
                self.later(0.0, self._turn)
            case act.Fetch():
                if (older := self._fetching.get(action.fragment)) is not None:
                    self._given_up("down", download_name(older))
                self._fetching[action.fragment] = action
                name, num_bytes = download_name(action), self._download_size(action)
                self._bulk("down", name, num_bytes, lambda: self._fetch(action))
            case act.FetchState():
                name = objects.state(action.transfer)
                self._bulk("down", name, action.num_bytes, lambda: self._fetch_state(action))
            case act.Upload():
                self.cancelled.discard(action.object)
                self._bulk("up", action.object, action.num_bytes, lambda: self._upload(action))
            case act.CancelUpload():
                self.cancelled.add(action.object)
                self._given_up("up", action.object)
                self.offers.cancel(action.object)
            case act.Offer():
                self.cancelled.discard(action.object)
                self.offers.offer(action)
            case act.Admit():
                self.offers.admitted = action
            case act.FetchRelay():
                self.later(self.run.bulk_s(self, "down", action.num_bytes), lambda: self.offers.fetch(action))
            case act.Unexpect():
                self.offers.unexpect(action.object)
            case act.SetTimer():
                self.timers.set(action)
            case act.Connect():
                self.later(RECONNECT_S, self.link_up)
            case act.Exit():
                self.finished = action.reason
                self.run.exited(self, action.ok)
            case act.Note():
                pass

    def _timer_fired(self, generation: int, name: str, late_s: float) -> None:
        if generation == self.generation:  # a restarted process has timers of its own
            self.feed(ev.TimerFired(name=name, late_s=late_s))

    @property
    def trainer(self) -> Body:
        assert self.body is not None, f"{self.name} was never started"
        return self.body

    # ---- bulk ----------------------------------------------------------------------------------------

    def _bulk(self, direction: str, name: str, num_bytes: int, what: What) -> None:
        """An object sets out; `what` when it has arrived."""
        takes_s = self.run.bulk_s(self, direction, num_bytes)
        self.in_flight[direction].begin(name, num_bytes, self.run.now, takes_s)
        self.later(takes_s, what)

    def _passed(self, direction: str, name: str, num_bytes: int) -> None:
        """All of an object is there."""
        self.in_flight[direction].end(name, self.run.now)
        self.run.count(self, direction, name, num_bytes)

    def _given_up(self, direction: str, name: str) -> None:
        """An object that may be on its way is not wanted any more: what has passed of it is counted."""
        passed = self.in_flight[direction].end(name, self.run.now)
        if passed:
            self.run.count(self, direction, name, passed)

    def _again(self, direction: str, num_bytes: int, what: What) -> bool:
        """Whether a transfer is tried again: nobody answers, or its checksum was wrong."""
        if not self.run.reachable(self):
            self.later(RETRY_S, what)
            return True
        if self.trouble.spoils(direction):
            self.later(RETRY_S + self.run.bulk_s(self, direction, num_bytes), what)
            return True
        return False

    def _fetch(self, action: act.Fetch) -> None:
        p, version = action.fragment, action.version
        if self._fetching.get(p) is not action:
            return  # a newer download has the slot
        if self._again("down", self._download_size(action), lambda: self._fetch(action)):
            return
        base, hub = action.base_version, self.run.hub
        try:
            value = hub.value_bytes(p, version) if base is None else hub.increment_bytes(p, base, version)
        except KeyError:
            self._given_up("down", download_name(action))
            self.feed(ev.FetchFailed(fragment=p, version=version, reason="gone", gone=True))
            return
        self._passed("down", download_name(action), len(value))
        self.trainer.write(p, value)
        self.feed(ev.Fetched(fragment=p, version=version))

    def _download_size(self, action: act.Fetch) -> int:
        p, base = action.fragment, action.base_version
        if base is None:
            return self.run.hub.value_size(p)
        return (action.version - base) * self.run.hub.increment_size(p)

    def _fetch_state(self, action: act.FetchState) -> None:
        if self._again("down", action.num_bytes, lambda: self._fetch_state(action)):
            return
        state = self.run.objects.get(objects.state(action.transfer))
        if state is None:
            self.feed(ev.StateFetchFailed(transfer=action.transfer, reason="gone"))
            return
        self._passed("down", objects.state(action.transfer), len(state))
        self.trainer.put_state(state)
        self.feed(ev.StateFetched(transfer=action.transfer))

    def _upload(self, action: act.Upload) -> None:
        if action.object in self.cancelled:
            return
        if self.connection is None:  # a driver tries again until it is told not to
            self.later(RETRY_S, lambda: self._upload(action))
            return
        if self._again("up", action.num_bytes, lambda: self._upload(action)):
            return
        if action.fragment is None:
            data = self.trainer.get_state()
        else:
            data = self.trainer.read(action.fragment, action.seed)[: action.num_bytes]
        self._passed("up", action.object, len(data))
        self.run.keep(action.object, data)
        self.feed(ev.Uploaded(object=action.object))

    # ---- its trainer ---------------------------------------------------------------------------------

    def _ready(self) -> box.Ready:
        return box.Ready(
            learner=self.name, fingerprint=self.trainer.fingerprint, layout=self.trainer.layout,
            method=self.run.syncer.admission.method_digest,
            own=self.trainer.own if own_names(self.run.method) else None,
        )  # fmt: skip

    def _turn(self) -> None:
        """The trainer looks at its mailbox, and begins a step if it may."""
        if self.busy:
            return
        if self._posted:
            self._posted = False
            self._report(self.trainer.idle())
        if self.finished is None and not self.busy and self.trainer.may_step():
            self.busy = True
            self.trainer.begin()
            self._work(self.run.now, self._stood_s, self.run.step_s(self) * self.slowdown)

    def _work(self, began_s: float, stood_s: float, step_s: float) -> None:
        """A step goes on until it had its time; a freeze puts off its end, and counts in what it took."""
        froze_s = self._stood_s - stood_s
        left_s = began_s + step_s + froze_s - self.run.now

        def ended() -> None:
            if self._stood_s - stood_s > froze_s:
                self._work(began_s, stood_s, step_s)
            else:
                self._step_end(step_s + froze_s)

        self.later(step_s if froze_s == 0.0 else max(0.0, left_s), ended)

    def _step_end(self, step_s: float) -> None:
        self.busy = self._posted = False
        self._report(self.trainer.end(step_s))
        self._turn()

    def _report(self, reports: list[box.AnyReport]) -> None:
        for report in reports:
            self.feed(ev.Reported(report=report))
