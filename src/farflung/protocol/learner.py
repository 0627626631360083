"""The Learner machine: one island's side of the protocol. It lives in the sidecar, decides, and does no I/O.

It turns invitations into `Snapshot` commands, announcements into downloads and `Adopt` commands, and keeps the
island training while the syncer is away. In free pace nothing here ever makes the trainer wait (unless
`max_lead_steps` is set); in lockstep the commands are posted ahead with their exact step.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import mailbox as box
from farflung.protocol import messages as msg
from farflung.protocol import objects
from farflung.protocol.actions import LearnerAction
from farflung.protocol.exchange import Exchange
from farflung.protocol.own_state import RESET, OwnState
from farflung.protocol.peer import PeerExchange
from farflung.protocol.policy import Policy

Phase = Literal["starting", "joining", "seeding", "installing", "training", "finishing", "saving", "ended"]


def boundary(sequence: int, report: box.BoundaryPassed) -> msg.Boundary:
    """A trainer's report as the syncer is told of it."""
    return msg.Boundary(
        sequence=sequence,
        step=report.step,
        tokens=report.tokens,
        step_s=report.step_s,
        wait_s=report.wait_s,
        loss=report.loss,
        lr=report.lr,
        progress_tokens=report.progress_tokens,
        cursor=report.cursor,
        adopted=report.adopted,
        snapshots=[(t.fragment, t.round) for t in report.taken],
    )


class LearnerMachine:
    """One incarnation of a learner.

    Args:
        policy: the method's data, the same as the syncer's.
        learner: name, unique among the run's learners, the same after a restart.
        run: run id to insist on, or None for whichever the syncer serves.
        address: gossip: where partners may dial this learner; None: its traffic is relayed.
        mbps: gossip: of its link, where that is known.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        learner: str,
        run: str | None = None,
        address: str | None = None,
        mbps: float | None = None,
    ):
        self.policy, self.learner, self.run = policy, learner, run
        self.address, self.mbps = address, mbps
        self.phase: Phase = "starting"
        self.linked = False  # there is a connection
        self.attached = False  # ... and the syncer knows who we are and what it missed
        self.ready: box.Ready | None = None
        self.incarnation: int | None = None
        self.budget_tokens = 0
        self.sequence = 0  # of the last boundary report
        self.step = 0
        self.unacked: deque[msg.Boundary] = deque()
        self.install: msg.Install | None = None
        self.proof: msg.Installed | None = None  # what this incarnation proved to hold
        self.missing: set[int] = set()  # fragments still to be fetched before installation
        self.loads = 0  # posted and not yet reported
        self.seeds = 0  # likewise
        self.state_here = False
        self.seeds_left: set[int] = set()
        self.donating: str | None = None
        self.donated: msg.StateReady | None = None  # state on its way to the syncer
        gossip = policy.topology == "gossip"
        self.exchange: Exchange | PeerExchange = PeerExchange(self) if gossip else Exchange(self)
        self.now = 0.0
        self._out: list[LearnerAction] = []
        self._events: dict[type, Callable[[Any], None]] = {
            ev.TimerFired: self._timer_fired,
            ev.LinkUp: self._link_up,
            ev.LinkDown: self._link_down,
            ev.Received: lambda event: self._messages[type(event.message)](event.message),
            ev.Reported: lambda event: self._reports[type(event.report)](event.report),
            ev.TrainerGone: self._trainer_gone,
            ev.Fetched: self._fetched,
            ev.FetchFailed: self._fetch_failed,
            ev.StateFetched: self._state_fetched,
            ev.StateFetchFailed: self._state_fetch_failed,
            ev.Uploaded: self._uploaded,
            ev.UploadFailed: self._upload_failed,
            ev.Arrived: lambda event: self.peer.arrivals.arrived(event),
            ev.Knocked: lambda event: self.peer.arrivals.knocked(event),
            ev.RelayFailed: lambda event: self.peer.arrivals.relay_failed(event.object, event.reason),
        }
        self._messages: dict[type, Callable[[Any], None]] = {
            msg.Refused: self._refused,
            msg.Welcome: self._welcome,
            msg.SeedRequest: self._seed_request,
            msg.Install: self._install,
            msg.Reattached: self._reattached,
            msg.Invite: self.exchange.invited,
            msg.Announce: self.exchange.announced,
            msg.FateOf: self.exchange.fate,
            msg.Progress: self._progress,
            msg.Donate: self._donate,
            msg.Finish: self._finish,
            msg.Suspend: self._suspend,
            msg.Stop: self._stop,
            msg.Epoch: lambda message: self.peer.told(message),
            msg.Relay: lambda message: self.peer.arrivals.relay(message),
            msg.Relayed: lambda message: self.peer.relayed(message),
        }
        self._reports: dict[type, Callable[[Any], None]] = {
            box.Ready: self._trainer_ready,
            box.SeedTaken: self._seed_taken,
            box.BoundaryPassed: self._boundary_passed,
            box.Loaded: self._loaded,
            box.Donated: self._donated,
            box.SaveDone: self._save_done,
            box.KeepFailed: lambda report: self.note("keep_failed", reason=report.reason),
            box.Ended: self._ended,
            box.Shown: lambda report: self.peer.showing.show(report),
        }

    def header(self) -> dict[str, Any]:
        """What a fresh machine needs, beside the policy, to replay this one's tape."""
        header = {"machine": "learner", "learner": self.learner, "run": self.run}
        where = {"address": self.address, "mbps": self.mbps}
        return header | {name: value for name, value in where.items() if value is not None}

    @property
    def peer(self) -> PeerExchange:
        """The rounds of a gossip learner."""
        assert isinstance(self.exchange, PeerExchange), "a hub's learner has no partners"
        return self.exchange

    def handle(self, event: ev.LearnerEvent, now: float) -> list[LearnerAction]:
        """Take one event at time `now` (seconds, monotonic); return what to do, in this order."""
        self.now, self._out = now, []
        if self.phase != "ended":
            self._events[type(event)](event)
        return self._out

    def validate(self) -> None:
        """Raise AssertionError on a broken invariant."""
        self.exchange.validate()

    # ---- speaking ------------------------------------------------------------------------------------

    def emit(self, action: LearnerAction) -> None:
        self._out.append(action)

    def say(self, message: msg.LearnerMessage) -> None:
        """Send, unless there is nobody to hear it: what matters is repeated when the link is back."""
        if self.attached or (self.linked and isinstance(message, msg.Join | msg.Heartbeat)):
            self.emit(act.Say(message=message))

    def post(self, command: box.AnyCommand) -> None:
        self.emit(act.Post(command=command))

    def note(self, kind: str, **data: Any) -> None:
        self.emit(act.Note(kind=kind, data=data))

    # ---- link ----------------------------------------------------------------------------------------

    def _trainer_ready(self, report: box.Ready) -> None:
        self.ready = report
        self.run = report.run or self.run
        self.incarnation, self.sequence, self.step = report.incarnation, report.sequence, report.step
        if report.incarnation is not None:
            self.phase = "training"
            if isinstance(self.exchange, PeerExchange):
                self.exchange.worked = report.worked
            self.exchange.start(report.held, report.step, 0)
            self.exchange.resume(report.outstanding)
            first = report.sequence - len(report.recent) + 1
            self.unacked.extend(boundary(n, one) for n, one in enumerate(report.recent, first))
        if self.linked:
            self._join()

    def _link_up(self, event: ev.LinkUp) -> None:
        self.linked = True
        self.emit(act.SetTimer(name="heartbeat", at_s=self.now + self.policy.heartbeat_s))
        if self.ready is not None:
            self._join()

    def _join(self) -> None:
        assert self.ready is not None
        training = self.phase in ("training", "finishing", "saving")
        if not training:
            self.phase, self.incarnation = "joining", None
        self.say(
            msg.Join(
                protocol=msg.PROTOCOL, run=self.run, learner=self.learner, fingerprint=self.ready.fingerprint,
                layout=self.ready.layout, method=self.ready.method, incarnation=self.incarnation,
                held=self.exchange.held, sequence=self.sequence, address=self.address, mbps=self.mbps,
                own=None if training else self.ready.own, saved=self.ready.saved if training else "",
            ),
        )  # fmt: skip

    def _link_down(self, event: ev.LinkDown) -> None:
        self.linked = self.attached = False
        self.note("link_down", reason=event.reason)
        self.emit(act.SetTimer(name="heartbeat", at_s=None))
        self.emit(act.Connect())

    def _timer_fired(self, event: ev.TimerFired) -> None:
        kind, _, rest = event.name.partition(".")
        if kind == "heartbeat":
            self.say(msg.Heartbeat())
            self.emit(act.SetTimer(name="heartbeat", at_s=self.now + self.policy.heartbeat_s))
        elif kind == "install" and self.phase == "installing" and self.install is not None:
            self.emit(act.Fetch(fragment=int(rest), version=self.install.versions[int(rest)]))
        elif self.phase not in ("training", "finishing"):
            return  # set by an earlier incarnation: the slots belong to the installation
        elif isinstance(self.exchange, PeerExchange):
            self.exchange.timer(kind, rest)
        elif kind == "wait":
            self.exchange.still_waiting()
        elif kind == "fetch":
            self.exchange.fetch(int(rest))
        elif kind == "again":
            self.exchange.try_again(int(rest))

    def _refused(self, message: msg.Refused) -> None:
        self.note("refused", reason=message.reason, detail=message.detail)
        closing = message.reason == "closing"
        self._end("finished" if closing else f"refused: {message.detail}", ok=closing)

    def _welcome(self, message: msg.Welcome) -> None:
        self.run, self.incarnation, self.budget_tokens = (
            message.run,
            message.incarnation,
            message.budget_tokens,
        )
        self.attached = self.phase == "joining"
        self.post(box.Begin(run=message.run, incarnation=message.incarnation, index=message.index))
        self.post(box.Advance(tokens=message.tokens, budget_tokens=message.budget_tokens))

    def _reattached(self, message: msg.Reattached) -> None:
        self.attached = True
        self._acknowledge(message.sequence)
        if not message.installed and self.proof is not None:
            self.say(self.proof)
        for unheard in self.unacked:
            self.say(unheard)
        self.exchange.reattached()

    def _progress(self, message: msg.Progress) -> None:
        self._acknowledge(message.sequence)
        self.post(box.Advance(tokens=message.tokens, budget_tokens=self.budget_tokens))

    def _acknowledge(self, sequence: int) -> None:
        while self.unacked and self.unacked[0].sequence <= sequence:
            self.unacked.popleft()

    # ---- birth and installation ----------------------------------------------------------------------

    def _seed_request(self, message: msg.SeedRequest) -> None:
        self.phase = "seeding"
        self.seeds += 1
        self.post(box.Seed())

    def _seed_taken(self, report: box.SeedTaken) -> None:
        self.seeds -= 1
        if self.phase == "installing":
            self._fetch_all()
        if self.phase != "seeding" or self.incarnation is None:
            return  # asked for by a connection that is gone: the syncer asks again, or somebody else
        self.seeds_left = set(range(self.policy.num_fragments))
        for p in sorted(self.seeds_left):
            name = objects.seed(self.learner, self.incarnation, p)
            self.emit(act.Upload(object=name, fragment=p, num_bytes=report.num_bytes[p], seed=True))

    def _install(self, message: msg.Install) -> None:
        self.phase, self.install = "installing", message
        self.missing, self.state_here = set(range(self.policy.num_fragments)), message.state is None
        self._fetch_all()

    def _fetch_all(self) -> None:
        """Fill the downlink slots, unless a `Seed` that came to nothing is still to write there."""
        if self.install is None or self.seeds:
            return
        for p, version in enumerate(self.install.versions):
            self.emit(act.Fetch(fragment=p, version=version))
        offer = self.install.state
        if offer is not None:
            self.emit(act.FetchState(transfer=offer.transfer, num_bytes=offer.num_bytes, digest=offer.digest))

    def _state_fetched(self, event: ev.StateFetched) -> None:
        offer = self.install.state if self.install is not None else None
        if offer is not None and offer.transfer == event.transfer:
            self.state_here = True
            self._load()

    def _state_fetch_failed(self, event: ev.StateFetchFailed) -> None:
        self.say(msg.StateFailed(transfer=event.transfer, reason=event.reason))

    def _load(self) -> None:
        """Everything is here: let the trainer install it in one piece."""
        if self.phase != "installing" or self.missing or not self.state_here or self.install is None:
            return
        install = self.install
        self.loads += 1
        if self.policy.pace == "lockstep" or self.policy.topology == "gossip":
            # not a step before it knows its first snapshots
            self.post(box.RunUntil(step=install.step, reason="installed, waiting for the first rounds"))
        self.post(
            box.Load(
                versions=install.versions, cursor=install.cursor, step=install.step,
                state=install.state is not None, own=install.own,
            ),
        )  # fmt: skip

    def _loaded(self, report: box.Loaded) -> None:
        self.loads -= 1
        awaited = self.phase == "installing" and not self.missing and self.state_here and not self.loads
        if self.install is None or not awaited:
            return  # of an earlier incarnation
        self.phase, self.step = "training", report.step
        if self.policy.pace == "free" and self.policy.topology == "hub":
            self.post(box.RunUntil(step=None))
        self.exchange.start(report.versions, report.step, self.install.syncer_step)
        self.proof = msg.Installed(
            versions=report.versions, digests=report.digests, inner_digest=report.inner_digest,
            lr=report.lr, cursor=report.cursor, step=report.step, own_digests=report.own_digests,
        )  # fmt: skip
        self.say(self.proof)
        self.install = None
        if self.ready is not None and self.ready.own is not None:  # what was found is used once
            self.ready = msgspec.structs.replace(self.ready, own=OwnState(problem=RESET))

    def start_over(self, reason: str) -> None:
        """Become a new incarnation in place: what this one holds is worth nothing."""
        self.note("start_over", reason=reason)
        self.exchange.abandon()
        self.unacked.clear()
        self.sequence, self.install, self.donating, self.donated = 0, None, None, None
        self.post(box.RunUntil(step=0, reason=f"installing again: {reason}"))
        self.phase = "joining"
        if self.linked:
            self._join()

    # ---- bulk ----------------------------------------------------------------------------------------

    def _fetched(self, event: ev.Fetched) -> None:
        if self.phase == "installing" and self.install is not None:
            if event.version == self.install.versions[event.fragment]:
                self.missing.discard(event.fragment)
                self._load()
            return
        self.exchange.fetched(event.fragment, event.version)

    def _fetch_failed(self, event: ev.FetchFailed) -> None:
        if self.phase == "installing":
            if event.gone:
                self.start_over("the version to install is gone")
            else:
                at_s = self.now + self.policy.heartbeat_s
                self.emit(act.SetTimer(name=f"install.{event.fragment}", at_s=at_s))
            return
        self.exchange.fetch_failed(event)

    def _uploaded(self, event: ev.Uploaded) -> None:
        kind = event.object.partition(".")[0]
        if kind in ("contribution", "offer"):
            if kind == "offer":
                self.peer.moved["up"] += event.sent_bytes
            self.exchange.uploaded(event.object)
        elif kind == "seed" and self.phase == "seeding":
            self._seed_uploaded(event.object)
        elif kind == "state" and self.donated is not None:
            self.say(self.donated)
            self.donated = None

    def _seed_uploaded(self, name: str) -> None:
        assert self.incarnation is not None
        for p in sorted(self.seeds_left):
            if name == objects.seed(self.learner, self.incarnation, p):
                self.seeds_left.remove(p)
                if not self.seeds_left:
                    self.say(msg.Seeded())

    def _upload_failed(self, event: ev.UploadFailed) -> None:
        kind = event.object.partition(".")[0]
        if kind == "offer":
            self.peer.moved["up"] += event.sent_bytes
            self.peer.upload_failed(event.object, event.reason, event.refusal)
        elif kind == "contribution":
            self.exchange.upload_failed(event.object, event.reason)
        elif kind == "seed":
            self._end(f"could not upload the first parameters: {event.reason}", ok=False)
        elif self.donated is not None:
            self.say(msg.StateFailed(transfer=self.donated.transfer, reason=event.reason))
            self.donated = None

    # ---- training ------------------------------------------------------------------------------------

    def _boundary_passed(self, report: box.BoundaryPassed) -> None:
        if self.phase not in ("training", "finishing", "saving"):
            return  # the end of a step that a new start has made worthless
        self.sequence += 1
        self.step = report.step
        message = boundary(self.sequence, report)
        if report.mixed is not None:
            message = msgspec.structs.replace(message, mixed=self.peer.round_mixed(report.mixed))
        self.unacked.append(message)
        self.say(message)
        self.exchange.boundary(report)

    # ---- donating ------------------------------------------------------------------------------------

    def _donate(self, message: msg.Donate) -> None:
        if self.phase != "training" or self.donating is not None or self.donated is not None:
            self.say(msg.StateFailed(transfer=message.transfer, reason=f"busy ({self.phase})"))
            return
        self.donating = message.transfer
        self.post(box.Donate(transfer=message.transfer))

    def _donated(self, report: box.Donated) -> None:
        self.donating = None
        self.donated = msg.StateReady(
            transfer=report.transfer, num_bytes=report.num_bytes, digest=report.digest, lr=report.lr,
            step=report.step, held=self.exchange.held,
        )  # fmt: skip
        self.emit(
            act.Upload(object=objects.state(report.transfer), fragment=None, num_bytes=report.num_bytes)
        )

    # ---- ending --------------------------------------------------------------------------------------

    def _finish(self, message: msg.Finish) -> None:
        self.phase = "finishing"
        self.post(box.RunUntil(step=0, reason="the budget is spent: handing in"))
        self.exchange.hand_in(message.versions, message.rounds)

    def _suspend(self, message: msg.Suspend) -> None:
        self.phase = "saving"
        self.exchange.give_up()
        self.post(box.Save())

    def _save_done(self, report: box.SaveDone) -> None:
        self.say(msg.Saved(step=report.step, digest=report.digest))

    def _stop(self, message: msg.Stop) -> None:
        if message.reason == "reset":
            self.start_over("the syncer asked for it")
            return
        self._end(message.reason, ok=message.reason in ("finished", "suspended"))

    def _ended(self, report: box.Ended) -> None:
        self.say(msg.Leave(reason=report.reason))
        self._end("left", ok=True)

    def _trainer_gone(self, event: ev.TrainerGone) -> None:
        self.say(msg.TrainerLost(reason=event.reason))
        self._end(event.reason, ok=False)

    def _end(self, reason: str, ok: bool) -> None:
        self.post(box.End(reason=reason))
        self.emit(act.Exit(reason=reason, ok=ok))
        self.phase = "ended"
