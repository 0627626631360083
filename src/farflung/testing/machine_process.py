"""One learner of a world of machines: its process, its mailbox, its control link."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from farflung.protocol import actions as act
from farflung.protocol import mailbox as box
from farflung.protocol import messages as msg
from farflung.protocol.learner import LearnerMachine
from farflung.testing.trainer_stub import TokenTrainer

if TYPE_CHECKING:
    from farflung.testing.machine_world import MachineWorld

TOKENS_PER_STEP = 10
SLOWEST = 5  # the longest step, in usual ones: deadlines follow steps, and a walk is short


class Link:
    """A control connection: two queues, first in, first out. None is the end of one."""

    def __init__(self, number: int, process: Process) -> None:
        self.number, self.process = number, process
        self.up: deque[Any] = deque()
        self.down: deque[Any] = deque()
        self.open_up = self.open_down = True

    def close(self, keep_up: int | None = None, keep_down: int | None = None) -> None:
        """Both ends will learn of it, after so many of the messages that are on their way; the rest is lost."""
        for queue, is_open, keep in (
            (self.up, self.open_up, keep_up),
            (self.down, self.open_down, keep_down),
        ):
            if is_open:
                while keep is not None and len(queue) > keep:
                    queue.pop()
                queue.append(None)
        self.open_up = self.open_down = False


class Process:
    """One learner: trainer, machine, mailbox, transfers. A restart is another life."""

    def __init__(self, name: str, world: MachineWorld, step_s: float) -> None:
        self.name, self.world, self.step_s = name, world, step_s
        self.alive = self.frozen = False
        self.link: Link | None = None
        self.saved: TokenTrainer | None = None
        self.ended: act.Exit | None = None
        self.trainer: TokenTrainer
        self.last_contribute: msg.Contribute | None = None

    def start(self, saved: TokenTrainer | None = None) -> None:
        world, policy = self.world, self.world.policy
        world.lives += 1
        self.alive, self.frozen, self.ended = True, False, None
        if saved is not None and policy.pace == "lockstep":
            saved.limit = box.RunUntil(step=saved.step, reason="waiting for the sidecar")
        self.trainer = saved or TokenTrainer(
            self.name, world.lives, policy.num_fragments, policy.carries_tokens, TOKENS_PER_STEP
        )
        self.machine = LearnerMachine(policy, learner=self.name)
        self.timers: dict[str, float] = {}
        self.jobs: list[Any] = [act.Connect()]
        self.stalled: list[Any] = []  # transfers that hang
        self.began_s = world.now
        self.last_contribute = None
        self.trainer.reports.append(self.trainer.ready(world.method_digest))

    def stop(self, keep_up: int | None = None) -> None:
        """The process is gone; the syncer may still hear the first `keep_up` of its last words."""
        self.alive = False
        self.jobs.clear()
        self.stalled.clear()
        self.timers.clear()
        self.trainer.reports.clear()
        if self.link is not None:
            self.link.close(keep_up, 0)
            self.link.down.clear()
            self.link = None

    def may_turn(self) -> bool:
        return self.alive and not self.frozen and (self.trainer.told or self.trainer.may_step())

    def turn(self) -> None:
        """The trainer comes to a boundary."""
        stepped = self.trainer.may_step()
        took_s = max(1e-3, self.world.now - self.began_s)
        self.trainer.boundary(stepped, min(took_s, SLOWEST * self.step_s))
        self.began_s = self.world.now
        if self.trainer.saved is not None:
            self.saved = self.trainer.saved
