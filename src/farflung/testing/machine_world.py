"""A syncer and learners, machines alone: links, transfers and clocks wait until somebody says what comes next.

Nothing happens by itself. `farflung.testing.machine_walk` chooses what does, and so decides every order.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import messages as msg
from farflung.protocol import objects, snapshot
from farflung.protocol.policy import Policy
from farflung.protocol.syncer import SyncerMachine
from farflung.testing.machine_checks import Checks
from farflung.testing.machine_process import Link, Process
from farflung.testing.stubs import Payload, TokenHub

RUN = "walk"


class MachineWorld:
    """The whole protocol without tensors, sockets and a clock of its own.

    Args:
        policy: any.
        step_s: seconds of a step, one number a learner.
        budget_tokens: of the run.
        slow_fragment: its merges hang until `go_on`.
    """

    def __init__(
        self, policy: Policy, step_s: list[float], budget_tokens: int, slow_fragment: int | None = None
    ) -> None:
        self.slow_fragment = slow_fragment
        self.policy, self.budget_tokens = policy, budget_tokens
        self.now, self.lives, self.connections, self.events = 0.0, 0, 0, 0
        self.hub = TokenHub(policy.num_fragments)
        self.log: list[tuple[float, str, Any, Any]] = []
        self.links: list[Link] = []
        self.merges: list[tuple[act.Merge, list[Payload]]] = []
        self.stalled: list[tuple[act.Merge, list[Payload]]] = []  # merges that hang
        self.spoil_merge = False
        self.checkpoint = False  # one is being written
        self.durable: bytes | None = None
        self.objects: dict[str, Payload | str] = {}
        self.timers: dict[str, float] = {}
        self.finished: str | None = None
        self._new_syncer()
        self.checks = Checks(self)
        self.processes = [Process(f"l{i}", self, s) for i, s in enumerate(step_s)]
        for process in self.processes:
            process.start()

    def _new_syncer(self) -> None:
        self.syncer = SyncerMachine(self.policy, run=RUN, num_learners=4, budget_tokens=self.budget_tokens)
        self.method_digest = self.syncer.admission.method_digest

    # ---- the syncer ----------------------------------------------------------------------------------

    def take(self, event: ev.SyncerEvent) -> None:
        if self.finished is not None:
            return
        actions = self.syncer.handle(event, self.now)
        self.events += 1
        self.log.append((self.now, "syncer", event, actions))
        if isinstance(event, ev.MergeDone):
            self.checks.merge_done(event.fragment)
        for action in actions:
            _SYNCER_ACTS[type(action)](self, action)
        self.checks.after_syncer(actions)

    def _send(self, action: act.Send) -> None:
        for link in self.links:
            if link.number == action.connection:
                if link.open_down:
                    link.down.append(action.message)
                return

    def _hang_up(self, action: act.HangUp) -> None:
        for link in self.links:
            if link.number == action.connection:
                link.close()

    def _merge(self, action: act.Merge) -> None:
        self.checks.merge(action)
        merges = self.stalled if action.fragment == self.slow_fragment else self.merges
        merges.append((action, self.hub.begin(action)))

    def _finish(self, action: act.Finished) -> None:
        self.finished = action.reason
        self.timers.clear()
        for link in self.links:
            link.close()
            link.up.clear()

    def merge_done(self, index: int) -> None:
        """One of the merges under way is complete."""
        merge, payloads = self.merges.pop(index)
        finite, self.spoil_merge = not self.spoil_merge, False
        digest = self.hub.commit(merge, payloads, finite)
        self.take(
            ev.MergeDone(
                fragment=merge.fragment, version=merge.version, finite=finite, norm=1.0, digest=digest,
                merge_s=0.01,
            )
        )  # fmt: skip

    def checkpoint_done(self) -> None:
        self.checkpoint = False
        self.durable = snapshot.encode(snapshot.snapshot(self.syncer))
        self.take(ev.CheckpointWritten())

    def resume(self) -> None:
        """Start syncer and learners again from what an orderly stop wrote."""
        assert self.durable is not None
        for process in self.processes:
            if process.alive:
                process.stop()
        self.links.clear()
        self.merges.clear()
        self.stalled.clear()
        self.objects.clear()
        self.hub.received.clear()
        self.timers.clear()
        self.finished = None
        self._new_syncer()
        snapshot.restore(self.syncer, snapshot.decode(self.durable), self.now)
        self.checks.restored()
        for process in self.processes:
            saved, process.saved = process.saved, None
            process.start(saved)

    def go_on(self) -> None:
        """Whatever hangs or stands still goes on."""
        self.merges += self.stalled
        self.stalled.clear()
        for process in self.processes:
            process.frozen = False
            process.jobs += process.stalled
            process.stalled.clear()

    # ---- links ---------------------------------------------------------------------------------------

    def dial(self, process: Process) -> None:
        self.connections += 1
        link = process.link = Link(self.connections, process)
        self.links.append(link)
        link.up.append(ev.Connected(connection=link.number))
        self.feed(process, ev.LinkUp())

    def deliver_up(self, link: Link) -> None:
        item = link.up.popleft()
        if item is None:
            self._drop(link)
            self.take(ev.Disconnected(connection=link.number, reason="closed"))
        elif isinstance(item, ev.Connected):
            self.take(item)
        else:
            self.take(self._inspected(link, item))

    def deliver_down(self, link: Link) -> None:
        item, process = link.down.popleft(), link.process
        if item is not None:
            self.feed(process, ev.Received(message=item))
            return
        self._drop(link)
        if process.link is link:
            process.link = None
            self.feed(process, ev.LinkDown(reason="closed"))

    def _drop(self, link: Link) -> None:
        if not (link.up or link.down or link.open_up or link.open_down) and link in self.links:
            self.links.remove(link)

    def _inspected(self, link: Link, message: msg.LearnerMessage) -> ev.MessageArrived:
        """As a driver does: look into the objects that a message speaks of."""
        member = self.syncer.membership.of(link.number)
        event = ev.MessageArrived(connection=link.number, message=message)
        if member is None:
            return event
        if isinstance(message, msg.Contribute):
            name = objects.contribution(member.name, member.incarnation, message.fragment, message.round)
            if self.syncer.merging.has(member, message.fragment, message.round):
                self.objects.pop(name, None)
                return event
            payload = self.objects.pop(name, None)
            if not isinstance(payload, Payload):
                return msgspec.structs.replace(event, problem="missing")
            self.hub.received[name] = payload
            self.checks.contribute(message, payload)
            return msgspec.structs.replace(event, finite=payload.finite, norm=1.0)
        if isinstance(message, msg.Seeded) and member.state == "seeding":
            return msgspec.structs.replace(event, finite=True, digests=self.hub.seed())
        return event

    # ---- learners ------------------------------------------------------------------------------------

    def feed(self, process: Process, event: ev.LearnerEvent) -> None:
        if not process.alive:
            return
        actions = process.machine.handle(event, self.now)
        self.events += 1
        self.log.append((self.now, process.name, event, actions))
        for action in actions:
            _LEARNER_ACTS[type(action)](self, process, action)
        self.checks.after_learner(process)

    def _say(self, process: Process, action: act.Say) -> None:
        if process.link is not None and process.link.open_up:
            process.link.up.append(action.message)
            if isinstance(action.message, msg.Contribute):
                process.last_contribute = action.message
            elif isinstance(action.message, msg.Join) and action.message.incarnation is None:
                process.last_contribute = None

    def _cancel(self, process: Process, action: act.CancelUpload) -> None:
        for jobs in (process.jobs, process.stalled):
            jobs[:] = [j for j in jobs if not (isinstance(j, act.Upload) and j.object == action.object)]

    def _fetch(self, process: Process, action: act.Fetch) -> None:
        for jobs in (process.jobs, process.stalled):
            jobs[:] = [j for j in jobs if not (isinstance(j, act.Fetch) and j.fragment == action.fragment)]
        process.jobs.append(action)

    def _exit(self, process: Process, action: act.Exit) -> None:
        process.ended = action
        process.stop()

    def work(self, process: Process, index: int, broken: bool = False) -> None:
        """One of the transfers under way is complete, or breaks."""
        job = process.jobs.pop(index)
        if isinstance(job, act.Connect):
            if self.finished is not None:
                process.jobs.append(job)
            elif process.link is None:
                self.dial(process)
        elif isinstance(job, act.Fetch):
            self._fetched(process, job, broken)
        elif isinstance(job, act.FetchState):
            self._state_fetched(process, job, broken)
        else:
            self._uploaded(process, job, broken)

    def _fetched(self, process: Process, job: act.Fetch, broken: bool) -> None:
        p, version = job.fragment, job.version
        digest = self.hub.kept[p].get(version)
        if job.base_version is not None and not self.hub.increments(p, job.base_version, version):
            digest = None
        if digest is None or broken:
            gone = digest is None
            self.feed(process, ev.FetchFailed(fragment=p, version=version, reason="?", gone=gone))
        else:
            process.trainer.downlink[p] = (version, digest)
            process.trainer.downlink_bases[p] = job.base_version
            self.feed(process, ev.Fetched(fragment=p, version=version))

    def _state_fetched(self, process: Process, job: act.FetchState, broken: bool) -> None:
        state = self.objects.get(objects.state(job.transfer))
        if broken or state != job.digest:
            self.feed(process, ev.StateFetchFailed(transfer=job.transfer, reason="gone"))
        else:
            process.trainer.state_slot = str(state)
            self.feed(process, ev.StateFetched(transfer=job.transfer))

    def _uploaded(self, process: Process, job: act.Upload, broken: bool) -> None:
        trainer, machine = process.trainer, self.syncer
        if job.fragment is None:
            expected = job.object.partition(".")[2] in machine.admission.transfers
            content: Payload | str | None = trainer.state_slot
        else:
            member = machine.membership.members.get(process.name)
            number = int(job.object.split(".")[2])
            state = "seeding" if job.seed else "training"
            expected = member is not None and member.incarnation == number and member.state == state
            content = "seed" if job.seed else trainer.uplink[job.fragment]
        if broken or not expected or content is None:
            self.feed(process, ev.UploadFailed(object=job.object, reason="refused"))
        else:
            self.objects[job.object] = content
            self.feed(process, ev.Uploaded(object=job.object))


_SYNCER_ACTS: dict[type, Callable[[MachineWorld, Any], object]] = {
    act.Send: MachineWorld._send,
    act.HangUp: MachineWorld._hang_up,
    act.SetTimer: lambda world, action: _set(world.timers, action),
    act.Note: lambda world, action: world.checks.note(action),
    act.Merge: MachineWorld._merge,
    act.CommitSeed: lambda world, action: None,
    act.Discard: lambda world, action: world.hub.received.pop(action.object, None),
    act.Retire: lambda world, action: world.checks.retire(action),
    act.DiscardState: lambda world, action: world.objects.pop(objects.state(action.transfer), None),
    act.WriteCheckpoint: lambda world, action: setattr(world, "checkpoint", True),
    act.Finished: MachineWorld._finish,
}
_LEARNER_ACTS: dict[type, Callable[[MachineWorld, Process, Any], object]] = {
    act.Say: MachineWorld._say,
    act.Post: lambda world, process, action: process.trainer.take(action.command),
    act.SetTimer: lambda world, process, action: _set(process.timers, action),
    act.Note: lambda world, process, action: None,
    act.Fetch: MachineWorld._fetch,
    act.FetchState: lambda world, process, action: process.jobs.append(action),
    act.Upload: lambda world, process, action: process.jobs.append(action),
    act.CancelUpload: MachineWorld._cancel,
    act.Connect: lambda world, process, action: process.jobs.append(action),
    act.Exit: MachineWorld._exit,
}


def _set(timers: dict[str, float], action: act.SetTimer) -> None:
    if action.at_s is None:
        timers.pop(action.name, None)
    else:
        timers[action.name] = action.at_s
