"""Islands that compute in worker processes, so that the lab uses every core; with the same result as in one.

A worker holds the trainers of some islands. `begin` is only sent: steps are computed in one thread, in that order,
while the lab lives through other moments; `end` collects one, and need not wait for the steps of others. Trainers
are built in that thread too, while the lab goes on: all of a run have one fragment plan. What a snapshot, a seed
or a donation put into a slot comes along with the report, so that nobody asks for it later.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec

from farflung.config import RunConfig
from farflung.core.fragments import FragmentPlan
from farflung.ipc.channel import Channel
from farflung.lab.body import Body, LocalBody
from farflung.protocol import mailbox as box
from farflung.protocol.mailbox import Command
from farflung.protocol.own_state import MISSING, OwnState

ANSWER_S = 600.0  # the longest step that is waited for


class Ping(Command, frozen=True):
    """Answered when a first trainer was built, and dropped."""


class New(Command, frozen=True):
    body: int


class Inherit(Command, frozen=True):
    """Find what another trainer of this worker left on its disk."""

    body: int
    former: int


class Begin(Command, frozen=True):
    body: int


class End(Command, frozen=True):
    """End a step (`step_s` set) or look at the mailbox (None), with these commands posted before."""

    body: int
    commands: list[box.AnyCommand]
    step_s: float | None


class Write(Command, frozen=True):
    body: int
    fragment: int
    value: bytes


class PutState(Command, frozen=True):
    body: int
    state: bytes


class Close(Command, frozen=True):
    body: int


Request = Ping | New | Inherit | Begin | End | Write | PutState | Close


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    reports: list[box.AnyReport] = []
    slots: list[tuple[bool, int, bytes]] = []  # (seed, fragment, content)
    state: bytes | None = None
    may_step: bool = False
    own: OwnState = OwnState(problem=MISSING)


class Worker:
    """One worker process, seen from the lab."""

    def __init__(self, config: RunConfig) -> None:
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "farflung.lab.worker", str(theirs.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
            env={**os.environ, "OMP_NUM_THREADS": str(config.recipe.threads)},
        )
        theirs.close()
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(config) + b"\n")
        self._process.stdin.close()
        self._channel: Channel[Answer] = Channel(ours, Answer)

    def wait_until_up(self) -> None:
        self.ask(Ping())

    def tell(self, request: Request) -> None:
        self._channel.send(request)

    def ask(self, request: Request) -> Answer:
        """Send and wait for the answer; there is never more than one on its way."""
        self._channel.send(request)
        answers = self._channel.wait(ANSWER_S)
        if len(answers) != 1:
            raise RuntimeError(f"a lab worker gave {len(answers)} answers within {ANSWER_S} s")
        return answers[0]

    def close(self) -> None:
        """End the process."""
        self._channel.close()

    def wait(self) -> None:
        """Until it has ended."""
        self._process.wait()


class RemoteBody(Body):
    """A trainer in a worker.

    Args:
        worker: where it is built.
        number: it has no other trainer of this number.
        plan: what the run's trainers have in common.
    """

    def __init__(self, worker: Worker, number: int, plan: FragmentPlan) -> None:
        self._worker, self._number = worker, number
        self._commands: list[box.AnyCommand] = []
        self._slots: dict[tuple[bool, int], bytes] = {}
        self._state = b""
        self._may_step = False
        self._own = OwnState(problem=MISSING)
        self.layout, self.fingerprint = plan.to_json(), plan.fingerprint()
        worker.tell(New(body=number))

    @property
    def own(self) -> OwnState:
        return self._own

    def inherit(self, old: "RemoteBody") -> None:
        self._own = old.own
        self._worker.tell(Inherit(body=self._number, former=old._number))

    def take(self, command: box.AnyCommand) -> None:
        self._commands.append(command)

    def begin(self) -> None:
        self._worker.tell(Begin(body=self._number))

    def end(self, step_s: float) -> list[box.AnyReport]:
        return self._ask(step_s)

    def idle(self) -> list[box.AnyReport]:
        return self._ask(None)

    def may_step(self) -> bool:
        return self._may_step

    def read(self, fragment: int, seed: bool) -> bytes:
        return self._slots[seed, fragment]

    def write(self, fragment: int, value: memoryview) -> None:
        self._worker.tell(Write(body=self._number, fragment=fragment, value=bytes(value)))

    def get_state(self) -> bytes:
        return self._state

    def put_state(self, state: bytes) -> None:
        self._worker.tell(PutState(body=self._number, state=state))

    def close(self) -> None:
        self._worker.tell(Close(body=self._number))

    def _ask(self, step_s: float | None) -> list[box.AnyReport]:
        commands, self._commands = self._commands, []
        answer = self._worker.ask(End(body=self._number, commands=commands, step_s=step_s))
        self._slots |= {(seed, p): content for seed, p, content in answer.slots}
        self._state = self._state if answer.state is None else answer.state
        self._may_step, self._own = answer.may_step, answer.own
        return answer.reports


def answer(body: LocalBody, request: End) -> Answer:
    """Worker's side of `end` and `idle`."""
    for command in request.commands:
        body.take(command)
    reports = body.idle() if request.step_s is None else body.end(request.step_s)
    slots: list[tuple[bool, int, bytes]] = []
    state: bytes | None = None
    for report in reports:
        if isinstance(report, box.BoundaryPassed):
            slots += [(False, t.fragment, body.read(t.fragment, seed=False)) for t in report.taken]
        elif isinstance(report, box.SeedTaken):
            slots += [(True, p, body.read(p, seed=True)) for p in range(len(report.num_bytes))]
        elif isinstance(report, box.Shown):
            slots.append((False, 1, body.read(1, seed=False)))
        elif isinstance(report, box.Donated):
            state = body.get_state()
    return Answer(reports=reports, slots=slots, state=state, may_step=body.may_step(), own=body.own)


def serve(channel: Channel[Any], make_body: Callable[[], LocalBody]) -> None:
    """A worker's life: do what comes, until the lab is gone (`PeerGone`)."""
    bodies: dict[int, Future[LocalBody]] = {}
    steps: dict[int, Future[None]] = {}  # begun and not yet ended, by body
    trainer = ThreadPoolExecutor(1)  # one, so that no two use torch's random state at once
    while True:
        for request in channel.wait(ANSWER_S):
            match request:
                case Ping():
                    trainer.submit(make_body).result()
                    channel.send(Answer())
                case New():
                    bodies[request.body] = trainer.submit(make_body)
                case Inherit():
                    bodies[request.body].result().inherit(bodies[request.former].result())
                case Begin():
                    body = bodies[request.body].result()
                    body.begin()
                    steps[request.body] = trainer.submit(body.compute)
                case End():
                    if request.step_s is not None:
                        steps.pop(request.body).result()
                    channel.send(answer(bodies[request.body].result(), request))
                case Write():
                    bodies[request.body].result().write(request.fragment, memoryview(request.value))
                case PutState():
                    bodies[request.body].result().put_state(request.state)
                case Close():
                    del bodies[request.body]
                    steps.pop(request.body, None)
        while channel.unsent:
            channel.flush()
