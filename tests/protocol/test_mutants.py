"""The walk bites: a machine with a plausible bug breaks an invariant within a thousand seeds."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from farflung.protocol import messages as msg
from farflung.protocol import snapshot
from farflung.protocol.admission import Admission
from farflung.protocol.exchange import Exchange
from farflung.protocol.ledger import Ledger
from farflung.protocol.merging import Merging
from farflung.protocol.rounds import Rounds
from farflung.protocol.syncer import SyncerMachine
from farflung.testing.machine_plan import unfold
from farflung.testing.machine_walk import attempt

SEEDS = 1000
Patch = Callable[[type | Any, str, Any], None]


def quorum_off_by_one(patch: Patch) -> None:
    needed = Merging._needed
    patch(Merging, "_needed", lambda self, round: max(1, needed(self, round) - 1))


def answer_before_apply(patch: Patch) -> None:
    """An invitation is answered although merged work is still part of the parameters."""
    answer = Exchange._answer

    def hasty(self: Exchange, p: int) -> None:
        line = self.lines[p]
        out, line.outgoing = line.outgoing, None
        answer(self, p)
        line.outgoing = out

    patch(Exchange, "_answer", hasty)


def base_unchecked(patch: Patch) -> None:
    check = Merging._check

    def trusting(self: Merging, member: Any, message: msg.Contribute, *rest: Any) -> Any:
        newest = self.versions[message.fragment]
        return check(self, member, msgspec.structs.replace(message, base_version=newest), *rest)

    patch(Merging, "_check", trusting)


def discarded_forgotten(patch: Patch) -> None:
    """A contribution whose base was overwritten and that is refused afterwards vanishes from the books."""
    settled = Ledger.settled

    def forgetful(self: Ledger, learner: str, fragment: int, round: int, fate: Any) -> None:
        orphans = self._of(learner)[fragment].orphans
        if fate != "merged" and round in orphans:
            del orphans[round]
        else:
            settled(self, learner, fragment, round, fate)

    patch(Ledger, "settled", forgetful)


def two_rounds_of_a_fragment(patch: Patch) -> None:
    """The next round opens although the fragment's last one is still open."""
    asked: Counter[int] = Counter()

    def eager(self: Rounds) -> bool:
        asked[id(self)] += self.next_fragment in self.open
        endless = asked[id(self)] > 20  # without a throttle it would never stop opening
        return len(self.open) < self.most_open and not endless

    patch(Rounds, "may_open", eager)


def repeat_merged(patch: Patch) -> None:
    """Fates are not kept, and a contribution goes into whichever round is open."""
    check = Merging._check

    def careless(self: Merging, member: Any, message: msg.Contribute, event: Any, round: Any) -> Any:
        if round is not None:
            message = msgspec.structs.replace(message, round=round.number)
        return check(self, member, message, event, round)

    patch(Merging, "_check", careless)
    patch(Merging, "_remember", lambda self, *args: None)


def taken_into_a_running_merge(patch: Patch) -> None:
    """A contribution that comes while its round merges is counted as merged with it."""
    check = Merging._check

    def generous(self: Merging, member: Any, message: Any, event: Any, round: Any) -> Any:
        fate, reason = check(self, member, message, event, round)
        joins = fate == "late" and round is not None and round.number == message.round
        return (None, "") if joins else (fate, reason)

    patch(Merging, "_check", generous)


def donor_without_lineage(patch: Patch) -> None:
    donor_for = Admission._donor_for

    def anybody(self: Admission, joiner: Any) -> Any:
        others = [m for m in self.hub.membership.training() if m is not joiner and m.connection is not None]
        return donor_for(self, joiner) or next(iter(others), None)

    patch(Admission, "_donor_for", anybody)


def wait_without_deadline(patch: Patch) -> None:
    """A round is looked at when something arrives, and never else."""
    timer = SyncerMachine.timer

    def silent(self: SyncerMachine, name: str, at_s: float | None) -> None:
        if not (name.startswith("round.") and at_s is not None):
            timer(self, name, at_s)

    patch(SyncerMachine, "timer", silent)


def silent_after_reattachment(patch: Patch) -> None:
    """A contribution that was lost with its link is not sent again."""
    reattached = Exchange.reattached

    def forgetful(self: Exchange) -> None:
        for line in self.lines:
            if line.outgoing is not None:
                line.outgoing.message = None
        reattached(self)

    patch(Exchange, "reattached", forgetful)


def restored_one_version_back(patch: Patch) -> None:
    restore = snapshot.restore

    def stale(machine: SyncerMachine, saved: Any, now: float) -> None:
        restore(machine, saved, now)
        machine.merging.versions = [kept[0] for kept in machine.merging.kept]

    patch(snapshot, "restore", stale)


def stuck_at_the_lead(patch: Patch) -> None:
    """Found by this walk: a learner at its lead, with nothing trained since an adoption, stood for ever."""
    patch(Exchange, "_want_work", lambda self, line: None)


def increments_as_the_whole_value(patch: Patch) -> None:
    """What was fetched as increments is adopted as if it were the whole value."""
    adopt = Exchange._adopt

    def whole(p: int, line: Any, at_step: int = 0) -> Any:
        return msgspec.structs.replace(adopt(p, line, at_step), base_version=None)

    patch(Exchange, "_adopt", staticmethod(whole))


MUTANTS = {
    quorum_off_by_one: {"a merge below quorum"},
    answer_before_apply: {"work is merged twice"},
    base_unchecked: {"a base is not kept"},
    discarded_forgotten: {"a token has no fate"},
    two_rounds_of_a_fragment: {"two rounds of one fragment"},
    repeat_merged: {"a contribution is merged twice"},
    taken_into_a_running_merge: {"a token has no fate"},
    donor_without_lineage: {"a donor has no lineage"},
    wait_without_deadline: {"a wait has no deadline"},
    silent_after_reattachment: {"no progress"},
    restored_one_version_back: {"a restored syncer goes back"},
    stuck_at_the_lead: {"no progress"},
    increments_as_the_whole_value: {"increments upon another base"},
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_found(mutant: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch.setattr)
    broken = (result for seed in range(SEEDS) if isinstance(result := attempt(unfold(seed)), tuple))
    names = []
    for name, _, _ in broken:
        names.append(name)
        if name in MUTANTS[mutant]:
            return
    raise AssertionError(f"never {MUTANTS[mutant]} in {SEEDS} seeds, but {sorted(set(names))}")
