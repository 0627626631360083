"""A stand-in for the trainer: what `engine.Trainer` with `engine.Island` would answer, in tokens and steps."""

from collections import deque
from dataclasses import dataclass, field, replace

from farflung.protocol import mailbox as box
from farflung.testing.stubs import Broken, Payload


@dataclass
class HeldFragment:
    """One fragment at a learner: what `engine.held.Held` knows, with steps in place of tensors."""

    version: int = -1
    since: int = 0  # the live value holds own steps from here on, beside the version
    last_round: int = -1
    out: Payload | None = None
    merged: bool = False  # fate of `out`
    in_x: bool = True  # the work of `out` is still part of the live value

    def restart(self, now: int, included: bool, carries: bool) -> None:
        """After an adoption."""
        if not carries:
            self.since = now
        elif included and self.out is not None:
            self.since = self.out.until
        self.in_x = carries
        if included or (self.merged and not carries):
            self.out = None


@dataclass
class TokenTrainer:
    """One trainer process.

    Args:
        learner: whose.
        life: a number for this life of the learner's parameters; a resume goes on with it.
        num_fragments, carries: of the policy.
        tokens: of a step.
    """

    learner: str
    life: int
    num_fragments: int
    carries: bool
    tokens: int
    step: int = 0
    steps_done: int = 0  # in this life
    cursor: int = 0
    sequence: int = 0
    installed: bool = False
    saved: "TokenTrainer | None" = None
    ended: bool = False
    begun: box.Begin | None = None
    limit: box.RunUntil = field(default_factory=lambda: box.RunUntil(step=None))
    inner: str = "fresh"
    poisoned: bool = False  # the next contribution is not finite
    guarded: bool = False  # it resumed, so its machine does not know what is merged: it waits by itself
    told: bool = False  # a command came since the last boundary

    def __post_init__(self) -> None:
        self.held = [HeldFragment() for _ in range(self.num_fragments)]
        self.uplink: list[Payload | None] = [None] * self.num_fragments
        self.downlink: list[tuple[int, str] | None] = [None] * self.num_fragments
        self.downlink_bases: list[int | None] = [None] * self.num_fragments
        self.state_slot = ""
        self.reports: deque[box.AnyReport] = deque()
        self.queue: list[box.Adopt | box.Snapshot | box.Settle] = []
        self.after: list[box.AnyCommand] = []

    def take(self, command: box.AnyCommand) -> None:
        self.told = True
        kind = type(command)
        if kind is box.Adopt or kind is box.Snapshot or kind is box.Settle:
            self.queue.append(command)  # type: ignore[arg-type]
        elif isinstance(command, box.RunUntil):
            if command.step is not None and not command.reason:
                raise Broken("a wait has no reason", f"{command}")
            self.limit = command
        elif isinstance(command, box.Begin):
            self.begun = command
        elif isinstance(command, box.End):
            self.ended = True
        elif not isinstance(command, box.Advance):
            self.after.append(command)

    def may_step(self) -> bool:
        if self.ended or self.saved is not None or not self.installed:
            return False
        return self.limit.step is None or self.step < self.limit.step

    def boundary(self, stepped: bool, step_s: float) -> None:
        """A step ended, or commands are executed where the trainer stands."""
        self.told = False
        if stepped:
            self.step += 1
            self.steps_done += 1
            self.cursor += 1
        if self.installed and (stepped or self.queue):
            adopted, taken, skipped = self._execute()
            if stepped or adopted or taken or skipped:
                self.sequence += 1
                self.reports.append(
                    box.BoundaryPassed(
                        step=self.step, tokens=self.tokens if stepped else 0, step_s=step_s if stepped else 0.0,
                        cursor=self.cursor, lr=0.1, adopted=adopted, taken=taken, skipped=skipped,
                    )
                )  # fmt: skip
        if self.after:
            commands, self.after = self.after, []
            for command in commands:
                self._complete(command)

    # ---- fates, adoptions, snapshots -----------------------------------------------------------------

    def _execute(self) -> tuple[list[tuple[int, int]], list[box.Taken], list[int]]:
        adopted: list[tuple[int, int]] = []
        taken: list[box.Taken] = []
        skipped: list[int] = []
        due, self.queue = self.queue, []
        snapshots: dict[int, box.Snapshot] = {}
        for command in due:
            if isinstance(command, box.Settle):
                self._settle(command.fragment, command.round, command.merged)
            elif command.at_step > self.step:
                self.queue.append(command)
            elif isinstance(command, box.Snapshot):
                known = snapshots.get(command.fragment)
                if known is None or command.round >= known.round:
                    snapshots[command.fragment] = command
        for command in due:
            if isinstance(command, box.Adopt) and command.at_step <= self.step and self._adopt(command):
                adopted.append((command.fragment, command.version))
        for snapshot in snapshots.values():
            self._snapshot(snapshot, taken, skipped)
        return adopted, taken, skipped

    def _settle(self, p: int, round: int, merged: bool) -> None:
        held = self.held[p]
        if held.out is None or held.out.round != round or held.merged:
            return
        held.merged = merged
        if not merged:
            held.last_round = round - 1
        if not (merged and held.in_x):
            held.out = None

    def _adopt(self, command: box.Adopt) -> bool:
        p, held = command.fragment, self.held[command.fragment]
        if command.version <= held.version:
            return False
        slot = self.downlink[p]
        replaced = self.limit.step == 0 or any(isinstance(c, box.Load) for c in self.after)  # soon, all of it
        if not replaced and (slot is None or slot[0] != command.version):
            raise Broken("adopted bits are of another version", f"{command}, the slot holds {slot}")
        base = self.downlink_bases[p]
        if not replaced and (command.base_version != base or base not in (None, held.version)):
            raise Broken(
                "increments upon another base", f"{command}, {base} in the slot, {held.version} held"
            )
        included = held.out is not None and command.included == held.out.round
        if included and command.included is not None:
            self._settle(p, command.included, True)
        held.version = command.version
        held.restart(self.steps_done, included, self.carries)
        return True

    def _snapshot(self, command: box.Snapshot, taken: list[box.Taken], skipped: list[int]) -> None:
        """As `Island`, but trusting the machine that merged work is never asked for again."""
        p, held = command.fragment, self.held[command.fragment]
        if command.round <= held.last_round:
            return
        open_, worked = held.out is not None and not held.merged, self.steps_done > held.since
        stuck = held.out is not None and held.merged
        if command.final and (stuck or not (open_ or worked)):
            skipped.append(p)
        elif open_ or not worked or (stuck and self.guarded):
            self.queue.append(command)
        else:
            tokens = (self.steps_done - held.since) * self.tokens
            out = held.out = self.uplink[p] = Payload(
                self.life, self.learner, p, command.round, held.version, held.since, self.steps_done,
                tokens, not self.poisoned,
            )  # fmt: skip
            held.merged, held.in_x, held.last_round, self.poisoned = False, True, command.round, False
            taken.append(_taken(out))

    # ---- the rest ------------------------------------------------------------------------------------

    def _complete(self, command: box.AnyCommand) -> None:
        if isinstance(command, box.Seed):
            self.downlink = [(0, f"{p}.0") for p in range(self.num_fragments)]
            self.reports.append(box.SeedTaken(num_bytes=[8] * self.num_fragments))
        elif isinstance(command, box.Load):
            self._load(command)
        elif isinstance(command, box.Donate):
            self.inner = self.state_slot = f"{self.learner}.{self.life}.{self.steps_done}"
            self.reports.append(
                box.Donated(transfer=command.transfer, num_bytes=8, digest=self.inner, lr=0.1, step=self.step)
            )
        elif isinstance(command, box.Save):
            self.reports.append(box.SaveDone(step=self.step))
            self.saved = self.copy()

    def _load(self, command: box.Load) -> None:
        self.queue.clear()
        self.step, self.cursor, self.sequence, self.installed = command.step, command.cursor, 0, True
        self.held = [HeldFragment(version=v, since=self.steps_done) for v in command.versions]
        if command.state:
            self.inner = self.state_slot
        self.reports.append(
            box.Loaded(
                versions=command.versions, digests=[slot[1] if slot else "" for slot in self.downlink],
                inner_digest=self.inner if command.state else None, lr=0.1 if command.state else None,
                cursor=self.cursor, step=self.step,
            )
        )  # fmt: skip

    def copy(self) -> "TokenTrainer":
        """What a save file holds."""
        saved = TokenTrainer(
            self.learner, self.life, self.num_fragments, self.carries, self.tokens, self.step,
            self.steps_done, self.cursor, self.sequence, True, begun=self.begun, inner=self.inner, guarded=True,
        )  # fmt: skip
        saved.held = [replace(held) for held in self.held]
        saved.uplink = list(self.uplink)
        return saved

    def ready(self, method: str) -> box.Ready:
        """The first report of this process; it names the incarnation where it goes on with one."""
        resumed = self.begun if self.installed else None
        outs = [held.out for held in self.held if held.out is not None and not held.merged]
        return box.Ready(
            learner=self.learner, fingerprint="f", layout="{}", method=method,
            run=resumed.run if resumed else None, incarnation=resumed.incarnation if resumed else None,
            held=[held.version for held in self.held], step=self.step, sequence=self.sequence,
            outstanding=[_taken(out) for out in outs],
        )  # fmt: skip


def _taken(out: Payload) -> box.Taken:
    return box.Taken(
        fragment=out.fragment, round=out.round, base_version=out.base, steps=out.until - out.since,
        tokens=out.tokens, num_bytes=8,
    )  # fmt: skip
