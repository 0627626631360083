"""One learner of a pretended world: real machine and trainer in a pretended process, on a pretended link."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from farflung.engine.island import Island
from farflung.engine.trainer import Trainer
from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import mailbox as box
from farflung.protocol import objects
from farflung.protocol.learner import LearnerMachine
from farflung.testing.quadratic import QuadraticInner, quadratic_model
from farflung.testing.virtual_time import Timers, What

if TYPE_CHECKING:
    from farflung.testing.world import World

RECONNECT_S = 0.2  # from a lost link to the next attempt
RETRY_S = 0.1  # an upload without a link


class Slots:
    """The byte vectors that trainer and sidecar share, one a fragment, made when first asked for."""

    def __init__(self, size_bytes: Callable[[int], int]) -> None:
        self._size_bytes = size_bytes
        self._slots: dict[int, Tensor] = {}

    def __call__(self, fragment: int) -> Tensor:
        if fragment not in self._slots:
            self._slots[fragment] = torch.zeros(self._size_bytes(fragment), dtype=torch.uint8)
        return self._slots[fragment]


class PretendIsland:
    """Process, sidecar and mailbox of one learner. A restarted process is a new `generation`.

    Args:
        name: the learner's, the same after a restart.
        world: where it lives.
        step_s: seconds of a step.
        target: where its data pulls the parameters.
    """

    def __init__(self, name: str, world: World, step_s: float, target: float) -> None:
        self.name, self.world, self.step_s, self.target = name, world, step_s, target
        self.alive = False
        self.generation = 0
        self.connection: int | None = None
        self._frozen_until_s: float | None = None
        self._backlog: list[What] = []  # what a frozen process will find when it goes on
        self.finished: str | None = None  # why it ended by itself

    @property
    def node(self) -> str:
        """Its name on the tape."""
        return f"{self.name}.{self.generation}"

    # ---- what may befall it --------------------------------------------------------------------------

    def start(self) -> None:
        """A new process: fresh model, empty slots, and a Join as soon as the link is up."""
        world = self.world
        self.generation += 1
        self.alive, self.busy, self.state, self.finished = True, False, b"", None
        self._frozen_until_s, self._backlog = None, []
        self.cancelled: set[str] = set()
        generation = self.generation
        self.timers = Timers(world.time, lambda name: self._timer_fired(generation, name))
        self.uplink, self.downlink = Slots(world.hub.payload_size), Slots(world.hub.value_size)
        model = quadratic_model(world.seed)
        self.inner = QuadraticInner(model, self.target)
        self.trainer = Trainer(
            Island(model, world.plan, world.method, self.uplink, self.downlink),
            self.inner,
            put_state=self._put_state,
            get_state=lambda: self.state,
            save=lambda: None,
        )
        self.machine = LearnerMachine(world.method.policy, learner=self.name)
        self.feed(ev.Reported(report=self._ready()))
        self.link_up()

    def kill(self) -> None:
        """The process and its sidecar are gone; the syncer sees the connection close."""
        self.alive = False
        self._hang_up()

    def cut(self) -> None:
        """The link breaks: whatever is on its way is lost, and the driver dials again."""
        if self.alive and self.connection is not None:
            self._hang_up()
            self.feed(ev.LinkDown(reason="cut"))

    def freeze(self, for_s: float) -> None:
        """Process and sidecar stand still."""
        if self.alive:
            self._frozen_until_s = self.world.now + for_s
            self.world.time.after(for_s, self._thaw)

    def _thaw(self) -> None:
        if self._frozen_until_s is not None and self._frozen_until_s <= self.world.now:
            self._frozen_until_s = None
            backlog, self._backlog = self._backlog, []
            for what in backlog:
                what()

    def link_up(self) -> None:
        if self.connection is None:
            self.connection = self.world.connect(self)
            self.feed(ev.LinkUp())

    def _hang_up(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            self.world.disconnected(connection)

    # ---- its machine ---------------------------------------------------------------------------------

    def feed(self, event: ev.LearnerEvent) -> None:
        """Let the machine take an event, and perform what it asks for."""
        if self._frozen_until_s is not None:
            self._backlog.append(lambda: self.feed(event))
        elif self.alive:
            actions = self.machine.handle(event, self.world.now)
            self.world.tape.write(self.world.now, self.node, event, actions)
            self.machine.validate()
            for action in actions:
                self._perform(action)

    def _later(self, delay_s: float, what: What) -> None:
        generation = self.generation

        def run() -> None:
            if not self.alive or self.generation != generation:
                return
            if self._frozen_until_s is not None:
                self._backlog.append(run)
            else:
                what()

        self.world.time.after(delay_s, run)

    def _perform(self, action: act.LearnerAction) -> None:
        match action:
            case act.Say():
                self.world.say(self, action.message)
            case act.Post():
                self.trainer.take(action.command)
                self._later(0.0, self._turn)
            case act.Fetch():
                self._later(self.world.transfer_s(), lambda: self._fetch(action))
            case act.FetchState():
                self._later(self.world.transfer_s(), lambda: self._fetch_state(action))
            case act.Upload():
                self._later(self.world.transfer_s(), lambda: self._upload(action))
            case act.CancelUpload():
                self.cancelled.add(action.object)
            case act.SetTimer():
                self.timers.set(action)
            case act.Connect():
                self._later(RECONNECT_S, self.link_up)
            case act.Exit():
                self.finished = action.reason
            case act.Note():
                pass

    def _timer_fired(self, generation: int, name: str) -> None:
        if generation == self.generation:  # a restarted process has timers of its own
            self.feed(ev.TimerFired(name=name))

    # ---- bulk ----------------------------------------------------------------------------------------

    def _fetch(self, action: act.Fetch) -> None:
        p, version = action.fragment, action.version
        try:
            value = self.world.hub.value_bytes(p, version)
        except KeyError:
            self.feed(ev.FetchFailed(fragment=p, version=version, reason="gone", gone=True))
            return
        self.downlink(p).copy_(torch.frombuffer(bytearray(value), dtype=torch.uint8))
        self.feed(ev.Fetched(fragment=p, version=version))

    def _fetch_state(self, action: act.FetchState) -> None:
        state = self.world.objects.get(objects.state(action.transfer))
        if state is None:
            self.feed(ev.StateFetchFailed(transfer=action.transfer, reason="gone"))
            return
        self.state = state
        self.feed(ev.StateFetched(transfer=action.transfer))

    def _upload(self, action: act.Upload) -> None:
        if action.object in self.cancelled:
            return
        if self.connection is None:  # a driver tries again until it is told not to
            self._later(RETRY_S, lambda: self._upload(action))
            return
        if action.fragment is None:
            data = self.state
        else:
            slot = self.downlink if action.seed else self.uplink
            data = bytes(slot(action.fragment).numpy())
        self.world.keep(action.object, data)
        self.feed(ev.Uploaded(object=action.object))

    def _put_state(self, state: bytes) -> None:
        self.state = state

    # ---- its trainer ---------------------------------------------------------------------------------

    def _ready(self) -> box.Ready:
        plan = self.world.plan
        return box.Ready(
            learner=self.name, fingerprint=plan.fingerprint(), layout=plan.to_json(),
            method=self.world.syncer.admission.method_digest,
        )  # fmt: skip

    def _turn(self) -> None:
        """The trainer looks at its mailbox, and begins a step if it may."""
        if self.busy:
            return
        self.trainer.idle()
        self._report()
        if self.finished is None and not self.busy and self.trainer.may_step()[0]:
            self.busy = True
            self._later(self.step_s, self._step_end)

    def _step_end(self) -> None:
        self.busy = False
        loss = self.inner.step()
        self.trainer.stepped(self.world.tokens_per_step, step_s=self.step_s, loss=loss)
        self._report()
        self._turn()

    def _report(self) -> None:
        reports, self.trainer.reports = self.trainer.reports, []
        for report in reports:
            self.feed(ev.Reported(report=report))
