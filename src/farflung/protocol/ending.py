"""How a run ends: the budget is spent (hand in everything, merge once more) or it is suspended to be resumed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import messages as msg
from farflung.protocol.membership import Member

if TYPE_CHECKING:
    from farflung.protocol.syncer import SyncerMachine


class Ending:
    """training -> finishing (open rounds merge or are cancelled) -> handing_in -> finished.

    training -> suspending (the same, then every learner saves) -> suspended.
    """

    def __init__(self, hub: SyncerMachine):
        self.hub, self.policy = hub, hub.policy
        self.finish_message: msg.Finish | None = None
        self.asked_to_save = False

    # ---- starting to end -----------------------------------------------------------------------------

    def stop_requested(self, event: ev.StopRequested) -> None:
        if self.hub.phase == "birth":
            self.hub.phase = "suspending"
            self._done("suspended")
        elif event.mode == "finish":
            self.finish()
        elif self.hub.phase in ("finishing", "handing_in"):  # nearly over: go through with it, soon
            self.hub.timer("end", self.hub.now + self._patience_s(event))
        elif self.hub.phase == "training":
            self.hub.phase = "suspending"
            self.hub.note("ending", reason="asked to stop")
            self.hub.merging.cancel_open()
            for member in self.hub.membership.present():
                if member.state != "training":
                    self._dismiss(member, "suspended")
            self.hub.timer("end", self.hub.now + self._patience_s(event))
            self.review()

    def _ask_to_save(self) -> None:
        """After the last merge: a learner that saves before it hears of one would hold merged work as its own."""
        self.asked_to_save = True
        for member in self.hub.membership.training():
            self.hub.send(member, msg.Suspend())

    def _patience_s(self, event: ev.StopRequested) -> float:
        return self.policy.lease_s if event.within_s is None else event.within_s

    def finish(self) -> None:
        """The budget is spent: nothing new is opened."""
        if self.hub.phase != "training":
            return
        self.hub.phase = "finishing"
        self.hub.note("ending", reason="the budget is spent", tokens=self.hub.ledger.tokens_trained)
        self.hub.merging.cancel_open()
        for member in self.hub.membership.present():
            if member.state != "training":
                self._dismiss(member, "finished")
        self.review()

    def _hand_in(self) -> None:
        self.hub.phase = "handing_in"
        self.finish_message = msg.Finish(
            rounds=self.hub.merging.open_final(), versions=list(self.hub.merging.versions)
        )
        for member in self.hub.membership.training():
            self.hub.send(member, self.finish_message)
        self.hub.timer("end", self.hub.now + self.policy.lease_s)
        self.review()

    def reattached(self, member: Member) -> None:
        """A member whose connection broke may have missed what was asked of everybody."""
        if self.hub.phase == "handing_in" and member.state == "training" and self.finish_message is not None:
            self.hub.send(member, self.finish_message)
        elif self.asked_to_save and member.state == "training":
            self.hub.send(member, msg.Suspend())

    # ---- answers -------------------------------------------------------------------------------------

    def handed_in(self, member: Member, event: ev.MessageArrived) -> None:
        if self.hub.phase == "handing_in" and member.state == "training":
            assert isinstance(event.message, msg.HandedIn)
            member.state = "handed_in"
            self.hub.merging.moved(member, event.message)
            self.review()

    def saved(self, member: Member, event: ev.MessageArrived) -> None:
        if self.hub.phase == "suspending" and member.state == "training":
            assert isinstance(event.message, msg.Saved)
            member.state, member.saved = "saved", event.message.digest
            self.review()

    def overdue(self) -> None:
        """The deadline of a hand-in or a save passed: go on without those who are missing."""
        if self.hub.phase in ("handing_in", "suspending"):
            for member in self.hub.membership.training():
                self.hub.lose(member, f"did not answer within {self.policy.lease_s} s at the end")

    # ---- going on ------------------------------------------------------------------------------------

    def review(self) -> None:
        """Take the next step of the ending as soon as nothing holds it up."""
        if self.hub.phase == "suspending" and not self.hub.merging.rounds.open and not self.asked_to_save:
            self._ask_to_save()
        waiting = [m for m in self.hub.membership.training() if m.live(self.hub.now)]
        open_rounds = self.hub.merging.rounds.open
        if self.hub.phase == "finishing" and not open_rounds:
            if self.policy.final == "none":
                self._done("finished")
            else:
                self._hand_in()
        elif self.hub.phase == "handing_in" and not waiting:
            if open_rounds:
                self.hub.merging.close_final()
            else:
                self._done("finished")
        elif self.hub.phase == "suspending" and not open_rounds and not any(m.connection for m in waiting):
            # what is still on its way has no fate yet: a learner may have saved with it, and sends it again
            self.hub.phase = "suspended"
            self.hub.timer("end", None)
            self.hub.emit(act.WriteCheckpoint())

    def checkpoint_written(self, event: ev.CheckpointWritten) -> None:
        self._done("suspended")

    def _done(self, reason: str) -> None:
        if reason == "finished":
            self.hub.phase = "finished"
            for name in sorted(self.hub.ledger.windows):
                why = "superseded" if self.policy.final == "none" else "learner_lost"
                self.hub.ledger.lost(name, set(), why)
        else:
            self.hub.phase = "suspended"
        self.hub.timer("end", None)
        self.hub.timer("lease", None)
        self.hub.note("ledger", **self.hub.ledger.summary())
        for member in self.hub.membership.present():
            self._dismiss(member, reason)
        self.hub.emit(act.Finished(reason=reason))

    def _dismiss(self, member: Member, reason: str) -> None:
        self.hub.send(member, msg.Stop(reason=reason))
        self.hub.admission.installation_over(member)
        if reason == "finished":
            member.state = "gone"
