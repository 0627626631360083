"""The trainer's side of the mailbox: every command executed, every report made. No I/O, no clock.

A driver feeds commands in (`take`) and tells it of finished steps (`stepped`); reports come out of `reports`.
The runtime's learner and the lab's island are the same object behind different mailboxes.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from farflung.engine.island import Island
from farflung.engine.own_state import Own
from farflung.protocol import mailbox as box
from farflung.protocol.own_state import OwnState

RECENT = 1024  # boundary reports kept for a sidecar that takes over from a dead one


class Inner(Protocol):
    """What belongs to the inner loop: optimizer and schedule (may come from a donor), data position (never)."""

    cursor: int

    def donate(self) -> bytes:
        """Inner-optimizer and schedule state, the same bytes for the same state."""

    def receive(self, state: bytes) -> None: ...

    def digest(self, state: bytes) -> str: ...

    def lr(self) -> float:
        """Learning rate of the last step."""


@dataclass
class Progress:
    """Tokens of the whole run, as last announced, advanced by own steps; never decreasing."""

    tokens: int = 0
    budget_tokens: int = 0

    @property
    def fraction(self) -> float:
        return min(1.0, self.tokens / self.budget_tokens) if self.budget_tokens else 0.0


class Trainer:
    """Executes mailbox commands between inner steps.

    Args:
        island: the tensors.
        inner: the inner loop's state.
        put_state, get_state: the state slot, shared with whoever moves bytes.
        save: writes everything that a resume needs; returns a digest of it, or None if it wrote nothing.
        keep: writes the method's own state where a new process of this learner will find it. It is called before
            the report of the boundary is made, so that what is sent can be undone; None keeps nothing.

    Attributes:
        found: own state that a process before this one kept; let go of with the first step.
    """

    def __init__(
        self,
        island: Island,
        inner: Inner,
        *,
        put_state: Callable[[bytes], None],
        get_state: Callable[[], bytes],
        save: Callable[[], str | None],
        keep: Callable[[Own], None] | None = None,
    ) -> None:
        self.island, self.inner = island, inner
        self.progress = Progress()
        self.begun: box.Begin | None = None
        self.installed = False
        self.saved = False
        self.ended: str | None = None
        self.reports: list[box.AnyReport] = []
        self.sequence = 0  # boundary reports of this incarnation
        self.recent: deque[box.BoundaryPassed] = deque(maxlen=RECENT)  # the last of them
        self._after: list[box.AnyCommand] = []  # to be done once the boundary is complete
        self._put_state, self._get_state, self._save = put_state, get_state, save
        self.found: Own | None = None
        self.keep = keep
        self._kept_step: int | None = None

    def take(self, command: box.AnyCommand) -> None:
        """Take in a command. What touches parameters or state is done at the boundary, in the order posted."""
        match command:
            case box.Adopt() | box.Snapshot() | box.Settle() | box.RunUntil() | box.Mix():
                self.island.post(command)
            case box.Begin():
                self.begun = command
            case box.Advance():
                self.progress.tokens = max(self.progress.tokens, command.tokens)
                self.progress.budget_tokens = command.budget_tokens
            case box.Seed() | box.Load() | box.Donate() | box.Show() | box.Save():
                self._after.append(command)
            case box.End():
                self.ended = command.reason

    def may_step(self) -> tuple[bool, str]:
        """Whether the next step may begin, else what is waited for."""
        if self.ended is not None:
            return False, self.ended
        if self.saved:
            return False, "saved: waiting for the end"
        if not self.installed:
            return False, "waiting for the first parameters"
        return self.island.may_step()

    def stepped(
        self,
        tokens: int,
        *,
        step_s: float,
        wait_s: float = 0.0,
        loss: float | None = None,
        progress_tokens: int = 0,
    ) -> None:
        """A step ended: the boundary is here. `progress_tokens`: the run's tokens that its schedule saw."""
        self.progress.tokens += tokens
        self.found = None
        report = self.island.boundary(
            tokens,
            step_s=step_s,
            wait_s=wait_s,
            loss=loss,
            lr=self.inner.lr(),
            progress_tokens=progress_tokens,
            cursor=self.inner.cursor,
        )
        self._passed(report)
        self._complete()

    def idle(self, wait_s: float = 0.0) -> None:
        """Execute what is due at the boundary where we wait."""
        if self.installed:
            report = self.island.idle(wait_s=wait_s, lr=self.inner.lr(), cursor=self.inner.cursor)
            if report is not None:
                self._passed(report)
        self._complete()

    def _passed(self, report: box.BoundaryPassed) -> None:
        self.sequence += 1
        self._keep_own()
        self.recent.append(report)
        self.reports.append(report)

    def _keep_own(self) -> None:
        """Keep own state when a round changed it, and every H steps: so it is never older than that."""
        island, every = self.island, self.island.method.policy.sync_every_steps
        if self.keep is None or self.begun is None or not island.own_names:
            return
        if not (island.own_changed or self._kept_step is None or island.step - self._kept_step >= every):
            return
        fragments, tensors = island.own()
        about = OwnState(
            run=self.begun.run, incarnation=self.begun.incarnation, step=island.step, fragments=fragments
        )
        self.keep(Own(about=about, tensors=tensors))
        self._kept_step, island.own_changed = island.step, False

    def _complete(self) -> None:
        commands, self._after = self._after, []
        for command in commands:
            match command:
                case box.Seed():
                    self.island.seed()
                    sizes = [self.island.value_size(p) for p in range(self.island.plan.num_fragments)]
                    self.reports.append(box.SeedTaken(num_bytes=sizes))
                case box.Load():
                    self._load(command)
                case box.Donate():
                    self._donate(command)
                case box.Show():
                    self.reports.append(self.island.show(command))
                case box.Save():
                    digest = self._save() or ""
                    self.saved = True
                    self.reports.append(box.SaveDone(step=self.island.step, digest=digest))

    def _load(self, command: box.Load) -> None:
        digests = self.island.load(command)
        inner_digest = None
        if command.state:
            state = self._get_state()
            self.inner.receive(state)
            inner_digest = self.inner.digest(self.inner.donate())
        if command.own is not None and self.found is not None:
            self.island.take_own(self.found, command.own)
        self.inner.cursor = command.cursor
        self.installed, self.sequence = True, 0
        self.recent.clear()
        self._kept_step = None
        self._keep_own()
        self.reports.append(
            box.Loaded(
                versions=command.versions, digests=digests, inner_digest=inner_digest,
                lr=self.inner.lr() if command.state else None, cursor=self.inner.cursor, step=self.island.step,
                own_digests=self.island.own_digests(),
            )
        )  # fmt: skip

    def _donate(self, command: box.Donate) -> None:
        state = self.inner.donate()
        self._put_state(state)
        self.reports.append(
            box.Donated(
                transfer=command.transfer, num_bytes=len(state), digest=self.inner.digest(state),
                lr=self.inner.lr(), step=self.island.step,
            )
        )  # fmt: skip
