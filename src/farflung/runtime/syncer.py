"""The syncer process: sockets, threads and disk around a SyncerMachine. Performs, and decides nothing."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
from aiohttp import web

from farflung import tape
from farflung.core.fragments import FragmentPlan
from farflung.engine.hub import HubState, Merged
from farflung.engine.make import offer_sizes
from farflung.methods import Method
from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import messages as msg
from farflung.protocol import objects
from farflung.protocol.admission import OTHER_RECIPE
from farflung.protocol.meeting import MAX_PARTNERS
from farflung.protocol.syncer import SyncerMachine
from farflung.recipe import LEARNER_NAME
from farflung.recorder import Recorder
from farflung.runtime.server import HUB, LearnerLink, make_app
from farflung.runtime.status import status
from farflung.runtime.timers import Timers
from farflung.runtime.transport import Refused

MAX_STATE_BYTES = 1 << 40
REFUSALS_S = 1.0
NOTES_KEPT = 1000  # for /status; all of them are on the tape


class SyncerDriver:
    """One run's hub (a `server.Backend`).

    Args:
        method: the run's method.
        machine: fresh, or restored from a checkpoint.
        clock: seconds since the run's start.
        tape_path: segment to write, or None.
    """

    def __init__(
        self, method: Method, machine: SyncerMachine, clock: Callable[[], float], tape_path: Path | None
    ) -> None:
        self.method, self.machine, self.clock = method, machine, clock
        self.hub: HubState | None = None
        self.finished: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.checkpoint: Callable[[], None] = lambda: None  # what WriteCheckpoint does, in a thread
        self.notes: deque[dict[str, Any]] = deque(maxlen=NOTES_KEPT)
        self._recorder = Recorder(machine, "syncer", clock, tape_path)
        self._timers = Timers(clock, lambda name, late_s: self.feed(ev.TimerFired(name=name, late_s=late_s)))
        self._links: dict[int, LearnerLink] = {}
        self._arriving: dict[str, memoryview] = {}
        self._objects: dict[str, memoryview] = {}
        self._free: dict[int, list[memoryview]] = {}  # buffers of contributions, by size, to be used again
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tensors")
        self._tasks: set[asyncio.Task[None]] = set()
        self._refusals: dict[str, tuple[int, str]] = {}  # reason: how many are not told yet, the last one
        self.app: web.Application | None = None
        self.expected: str | None = (
            None  # fingerprint of the fragment plan, where the recipe's task is trained
        )

    def application(self, token: str) -> web.Application:
        """The aiohttp application: transport and this driver's own routes."""
        routes = [
            web.get("/status", self._status),
            web.get("/model", self._model),
            web.post("/stop", self._stop),
        ]
        self.app = make_app(self, token, self.machine.run, routes)
        return self.app

    def close(self) -> None:
        self._timers.cancel_all()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._recorder.close()

    # ---- machine -------------------------------------------------------------------------------------

    def feed(self, event: ev.SyncerEvent) -> None:
        for action in self._recorder.handle(event):
            self._perform(action)

    def _perform(self, action: act.SyncerAction) -> None:
        match action:
            case act.Send():
                if (link := self._links.get(action.connection)) is not None:
                    link.send(action.message)
            case act.HangUp():
                if (link := self._links.get(action.connection)) is not None:
                    link.end("dismissed by the syncer")
            case act.SetTimer():
                self._timers.set(action.name, action.at_s)
            case act.Note():
                self.notes.append({"t": self.clock(), "kind": action.kind, **action.data})
                if action.kind in ("lost", "left"):
                    self._forget_uploads(action.data["learner"], action.data["incarnation"])
            case act.Merge():
                assert self.hub is not None
                self._spawn(self._merge(action, self.hub.begin(action)))
            case act.CommitSeed():
                for name in action.objects:
                    self._forget(name)
            case act.Discard():
                self._forget(action.object)
                if self.hub is not None:
                    self.hub.discard(action.object)
            case act.Retire():
                if self.hub is not None:
                    self.hub.retire(action.fragment, action.version)
            case act.DiscardState():
                self._forget(objects.state(action.transfer))
            case act.WriteCheckpoint():
                self._spawn(self._checkpoint())
            case act.Finished():
                if not self.finished.done():
                    self.finished.set_result(action.reason)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._spawned)

    def _spawned(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.finished.done():
            self.finished.set_exception(error)

    async def _in_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    async def _merge(self, action: act.Merge, work: Callable[[], Merged]) -> None:
        began_s = time.perf_counter()
        merged = await self._in_thread(work)
        self.feed(
            ev.MergeDone(
                fragment=action.fragment, version=merged.version, finite=merged.finite,
                norm=merged.norm, digest=merged.digest, merge_s=time.perf_counter() - began_s,
            )
        )  # fmt: skip

    async def _checkpoint(self) -> None:
        await self._in_thread(self.checkpoint)
        self.feed(ev.CheckpointWritten())

    # ---- transport -----------------------------------------------------------------------------------

    async def connected(self, connection: int, link: LearnerLink) -> None:
        self._links[connection] = link
        self.feed(ev.Connected(connection=connection))

    async def disconnected(self, connection: int, reason: str) -> None:
        del self._links[connection]
        self.feed(ev.Disconnected(connection=connection, reason=reason))

    def refused(self, reason: str, detail: str) -> None:
        """Told at once, then at most once in REFUSALS_S for each reason: a stranger must not fill the disk."""
        waiting = self._refusals.get(reason)
        if waiting is not None:
            self._refusals[reason] = (waiting[0] + 1, detail)
            return
        self.feed(ev.Refusal(reason=reason, detail=detail))
        self._refusals[reason] = (0, detail)
        asyncio.get_running_loop().call_later(REFUSALS_S, self._tell_refusals, reason)

    def _tell_refusals(self, reason: str) -> None:
        count, detail = self._refusals.pop(reason)
        if count and not self.finished.done():
            self.feed(ev.Refusal(reason=reason, detail=detail, count=count))

    async def message(self, connection: int, message: msg.LearnerMessage) -> None:
        """One message of a learner; the tensors it speaks of are examined first."""
        event = ev.MessageArrived(connection=connection, message=message)
        if isinstance(message, msg.Join):
            problem = self._layout_problem(message)
            if problem is not None:
                self.feed(ev.Refusal(reason="layout", detail=f"{message.learner}: {problem}"))
                self._links[connection].send(msg.Refused(reason="layout", detail=problem))
                self._links[connection].end("refused")
                return
        elif isinstance(message, msg.Contribute):
            event = await self._inspect(event, message)
        elif isinstance(message, msg.Seeded):
            event = await self._inspect_seed(event)
        self.feed(event)

    def _layout_problem(self, join: msg.Join) -> str | None:
        """Check the model that a member describes; the first one shapes the hub."""
        if not LEARNER_NAME.fullmatch(join.learner):
            return f"learner name {join.learner!r}: use letters, digits, '_' and '-', at most 64"
        if (
            self.machine.admission.fingerprint is not None
            or join.method != self.machine.admission.method_digest
        ):
            return None  # the machine compares
        if self.expected is not None and join.fingerprint != self.expected:
            return (
                f"your model (names, shapes, dtypes, fragment plan) is not that of the recipe: {OTHER_RECIPE}"
            )
        try:
            plan = FragmentPlan.from_json(join.layout)
        except ValueError as error:
            return str(error)
        if plan.num_fragments != self.method.policy.num_fragments:
            return f"{plan.num_fragments} fragments, the run has {self.method.policy.num_fragments}"
        if plan.fingerprint() != join.fingerprint:
            return "the fingerprint is not that of the fragment plan"
        self.hub = HubState(plan, self.method)
        return None

    async def _inspect(self, event: ev.MessageArrived, message: msg.Contribute) -> ev.MessageArrived:
        """Decode a contribution and see whether it is finite."""
        member = self.machine.membership.of(event.connection)
        if member is None or self.hub is None or not 0 <= message.fragment < self.method.policy.num_fragments:
            return event
        name = objects.contribution(member.name, member.incarnation, message.fragment, message.round)
        if self.machine.merging.has(member, message.fragment, message.round):
            self._forget(name)  # a repeat: it must not take the place of what is merged, or waits to be
            return event
        payload = self._objects.get(name)
        if payload is None:
            return msgspec.structs.replace(event, problem="missing: the object never arrived whole")
        incarnation = member.incarnation
        try:
            received = await self._in_thread(self.hub.receive, name, message.fragment, payload)
        except ValueError as error:
            return msgspec.structs.replace(event, problem=f"malformed: {error}")
        self._forget(name)
        if member.incarnation != incarnation:  # a new process has the name: the machine will not ask for it
            self.hub.discard(name)
        return msgspec.structs.replace(event, finite=received.finite, norm=received.norm)

    async def _inspect_seed(self, event: ev.MessageArrived) -> ev.MessageArrived:
        member = self.machine.membership.of(event.connection)
        if member is None or self.hub is None or member.state != "seeding":
            return event
        names = [
            objects.seed(member.name, member.incarnation, p) for p in range(self.method.policy.num_fragments)
        ]
        if any(name not in self._objects for name in names):
            return msgspec.structs.replace(
                event, problem="missing: a fragment of the seed never arrived whole"
            )
        found = [await self._in_thread(self.hub.seed, p, self._objects[name]) for p, name in enumerate(names)]
        digests = [self.hub.digest(p, 0) for p in range(len(names))]
        return msgspec.structs.replace(event, finite=all(f.finite for f in found), digests=digests)

    # ---- objects -------------------------------------------------------------------------------------

    def buffer_for(self, name: str, total_bytes: int) -> memoryview | None:
        """Room for an object that this run expects; anything else is turned away."""
        expected = self._expected_bytes(name)
        if expected is None:
            return None
        if expected != total_bytes and not name.startswith("state."):
            raise Refused("size", f"{name}: {total_bytes} bytes, {expected} expected")
        if name.startswith("contribution.") and not self._make_way(name):
            return None
        free = self._free.get(total_bytes)
        self._arriving[name] = free.pop() if free else memoryview(bytearray(total_bytes))
        return self._arriving[name]

    def _expected_bytes(self, name: str) -> int | None:
        kind, _, rest = name.partition(".")
        if kind == "state":
            return MAX_STATE_BYTES if rest in self.machine.admission.transfers else None
        if kind == "offer":
            return self._offer_bytes(name)
        fields = rest.split(".")
        if self.hub is None or len(fields) not in (3, 4) or not all(f.isdecimal() for f in fields[1:]):
            return None
        member = self.machine.membership.members.get(fields[0])
        p = int(fields[2])
        if member is None or member.incarnation != int(fields[1]) or p >= self.method.policy.num_fragments:
            return None
        if kind == "contribution" and len(fields) == 4 and member.state == "training":
            return self.hub.payload_size(p)
        if kind == "seed" and len(fields) == 3 and member.state == "seeding":
            return self.hub.value_size(p)
        return None

    def _offer_bytes(self, name: str) -> int | None:
        """Gossip: a vector on its way between two members; room for those of its sender's newest round only."""
        offer, members = objects.parse_offer(name), self.machine.membership.members
        if offer is None or self.hub is None or self.method.policy.topology != "gossip":
            return None
        epoch, round, sender, receiver = offer
        if receiver not in members or sender not in members or members[sender].state != "training":
            return None
        for lying in self._offers_of(sender):
            known = objects.parse_offer(lying)
            assert known is not None
            if known[:2] > (epoch, round):
                return None
            if known[:2] < (epoch, round):
                self._forget(lying)
        if len(self._offers_of(sender)) >= MAX_PARTNERS:
            return None
        return offer_sizes(self.hub.plan, self.method)[self.method.policy.is_dense(round)]

    def _make_way(self, name: str) -> bool:
        """Whether a contribution is the newest of its learner's fragment; if so, older ones are let go of.

        Their learner has given them up, also in the middle. The last whole one stays: its message may be to come.
        """
        line, _, round = name.rpartition(".")
        known = {
            int(n.rpartition(".")[2]): n
            for n in (*self._arriving, *self._objects)
            if n.startswith(f"{line}.")
        }
        if max(known, default=0) > int(round):
            return False
        whole = [number for number in known if known[number] in self._objects]
        for number, older in known.items():
            if number != max(whole, default=None):
                self._forget(older)
        return True

    def _offers_of(self, learner: str) -> list[str]:
        return [
            n for n in (*self._arriving, *self._objects) if n[:6] == "offer." and n.split(".")[3] == learner
        ]

    def complete(self, name: str) -> None:
        self._objects[name] = self._arriving.pop(name)

    def _forget(self, name: str) -> None:
        if self.app is not None:
            self.app[HUB].inbox.forget(name)
        buffer = self._arriving.pop(name, None) or self._objects.pop(name, None)
        if buffer is not None and name.startswith("contribution."):
            self._free.setdefault(len(buffer), []).append(buffer)

    def _forget_uploads(self, learner: str, incarnation: int) -> None:
        """Drop what a process that is gone had begun to send; what it had handed over still counts."""
        for name in [*self._arriving, *self._objects]:
            if name.split(".")[1:3] == [learner, str(incarnation)]:
                self._forget(name)
        for name in self._offers_of(learner):
            self._forget(name)

    def source(self, name: str) -> memoryview:
        kind, _, rest = name.partition(".")
        if kind == "fragment" and self.hub is not None:
            p, _, version = rest.partition(".")
            if p.isdecimal() and version.isdecimal() and int(p) < self.method.policy.num_fragments:
                return self.hub.value_bytes(int(p), int(version))
        if kind == "increments" and self.hub is not None:
            numbers = rest.split(".")
            if len(numbers) == 3 and all(n.isdecimal() for n in numbers):
                index, base, newer = map(int, numbers)
                if index < self.method.policy.num_fragments and base < newer:
                    return self.hub.increment_bytes(index, base, newer)
        if kind in ("state", "offer"):
            return self._objects[name].toreadonly()
        raise KeyError(name)

    # ---- routes --------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """How the run stands."""
        assert self.app is not None
        body = status(self.machine, self.clock(), self.notes, self.app[HUB].total)
        for reason, (untold, _) in self._refusals.items():
            body["refused"][reason] += untold
        return body

    async def _status(self, request: web.Request) -> web.Response:
        body = self.status()
        return web.json_response(body, dumps=lambda value: msgspec.json.encode(value).decode())

    async def _model(self, request: web.Request) -> web.Response:
        """The newest global parameters as safetensors, one consistent vector of versions."""
        if self.hub is None or self.machine.phase == "birth":
            raise Refused("birth", "there are no parameters yet")
        versions, tokens = list(self.hub.versions), self.machine.ledger.tokens_trained
        tensors = self.hub.model_tensors()
        data = await self._in_thread(safetensors.torch.save, tensors)
        headers = {"X-Farflung-Versions": ",".join(map(str, versions)), "X-Farflung-Tokens": str(tokens)}
        return web.Response(body=data, content_type="application/octet-stream", headers=headers)

    async def _stop(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "suspend")
        if mode != "suspend" and mode != "finish":
            raise ValueError(f"mode = {mode!r}: suspend or finish")
        self.feed(ev.StopRequested(mode="finish" if mode == "finish" else "suspend"))
        return web.json_response({"phase": self.machine.phase})

    # ---- results -------------------------------------------------------------------------------------

    def save_model(self, path: Path) -> None:
        """Write the newest parameters where plain PyTorch can load them."""
        assert self.hub is not None
        tape.write_atomically(path, safetensors.torch.save(self.hub.model_tensors()))

    def save_shown(self, folder: Path) -> None:
        """Gossip: write what each learner handed in to ``folder/LEARNER.safetensors``."""
        if self.hub is not None:
            for learner, tensors in self.hub.shown().items():
                folder.mkdir(exist_ok=True)
                tape.write_atomically(folder / f"{learner}.safetensors", safetensors.torch.save(tensors))
