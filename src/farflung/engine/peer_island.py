"""The tensors of one gossip learner: it offers a vector, mixes with those of others, shows parameters. No I/O."""

from typing import Any

import torch
from torch import Tensor, nn

from farflung.core.codecs import Codec
from farflung.core.codecs.base import typed
from farflung.core.fragments import FragmentPlan
from farflung.core.norms import l2_norm
from farflung.engine.held import Held
from farflung.engine.island import Island, IslandCommand, Slots, encode_into
from farflung.engine.layout import Layout, Sections, codec_of, in_round, payload_layouts, put, value_layout
from farflung.engine.trainer import Inner
from farflung.methods import Method
from farflung.methods.base import Local
from farflung.protocol.mailbox import Load, Mix, Mixed, RunUntil, Show, Shown, Snapshot, Taken

_LENGTH_BYTES = 8


class PeerIsland(Island):
    """Live parameters, the point where the round began, and method state of one learner. One fragment.

    At a boundary it first mixes, then offers. A mix ends the round: it turns the vectors that lie in the named
    downlink slots and the one offered itself, each as decoded, into the correction ``sum_j w_j (y_i - y_j)``,
    unless the method makes it another way, and lets the method go on from there. A vector that is not finite, or
    that no encoder writes, is left out, and said so.

    Args:
        model: any module.
        plan: of one fragment.
        method: a gossip method.
        uplink: slot 0 of ``payload_size(0)`` bytes for the offered vector, slot 1 of ``value_size(0)`` bytes for
            parameters to show.
        downlink: slot 0 of ``value_size(0)`` bytes for parameters to install, others of ``payload_size(0)`` bytes
            for partners' vectors.
    """

    def __init__(
        self, model: nn.Module, plan: FragmentPlan, method: Method, uplink: Slots, downlink: Slots
    ) -> None:
        super().__init__(model, plan, method, uplink, downlink)
        self._layouts = payload_layouts(plan, method)
        self._ends: list[Mix] = []
        self._offered = -1  # round whose vector lies in the uplink slot
        self._mixed = -1  # round that was mixed last; a repeat is ignored

    # ---- boundaries ------------------------------------------------------------------------------------

    def post(self, command: IslandCommand) -> None:
        """Queue a command for the next `boundary` or `idle`; `RunUntil` holds at once.

        Raises:
            TypeError: not one of `Snapshot`, `Mix` and `RunUntil`.
        """
        if isinstance(command, Mix):
            self._ends.append(command)
        elif isinstance(command, Snapshot | RunUntil):
            super().post(command)
        else:
            raise TypeError(f"{type(command).__name__} is not for a gossip learner")

    def drop_queue(self) -> None:
        super().drop_queue()
        self._ends.clear()

    def _execute(self) -> dict[str, Any]:
        report: dict[str, Any] = {}
        due = [mix for mix in self._ends if mix.at_step <= self.step]
        self._ends = [mix for mix in self._ends if mix not in due]
        last = max(due, key=lambda mix: mix.round, default=None)
        if last is not None and last.round > self._mixed:
            report["mixed"] = self._mix(last)
        newest = max(self._due(Snapshot), key=lambda s: s.round, default=None)
        if newest is not None and newest.round > max(self._offered, self._mixed):
            report["taken"] = [self._offer(newest)]
        return report

    def _wire(self, round: int) -> tuple[Method, Codec, Layout]:
        """What the method is in a round, and how its vectors travel."""
        method, (held,) = self.method.in_round(round), self._held
        if method is self.method:
            return method, self._codecs[0], self._layouts[0]
        return method, codec_of(held.fragment, method.codec, self.plan.tensors), self._layouts[-1]

    def _offer(self, command: Snapshot) -> Taken:
        """Write the method's vector into the uplink slot."""
        (held,), (method, codec, layout) = self._held, self._wire(command.round)
        contribution = method.contribute(
            Local(x=self._gathered(held.fragment), base=held.base, state=held.state)
        )
        payload, buffers, counters = layout.split(self._uplink(0)[: layout.size_bytes])
        encode_into(in_round(codec, command.round), contribution.payload, payload)
        self._put_riders(held.fragment, buffers, counters)
        self._offered = command.round
        finite = bool(torch.isfinite(contribution.payload).all()) and bool(
            torch.isfinite(typed(buffers, torch.float32)).all()
        )
        return Taken(
            fragment=0, round=command.round, base_version=held.version, steps=held.c_steps, tokens=held.c_tokens,
            num_bytes=layout.size_bytes, finite=finite,
        )  # fmt: skip

    def _mix(self, command: Mix) -> Mixed:
        """End a round."""
        (held,), (method, codec, layout) = self._held, self._wire(command.round)
        correction = torch.zeros(
            self.method.num_vectors * held.fragment.num_elements, device=held.base.device
        )
        riders = self._own_riders(held)
        distances: list[float | None] = []
        parts = (
            command.parts if self._offered == command.round else []
        )  # nothing was offered: nobody mixed us
        mine = layout.split(self._uplink(0)[: layout.size_bytes])
        own = self._decoded(codec, mine) if parts else correction
        heard = [mine.params]
        for place, weight in parts:
            theirs = layout.split(self._downlink(place)[: layout.size_bytes])
            apart = self._apart(codec, own, theirs)
            distance = l2_norm(apart)
            finite = distance < float("inf") and bool(
                torch.isfinite(typed(theirs.buffers, torch.float32)).all()
            )
            distances.append(distance if finite else None)
            if finite:
                correction.add_(apart, alpha=weight)
                heard.append(theirs.params)
                _mix_riders(riders, theirs, weight)
        if method.correction is not None and len(heard) > 1:
            correction = method.correction(codec, heard, own.numel()).to(own.device)
        local = Local(x=self._gathered(held.fragment), base=held.base, state=held.state)
        after = method.adopt(local, correction, any(d is not None for d in distances))
        self._install(held, after.x, *riders)
        held.state = after.state
        mixed = Mixed(
            round=command.round, steps=held.c_steps, tokens=held.c_tokens, distances=distances,
            correction=l2_norm(correction),
        )  # fmt: skip
        held.c_steps = held.c_tokens = 0
        self._mixed = command.round
        self.own_changed = True
        return mixed

    def _decoded(self, codec: Codec, sections: Sections) -> Tensor:
        (held,) = self._held
        count = self.method.num_vectors * held.fragment.num_elements
        return codec.decode(sections.params, count).to(held.base.device)

    def _apart(self, codec: Codec, own: Tensor, theirs: Sections) -> Tensor:
        """The own vector minus a partner's; what no encoder writes is not finite."""
        try:
            return own - self._decoded(codec, theirs)
        except ValueError:
            return torch.full_like(own, torch.nan)

    def _own_riders(self, held: Held) -> tuple[Tensor, Tensor]:
        """Buffers and counters as they are now, as bytes."""
        buffers = self._riders(held.fragment.buffers, torch.float32).contiguous().view(torch.uint8)
        return buffers, self._riders(held.fragment.counters, torch.int64).contiguous().view(torch.uint8)

    # ---- parameters for others -------------------------------------------------------------------------

    def show(self, command: Show) -> Shown:
        """Write parameters into uplink slot 1: live ones at the end, else those that the round began with."""
        (held,) = self._held
        layout = value_layout(held.fragment)
        params, buffers, counters = layout.split(self._uplink(1))
        put(params, self._gathered(held.fragment) if command.final else held.base)
        self._put_riders(held.fragment, buffers, counters)
        return Shown(
            round=command.round, final=command.final, steps=held.c_steps, tokens=held.c_tokens,
            num_bytes=layout.size_bytes,
        )  # fmt: skip

    def load(self, command: Load) -> list[str]:
        self._ends.clear()
        self._offered = self._mixed = -1
        return super().load(command)

    def donate(self) -> bytes:
        """Where the round began and the state that a joiner takes over, fp32: equal bytes for equal state."""
        (held,) = self._held
        shared = [held.state[name] for name in self._shared()]
        return b"".join(t.to("cpu", torch.float32).numpy().tobytes() for t in (held.base, *shared))

    def receive(self, donated: bytes) -> None:
        """Take over what `donate` gave.

        Raises:
            ValueError: it is of another size.
        """
        (held,) = self._held
        values = torch.frombuffer(bytearray(donated), dtype=torch.float32)
        sizes = [held.base.numel(), *(held.state[name].numel() for name in self._shared())]
        if values.numel() != sum(sizes):
            raise ValueError(f"donated state of {values.numel()} numbers, {sum(sizes)} expected")
        base, *shared = torch.split(values, sizes)
        self._install(held, base.to(held.base.device), *self._own_riders(held))
        for name, value in zip(self._shared(), shared, strict=True):
            held.state[name] = value.to(held.base.device)

    def _shared(self) -> list[str]:
        return sorted(set(self._held[0].state) - set(self.method.own_state))


def _mix_riders(riders: tuple[Tensor, Tensor], theirs: Sections, weight: float) -> None:
    """Buffers move as the parameters do; of counters the larger one counts."""
    buffers, counters = typed(riders[0], torch.float32), typed(riders[1], torch.int64)
    buffers.add_(typed(theirs.buffers, torch.float32).to(buffers.device) - buffers, alpha=weight)
    torch.maximum(counters, typed(theirs.counters, torch.int64).to(counters.device), out=counters)


class PeerInner:
    """Inner state of a gossip learner: a donor gives its parameters along with it (an `engine.trainer.Inner`)."""

    def __init__(self, inner: Inner, island: PeerIsland) -> None:
        self._inner, self._island = inner, island

    @property
    def cursor(self) -> int:
        return self._inner.cursor

    @cursor.setter
    def cursor(self, cursor: int) -> None:
        self._inner.cursor = cursor

    def donate(self) -> bytes:
        state = self._inner.donate()
        return len(state).to_bytes(_LENGTH_BYTES, "little") + state + self._island.donate()

    def receive(self, state: bytes) -> None:
        end = _LENGTH_BYTES + int.from_bytes(state[:_LENGTH_BYTES], "little")
        self._inner.receive(state[_LENGTH_BYTES:end])
        self._island.receive(state[end:])

    def digest(self, state: bytes) -> str:
        return self._inner.digest(state)

    def lr(self) -> float:
        return self._inner.lr()
