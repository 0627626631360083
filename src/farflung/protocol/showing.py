"""A gossip learner's own parameters, shown to the hub: for a consensus average now and then, and at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farflung.protocol import actions as act
from farflung.protocol import mailbox as box
from farflung.protocol import messages as msg
from farflung.protocol import objects

if TYPE_CHECKING:
    from farflung.protocol.peer import PeerExchange


class Showing:
    """What a learner shows, and the last of it: the hand-in."""

    def __init__(self, peer: PeerExchange):
        self.peer, self.machine = peer, peer.machine
        self.shown: box.Shown | None = None  # on its way to the hub
        self.last_round: int | None = None  # of the hand-in
        self.handed_in: msg.HandedIn | None = None  # once it was said
        self.contribution: msg.Contribute | None = None  # last said

    def ask(self, round: int, final: bool) -> None:
        """Let the trainer write its parameters; what was on its way is worth nothing."""
        self._cancel()
        self.machine.post(box.Show(round=round, final=final))

    def show(self, report: box.Shown) -> None:
        """The trainer wrote its parameters: upload them."""
        wanted = self.last_round is None or report.final
        if self.machine.incarnation is None or not wanted:
            return
        self.shown = report
        name = self._object(report.round)
        self.machine.emit(act.Upload(object=name, fragment=1, num_bytes=report.num_bytes))

    def _object(self, round: int) -> str:
        assert self.machine.incarnation is not None
        return objects.contribution(self.machine.learner, self.machine.incarnation, 0, round)

    @staticmethod
    def is_ours(object_name: str) -> bool:
        """Whether an object is parameters for the hub, and not for a partner."""
        return object_name.startswith("contribution.")

    def uploaded(self, object_name: str) -> None:
        """The hub has our parameters, or will not have them."""
        shown = self.shown
        if shown is None or object_name != self._object(shown.round):
            return
        self.shown = None
        self.contribution = msg.Contribute(
            fragment=0, round=shown.round, base_version=self.peer.held[0], steps=max(1, shown.steps),
            tokens=shown.tokens, num_bytes=shown.num_bytes,
        )  # fmt: skip
        self.machine.say(self.contribution)
        if shown.final and self.handed_in is None:
            moved = self.peer.take_moved()
            self.handed_in = msg.HandedIn(bytes_up=moved["up"], bytes_down=moved["down"])
            self.machine.say(self.handed_in)

    def fate(self, message: msg.FateOf) -> None:
        """What became of our parameters at the hub: nothing here depends on it."""
        if self.contribution is not None and self.contribution.round == message.round:
            self.contribution = None

    def reattached(self) -> None:
        """The link is back: repeat what the hub may not have heard."""
        if self.contribution is not None:
            self.machine.say(self.contribution)
        if self.handed_in is not None:
            self.machine.say(self.handed_in)

    def abandon(self) -> None:
        """This incarnation is over: nothing of it is sent any more."""
        self._cancel()
        self.contribution = None

    def _cancel(self) -> None:
        if self.shown is not None:
            self.machine.emit(act.CancelUpload(object=self._object(self.shown.round)))
        self.shown = None
