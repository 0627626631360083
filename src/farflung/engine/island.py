"""The tensors of one learner: executes mailbox commands at boundaries between inner steps. No I/O."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from farflung.core.codecs import Codec
from farflung.core.codecs.base import typed
from farflung.core.fragments import Fragment, FragmentPlan, Piece
from farflung.core.vectors import gather, live_tensors, scatter_
from farflung.engine.buffers import digest
from farflung.engine.held import Held, Outstanding, SavedIsland, load_held, save_held
from farflung.engine.increments import Increments
from farflung.engine.layout import codec_of, in_round, payload_layout, put, value_layout
from farflung.engine.own_state import Own, describe_own, own_digests, own_names, take_own
from farflung.methods import Method
from farflung.methods.base import Local
from farflung.protocol.mailbox import (
    Adopt,
    BoundaryPassed,
    Load,
    Mix,
    RunUntil,
    Settle,
    Show,
    Shown,
    Snapshot,
    Taken,
)
from farflung.protocol.own_state import OwnFragment

Slots = Callable[[int], Tensor]
"""Fragment -> uint8 vector that the driver shares with whoever moves bytes."""

C = TypeVar("C", Adopt, Snapshot, Settle)
IslandCommand = Adopt | Snapshot | Settle | Mix | RunUntil


class Island:
    """Live parameters, held bases, counters and method state of one learner.

    All methods run on the trainer's thread. `post` only queues; `boundary` and `idle` execute, in this order:
    fates, adoptions, snapshots, each in the order posted. A command waits while its ``at_step`` lies ahead. A
    snapshot also waits

    * until its fragment was trained at least one step since the last adoption;
    * while another contribution of the fragment has no fate, since it owns the uplink slot: every `Taken`
      must be answered by a `Settle`, or by an `Adopt` that includes it;
    * while merged work is still part of the live value, since it would be sent twice.

    A ``final`` snapshot waits for a fate only; in the other two cases it is reported as skipped.

    Repeats are ignored: a round already taken, a version not newer than the one held, a fate already known. A
    newer snapshot replaces a queued one of the same fragment.

    Args:
        model: any module; its trainable parameters must be those of the plan.
        plan: the run's fragment plan.
        method: the run's method.
        uplink: slot of ``payload_size(fragment)`` bytes for contributions.
        downlink: slot of ``value_size(fragment)`` bytes for versions. It may be reused once the `Adopt` that
            needs it was reported.
    """

    def __init__(
        self, model: nn.Module, plan: FragmentPlan, method: Method, uplink: Slots, downlink: Slots
    ) -> None:
        self.plan = plan
        self.method = method
        self.step = 0
        self._live = live_tensors(model)
        self._uplink = uplink
        self._downlink = downlink
        self._held = [self._fresh(fragment) for fragment in plan.fragments]
        self._codecs = [codec_of(f, method.codec, plan.tensors, method.num_vectors) for f in plan.fragments]
        self._payloads = [
            payload_layout(f, codec, method.num_vectors)
            for f, codec in zip(plan.fragments, self._codecs, strict=True)
        ]
        self._values = [value_layout(fragment) for fragment in plan.fragments]
        self._increments = self._exact_increments()
        self._queue: list[Adopt | Snapshot | Settle] = []
        self._run_until = RunUntil(step=None)
        self._scratch: dict[torch.device, Tensor] = {}
        self.own_names = own_names(method)
        self.own_changed = False  # there is more to keep than when this was last set to False

    # ---- what the driver reads -------------------------------------------------------------------------

    @property
    def versions(self) -> list[int]:
        """Version held of each fragment; -1 before the first installation."""
        return [held.version for held in self._held]

    @property
    def open_rounds(self) -> list[tuple[int, int]]:
        """(fragment, round) of every contribution without a fate."""
        return [(i, h.out.round) for i, h in enumerate(self._held) if h.out and not h.out.merged]

    def counters(self, fragment: int) -> tuple[int, int]:
        """(c_steps, c_tokens): trained since the last adoption of the fragment and not merged."""
        held = self._held[fragment]
        return held.c_steps, held.c_tokens

    def base(self, fragment: int) -> Tensor:
        """The bits last installed, fp32 ``[N]``: the island's own vector, not to be written."""
        return self._held[fragment].base

    def payload_size(self, fragment: int) -> int:
        """Bytes of the fragment's uplink slot."""
        return self._payloads[fragment].size_bytes

    def value_size(self, fragment: int) -> int:
        """Bytes of the fragment's downlink slot."""
        return self._values[fragment].size_bytes

    def may_step(self) -> tuple[bool, str]:
        """Whether the next step may begin, else what it waits for (`RunUntil`)."""
        limit = self._run_until.step
        return (True, "") if limit is None or self.step < limit else (False, self._run_until.reason)

    # ---- boundaries ------------------------------------------------------------------------------------

    def post(self, command: IslandCommand) -> None:
        """Queue a command for the next `boundary` or `idle`; `RunUntil` holds at once.

        Raises:
            TypeError: a command that is not `Adopt`, `Snapshot`, `Settle` or `RunUntil`. `Load` and `Seed`
                are methods; the others are the driver's.
        """
        if isinstance(command, RunUntil):
            self._run_until = command
        elif isinstance(command, Adopt | Snapshot | Settle):
            self._queue.append(command)
        else:
            raise TypeError(f"{type(command).__name__} is not for the island")

    def boundary(
        self,
        tokens: int,
        *,
        step_s: float = 0.0,
        wait_s: float = 0.0,
        loss: float | None = None,
        lr: float | None = None,
        progress_tokens: int = 0,
        cursor: int = 0,
    ) -> BoundaryPassed:
        """A step of ``tokens`` tokens ended: count it, execute what is due, and report both.

        The keyword arguments are the driver's and pass through to the report.
        """
        self.step += 1
        for held in self._held:
            held.count(tokens)
        return BoundaryPassed(
            **self._execute(),
            step=self.step,
            tokens=tokens,
            step_s=step_s,
            wait_s=wait_s,
            loss=loss,
            lr=lr,
            progress_tokens=progress_tokens,
            cursor=cursor,
        )

    def idle(self, *, wait_s: float = 0.0, lr: float | None = None, cursor: int = 0) -> BoundaryPassed | None:
        """Execute what is due at the present boundary, without a step; None if that was nothing to report."""
        done = self._execute()
        if not any(done.values()):
            return None
        return BoundaryPassed(**done, step=self.step, wait_s=wait_s, lr=lr, cursor=cursor)

    def _execute(self) -> dict[str, Any]:
        """Do what is due; returns the fields of a report that say what was done."""
        adopted: list[tuple[int, int]] = []
        taken: list[Taken] = []
        skipped: list[int] = []
        for settle in self._due(Settle):
            self._settle(settle)
        for adopt in self._due(Adopt):
            if self._adopt(adopt):
                adopted.append((adopt.fragment, adopt.version))
        newest = {s.fragment: s for s in sorted(self._due(Snapshot), key=lambda s: s.round)}
        for snapshot in newest.values():
            held = self._held[snapshot.fragment]
            if snapshot.round <= held.last_round:
                continue
            open_, stuck = held.out is not None, held.out is not None and held.out.merged
            if snapshot.final and (stuck or not (open_ or held.c_steps)):
                skipped.append(snapshot.fragment)
            elif open_ or not held.c_steps:
                self._queue.append(snapshot)
            else:
                taken.append(self._take(snapshot))
        return {"adopted": adopted, "taken": taken, "skipped": skipped}

    def _due(self, kind: type[C]) -> list[C]:
        """Remove and return the queued commands of this kind whose time has come."""
        due = [c for c in self._queue if isinstance(c, kind) and getattr(c, "at_step", 0) <= self.step]
        self._queue = [c for c in self._queue if c not in due]
        return due

    # ---- the three acts --------------------------------------------------------------------------------

    def _settle(self, command: Settle) -> None:
        held = self._held[command.fragment]
        if held.out is None or held.out.round != command.round or held.out.merged:
            return
        held.settle(self.method.settle(held.state, held.out.pending, command.merged), command.merged)
        if not command.merged:
            held.last_round = command.round - 1  # the same round may be asked for again after a resume

    def _adopt(self, command: Adopt) -> bool:
        held = self._held[command.fragment]
        if command.version <= held.version:
            return False
        included = held.out is not None and command.included == held.out.round
        if included and command.included is not None:
            self._settle(Settle(fragment=command.fragment, round=command.included, merged=True))
        local = Local(
            x=self._gathered(held.fragment),
            base=held.base,
            state=held.state,
            snapshot=held.out.snapshot if held.out else None,
        )
        result, buffers, counters = self._arrived(held, command)
        after = self.method.adopt(local, result, included)
        self._install(held, after.base, buffers, counters)
        if after.x is not after.base:
            scatter_(after.x, self._live, held.fragment.pieces)
        held.state = after.state
        held.version = command.version
        held.restart(included, self.method.policy.carries_tokens)
        if held.out is not None:
            held.out.snapshot = after.snapshot
        return True

    def _arrived(self, held: Held, command: Adopt) -> tuple[Tensor, Tensor, Tensor]:
        """The version in the downlink slot: parameters on the base's device, buffers, counters."""
        slot = self._downlink(command.fragment)
        if command.base_version is None:
            params, buffers, counters = self._values[command.fragment].split(slot)
            return typed(params, torch.float32).to(held.base.device), buffers, counters
        if command.base_version != held.version:
            raise ValueError(
                f"increments of fragment {command.fragment} from version {command.base_version}, held is "
                f"{held.version}"
            )
        increments = self._increments[command.fragment]
        value, last = increments.add_to(held.base, slot, command.base_version, command.version)
        return value, last.buffers, last.counters

    def _exact_increments(self) -> list[Increments]:
        """Formats of the downlink's increments, if the run has any.

        Raises:
            ValueError: a parameter can't hold the hub's value, so that nothing could be added to it.
        """
        if self.method.downlink is None:
            return []
        for piece in (piece for fragment in self.plan.fragments for piece in fragment.pieces):
            dtype = self._live[piece.name].dtype
            if dtype != torch.float32:
                raise ValueError(
                    f"downlink_codec: increments need fp32 parameters, {piece.name} is {dtype}; leave it out"
                )
        return [Increments(f, self.method.downlink, self.plan.tensors) for f in self.plan.fragments]

    def _take(self, command: Snapshot) -> Taken:
        held = self._held[command.fragment]
        x = self._gathered(held.fragment)
        contribution = self.method.contribute(Local(x=x, base=held.base, state=held.state))
        payload, buffers, counters = self._payloads[command.fragment].split(self._uplink(command.fragment))
        codec = in_round(self._codecs[command.fragment], command.round)
        encode_into(codec, contribution.payload, payload)
        pending = contribution.pending
        snapshot = x.clone() if self.method.keeps_snapshot else None
        if self.method.sent is not None:
            pending = self.method.sent(contribution, _decoded(codec, payload, contribution.payload, x))
        self._put_riders(held.fragment, buffers, counters)
        held.out = Outstanding(
            round=command.round,
            base_version=held.version,
            steps=held.c_steps,
            tokens=held.c_tokens,
            pending=pending,
            snapshot=snapshot,
        )
        held.last_round = command.round
        self.own_changed = True
        return self._taken(held.fragment.index, held.out)

    def _taken(self, fragment: int, out: Outstanding) -> Taken:
        return Taken(
            fragment=fragment,
            round=out.round,
            base_version=out.base_version,
            steps=out.steps,
            tokens=out.tokens,
            num_bytes=self.payload_size(fragment),
        )

    def outstanding(self) -> list[Taken]:
        """Contributions without a fate, as they were reported; their payloads still lie in the uplink slots."""
        return [self._taken(i, h.out) for i, h in enumerate(self._held) if h.out and not h.out.merged]

    def drop_queue(self) -> None:
        """Forget commands not yet executed: the machine that posted them is gone, and its limits with it."""
        self._queue.clear()
        self._run_until = RunUntil(step=None)

    def show(self, command: Show) -> Shown:
        """Only a gossip learner has parameters of its own to show (`PeerIsland`)."""
        raise TypeError("a hub holds the parameters of this run")

    # ---- birth, rejoin, resume -------------------------------------------------------------------------

    def seed(self) -> None:
        """Write every fragment's live value into its downlink slot."""
        for index, fragment in enumerate(self.plan.fragments):
            params, buffers, counters = self._values[index].split(self._downlink(index))
            put(params, self._gathered(fragment))
            self._put_riders(fragment, buffers, counters)

    def load(self, command: Load) -> list[str]:
        """Install one version of every fragment from the downlink slots, and start over from there.

        Counters, method state, queued commands and open contributions are dropped; inner state and data
        position are the driver's.

        Returns:
            One digest a fragment: xxh3-128 of the parameters as read back from the model, fp32. Elements that
            the model holds in fewer bits can't be read back and are digested as they came; so every learner's
            digest equals the hub's.
        """
        self.step = command.step
        self._queue.clear()
        return [self._load_one(index, version) for index, version in enumerate(command.versions)]

    def _load_one(self, index: int, version: int) -> str:
        held = self._held[index] = self._fresh(self.plan.fragments[index], base=self._held[index].base)
        params, buffers, counters = self._values[index].split(self._downlink(index))
        value = typed(params, torch.float32)
        self._install(held, value.to(held.base.device), buffers, counters)
        held.version = version
        proof = held.base.to("cpu", copy=True)
        for piece in held.fragment.pieces:
            if self._live[piece.name].dtype.itemsize < proof.itemsize:
                at = slice(piece.offset, piece.offset + piece.length)
                proof[at] = value[at]
        return digest(proof)

    def save(self) -> SavedIsland:
        """Everything that resuming needs but the live model and the inner optimizer: see `SavedIsland`.

        Queued commands are not part of it: they belong to the machine that posts them. The tensors are
        references: write or clone them before the next boundary.
        """
        return save_held(self._held, self.step)

    def load_saved(self, saved: SavedIsland) -> None:
        """Take over what `save` gave (copied); the live model is restored by the driver, bits unchanged.

        Raises:
            ValueError: it is not of this plan.
        """
        self.step = load_held(self._held, saved)
        self._queue.clear()

    # ---- the method's own state ------------------------------------------------------------------------

    def own(self) -> tuple[list[OwnFragment], dict[str, Tensor]]:
        """What is this learner's alone: digests and tensors (references), one entry a fragment."""
        return describe_own(self._held, self.own_names)

    def own_digests(self) -> list[str]:
        """One digest a fragment; none if the method has no own state."""
        return own_digests(self._held, self.own_names) if self.own_names else []

    def take_own(self, own: Own, merged: list[bool]) -> None:
        """Go on with own state that was kept; ``merged``: of a fragment, with its last contribution."""
        take_own(self._held, self.own_names, own, merged)

    # ---- vectors ---------------------------------------------------------------------------------------

    def _fresh(self, fragment: Fragment, base: Tensor | None = None) -> Held:
        base = gather(self._live, fragment.pieces, out=base)
        state = {name: t.to(base.device) for name, t in self.method.init(fragment.num_elements).items()}
        return Held(fragment=fragment, base=base, state=state)

    def _install(self, held: Held, base: Tensor, buffers: Tensor, counters: Tensor) -> None:
        """Write a fragment into the live model, and keep as base what the model then holds."""
        scatter_(base, self._live, held.fragment.pieces)
        scatter_(typed(buffers, torch.float32), self._live, held.fragment.buffers)
        scatter_(typed(counters, torch.int64), self._live, held.fragment.counters)
        gather(self._live, held.fragment.pieces, out=held.base)

    def _gathered(self, fragment: Fragment) -> Tensor:
        """The live parameters, fp32 ``[N]``, in scratch memory that the next call reuses."""
        device = self._held[fragment.index].base.device
        if device not in self._scratch:
            size = max(f.num_elements for f in self.plan.fragments)
            self._scratch[device] = torch.empty(size, device=device)
        return gather(self._live, fragment.pieces, out=self._scratch[device][: fragment.num_elements])

    def _put_riders(self, fragment: Fragment, buffers: Tensor, counters: Tensor) -> None:
        put(buffers, self._riders(fragment.buffers, torch.float32))
        put(counters, self._riders(fragment.counters, torch.int64))

    def _riders(self, pieces: tuple[Piece, ...], dtype: torch.dtype) -> Tensor:
        return gather(self._live, pieces, dtype=dtype)


def _decoded(codec: Codec, payload: Tensor, sent: Tensor, spare: Tensor) -> Tensor:
    """What others decode of a payload, in spare memory where that is possible: a snapshot costs no more for it."""
    mine = spare.data_ptr() != sent.data_ptr() and spare.device == payload.device
    return codec.decode(payload, spare.numel(), out=spare if mine else None).to(spare.device)


def encode_into(codec: Codec, values: Tensor, slot: Tensor) -> None:
    """Encode on the values' own device, into the slot."""
    if values.device == slot.device:
        codec.encode(values, out=slot)
    else:
        slot.copy_(codec.encode(values))
