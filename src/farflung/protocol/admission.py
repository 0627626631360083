"""Who may take part: birth, late joiners, rejoin after a death, reattachment, resets (P1, P2).

Birth: the first member uploads version 0, all others install it before their first step. Rejoin: parameters
from the syncer, inner state from a healthy donor, the data position from the hub, the method's own state from
what the learner itself kept if that may still be used; proven by digests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import messages as msg
from farflung.protocol import objects, own_state
from farflung.protocol.lockstep import joiner_step
from farflung.protocol.membership import Expected, Member
from farflung.protocol.own_state import Life
from farflung.protocol.rounds import PATIENCE_S

if TYPE_CHECKING:
    from farflung.protocol.syncer import SyncerMachine

OTHER_RECIPE = "give `join` the recipe and --set that `serve` printed, or your Learner the same method"
RESET_AFTER_NON_FINITE = (
    3  # refusals in a row (free pace) before a learner starts again from the syncer's bits
)


class Admission:
    def __init__(self, hub: SyncerMachine):
        self.hub, self.policy = hub, hub.policy
        self.fingerprint: str | None = None
        self.layout: str | None = None
        self.seeder: str | None = None
        self.transfers: dict[str, tuple[str, str]] = {}  # transfer: (joiner, donor)
        self.tried: dict[str, set[str]] = {}  # joiner: donors that failed it
        self.rejoins = 0
        self.watching = False  # leases are looked at

    # ---- joining -------------------------------------------------------------------------------------

    def join(self, connection: int, join: msg.Join) -> None:
        problem = self._problem(join)
        if problem is not None:
            reason, detail = problem
            self._mourn(join, reason)
            self.hub.refuse(join.learner, reason, detail)
            self.hub.emit(act.Send(connection=connection, message=msg.Refused(reason=reason, detail=detail)))
            self.hub.emit(act.HangUp(connection=connection))
            return
        if self.fingerprint is None:
            self.fingerprint, self.layout = join.fingerprint, join.layout
        if not self.watching:  # a resumed syncer knows the fingerprint, and has no timers
            self.watching = True
            self.hub.timer("lease", self.hub.now + self.policy.heartbeat_s)
        if join.incarnation is not None:
            self._reattach(connection, join)
        else:
            self._enter(connection, join)

    def _problem(self, join: msg.Join) -> tuple[str, str] | None:
        """A name and one line for a person, or None if the join is in order."""
        if join.protocol != msg.PROTOCOL:
            return (
                "protocol",
                f"you speak protocol {join.protocol}, this syncer {msg.PROTOCOL}: use one version",
            )
        if join.run is not None and join.run != self.hub.run:
            return "run", f"you belong to run {join.run!r}, this syncer serves {self.hub.run!r}"
        if join.method != self.method_digest:
            wrong = f"your method is {join.method}, this run uses {self.method_digest}"
            return "method", f"{wrong}: {OTHER_RECIPE}"
        if join.mbps is not None and not 0 < join.mbps < float("inf"):
            return (
                "malformed",
                f"your link's speed is {join.mbps} Mbit/s: it must be above 0, or not declared",
            )
        if self.fingerprint is not None and join.fingerprint != self.fingerprint:
            wrong = "your model (names, shapes, dtypes, fragment plan) differs from this run's"
            return "fingerprint", f"{wrong}: {OTHER_RECIPE}"
        if self.hub.phase not in ("birth", "training") and not self._returns(join):
            return "closing", f"the run is {self.hub.phase.replace('_', ' ')}"
        member = self.hub.membership.members.get(join.learner)
        if join.incarnation is not None and (member is None or member.incarnation != join.incarnation):
            newest = None if member is None else member.incarnation
            return "fenced", f"incarnation {join.incarnation} was replaced (newest: {newest})"
        if join.incarnation is not None and member is not None and member.state == "gone":
            return "fenced", f"incarnation {join.incarnation} was given up"
        return None

    def _mourn(self, join: msg.Join, reason: str) -> None:
        """A new process that comes too late still proves that the old one is gone."""
        known = self.hub.membership.members.get(join.learner)
        if reason == "closing" and join.incarnation is None and known is not None:
            self.hub.lose(known, "replaced by a process that came too late")

    def _returns(self, join: msg.Join) -> bool:
        """Whether this is a member that lost its connection while the run is ending."""
        return join.incarnation is not None and self.hub.phase in ("finishing", "handing_in", "suspending")

    @property
    def method_digest(self) -> str:
        return f"{self.policy.method}:{self.policy.digest()}"

    def _enter(self, connection: int, join: msg.Join) -> None:
        known = self.hub.membership.members.get(join.learner)
        if known is not None and known.state != "gone":
            again = known.connection == connection  # the same process starts over: nobody is to be stopped
            if not again:
                self.hub.send(known, msg.Stop(reason="fenced"))
            self.hub.lose(known, "it starts over" if again else "fenced by a newer process")
        member = self.hub.membership.enter(join.learner, connection)
        member.address, member.mbps, member.own = join.address, join.mbps, join.own
        self.hub.merging.forget_fates(member.name)
        member.lease_until_s = self.hub.now + self.policy.lease_s
        self._welcome(member)
        if self.hub.phase == "birth":
            member.state = "waiting"
            self._appoint_seeder()
        else:
            member.state = "joining"
            self._find_donor(member)

    def _reattach(self, connection: int, join: msg.Join) -> None:
        member = self.hub.membership.members[join.learner]
        member.address = join.address
        self.hub.membership.bind(member, connection)
        member.lease_until_s = self.hub.now + self.policy.lease_s
        self._welcome(member)
        self.hub.send(
            member,
            msg.Reattached(
                installed=member.state != "joining",
                sequence=member.sequence,
                syncer_step=self.hub.merging.rounds.syncer_step,
            ),
        )
        self.hub.note("joined", learner=member.name, incarnation=member.incarnation, role="reattach")
        if not self._resumed(member, join.saved):
            return
        self.hub.merging.repeat_fates(member)
        for fragment, version in enumerate(self.hub.merging.versions):
            if version > member.held[fragment]:
                self.hub.merging.announce(member, fragment)
        self.hub.ending.reattached(member)

    def _resumed(self, member: Member, found: str) -> bool:
        """After an orderly stop: whether the learner holds what it saved. One that does not starts again."""
        saved, member.saved = member.saved, ""
        if not saved or not found:
            return True
        equal = saved == found
        self.hub.note(
            "resume_proved",
            learner=member.name,
            incarnation=member.incarnation,
            digest=found,
            state_equal=equal,
        )
        if not equal:
            self.hub.note(
                "alarm", what="resume_mismatch", detail=f"{member.name}: not the state that it saved"
            )
            self.reset(member, "wrong bits after a resume")
        return equal

    def _welcome(self, member: Member) -> None:
        self.hub.send(
            member,
            msg.Welcome(
                run=self.hub.run, incarnation=member.incarnation, index=member.index,
                tokens=self.hub.ledger.tokens_trained, budget_tokens=self.hub.budget_tokens,
            ),
        )  # fmt: skip

    # ---- birth ---------------------------------------------------------------------------------------

    def _appoint_seeder(self) -> None:
        """The seed lease: one member uploads version 0; if it dies, the next one does."""
        if self.hub.phase != "birth" or self.seeder is not None:
            return
        for member in self.hub.membership.sorted():
            if member.state == "waiting" and member.live(self.hub.now):
                member.state, self.seeder = "seeding", member.name
                self.hub.send(member, msg.SeedRequest())
                return

    def seeded(self, member: Member, event: ev.MessageArrived) -> None:
        if member.name != self.seeder or self.hub.phase != "birth":
            self.hub.refuse(member.name, "seed", "a version 0 that nobody asked for")
            return
        if event.problem is not None or not event.finite:
            self.hub.refuse(member.name, "seed", event.problem or "the first parameters are not finite")
            self.hub.send(member, msg.Stop(reason="reset"))
            self.hub.lose(member, "could not seed the run")
            return
        seeds = [objects.seed(member.name, member.incarnation, p) for p in range(self.policy.num_fragments)]
        self.hub.emit(act.CommitSeed(objects=seeds))
        self.hub.merging.born(event.digests)
        self.hub.phase = "training"
        self.hub.note("born", learner=member.name, digests=event.digests)
        for waiting in self.hub.membership.present():
            if waiting.state in ("waiting", "seeding"):
                waiting.state = "joining"
                self._install(waiting, "birth")

    # ---- rejoin --------------------------------------------------------------------------------------

    def _find_donor(self, joiner: Member) -> None:
        donor = self._donor_for(joiner)
        if donor is None:
            self._install(joiner, "cold" if self._anyone_trained() else "birth")
            return
        transfer = f"{joiner.name}.{joiner.incarnation}.{donor.name}"
        self.transfers[transfer] = (joiner.name, donor.name)
        self.hub.send(donor, msg.Donate(transfer=transfer))
        self.hub.timer(f"donor.{transfer}", self.hub.now + self.policy.lease_s)

    def _anyone_trained(self) -> bool:
        return any(m.merged for m in self.hub.membership.members.values()) or self.hub.ledger.merged > 0

    def _donor_for(self, joiner: Member) -> Member | None:
        """The healthy member with most steps: it trains, its work was merged, and it is at most H steps behind.

        A fragment syncs once in H steps, so "H steps behind" is: it holds the newest version or the one before.
        """
        versions, failed = self.hub.merging.versions, self.tried.get(joiner.name, set())
        healthy = [
            m
            for m in self.hub.membership.training()
            if m is not joiner
            and m.name not in failed
            and m.connection is not None
            and m.merged > 0
            and self._well(m)
            and all(newest - held <= 1 for newest, held in zip(versions, m.held, strict=True))
        ]
        lockstep = self.policy.pace == "lockstep"  # the one heard last is the least likely to be frozen
        return max(
            healthy, key=lambda m: (m.lease_until_s if lockstep else 0.0, m.steps_done, m.name), default=None
        )

    def _well(self, member: Member) -> bool:
        """It steps; in lockstep, where all may stand and wait, it is at least heard."""
        now = self.hub.now
        if self.policy.pace == "lockstep":
            return member.heard(now, self.policy.lease_s, 2 * self.policy.heartbeat_s)
        return member.progressing(now, PATIENCE_S)

    def state_ready(self, member: Member, event: ev.MessageArrived) -> None:
        ready = event.message
        assert isinstance(ready, msg.StateReady)
        joiner_name, donor_name = self.transfers.get(ready.transfer, ("", ""))
        joiner = self.hub.membership.members.get(joiner_name)
        if (
            joiner is None
            or donor_name != member.name
            or joiner.state != "joining"
            or joiner.offer is not None
        ):
            self.hub.emit(act.DiscardState(transfer=ready.transfer))
            return
        self.hub.timer(f"donor.{ready.transfer}", None)
        joiner.offer = ready.transfer
        offer = msg.StateOffer(
            transfer=ready.transfer, donor=member.name, num_bytes=ready.num_bytes, digest=ready.digest
        )
        self._install(joiner, "late", offer, ready.lr)

    def state_failed(self, member: Member, event: ev.MessageArrived) -> None:
        failed = event.message
        assert isinstance(failed, msg.StateFailed)
        self._next_donor(failed.transfer, failed.reason)

    def donor_late(self, transfer: str) -> None:
        self._next_donor(transfer, f"no state within {self.policy.lease_s} s")

    def _next_donor(self, transfer: str, reason: str) -> None:
        joiner_name, donor_name = self.transfers.pop(transfer, ("", ""))
        joiner = self.hub.membership.members.get(joiner_name)
        self.hub.timer(f"donor.{transfer}", None)
        self.hub.emit(act.DiscardState(transfer=transfer))
        if joiner is None or joiner.state != "joining":
            return
        self.hub.note("donor_failed", learner=joiner_name, donor=donor_name, reason=reason)
        self.tried.setdefault(joiner_name, set()).add(donor_name)
        joiner.offer = None
        self._find_donor(joiner)

    # ---- installing ----------------------------------------------------------------------------------

    def _install(
        self, member: Member, reason: str, offer: msg.StateOffer | None = None, lr: float | None = None
    ) -> None:
        merging = self.hub.merging
        versions = list(merging.versions)
        member.held, member.announced = list(versions), list(versions)
        member.rejoining = member.steps_done > 0
        own, own_digests, own_refusal = self._own_state(member)
        member.expected = Expected(
            versions,
            [merging.digests[p, v] for p, v in enumerate(versions)],
            member.cursor,
            offer.donor if offer else None,
            offer.digest if offer else None,
            lr,
            reason,
            own_digests,
            own_refusal,
        )
        if self.policy.pace == "lockstep":
            member.step = joiner_step(versions, self.policy.sync_every_steps, self.policy.overlap_steps)
        self.hub.send(
            member,
            msg.Install(
                versions=versions, cursor=member.cursor, step=member.step,
                syncer_step=merging.rounds.syncer_step, state=offer, reason=reason, own=own,
            ),
        )  # fmt: skip

    def _own_state(self, member: Member) -> tuple[list[bool] | None, list[str] | None, str]:
        """What to take over of what the learner kept, the digests that it must then have; or why nothing."""
        found, life = member.own, member.life
        if found is None:
            return None, None, ""
        lying = self.hub.merging.rounds.open.items()
        waiting = {
            (p, round.number)
            for p, round in lying
            if member.name in round.arrived and round.arrived[member.name].incarnation == found.incarnation
        }
        refusal = own_state.refusal(
            found, life, run=self.hub.run, incarnation=member.incarnation,
            sync_every_steps=self.policy.steps_of(member.name), waiting=waiting,
        )  # fmt: skip
        if refusal or life is None:
            return None, None, refusal
        return own_state.merged(found, life), own_state.expected(found, life), ""

    def installed(self, member: Member, event: ev.MessageArrived) -> None:
        """Compare what the joiner holds with what it should hold; only a proven learner trains."""
        got, want = event.message, member.expected
        assert isinstance(got, msg.Installed)
        if member.state != "joining" or want is None:
            self.hub.refuse(member.name, "install", "nobody asked for this installation")
            return
        equal = {
            "params_equal": (got.versions, got.digests) == (want.versions, want.digests),
            "inner_equal": want.inner_digest is None or got.inner_digest == want.inner_digest,
            "lr_equal": want.lr is None or got.lr == want.lr,
            "cursor_equal": got.cursor == want.cursor,
        }
        if want.own_digests is not None:
            equal["own_equal"] = got.own_digests == want.own_digests
        role = "rejoin" if member.rejoining else want.reason
        self.hub.note(
            "rejoin_proved", learner=member.name, incarnation=member.incarnation, donor=want.donor,
            state="cold" if want.donor is None else "warm", role=role, versions=got.versions,
            params_digests=got.digests, inner_digest=got.inner_digest, lr=got.lr, cursor=got.cursor, **equal,
        )  # fmt: skip
        self._note_own_state(member, want, got)
        self._forget_transfers(member)
        if not all(equal.values()):
            wrong = ", ".join(name for name, ok in equal.items() if not ok)
            self.hub.note("alarm", what="install_mismatch", detail=f"{member.name}: not {wrong}")
            self.hub.send(member, msg.Stop(reason="reset"))
            self.hub.lose(member, f"wrong bits after installation: not {wrong}")
            return
        member.state = "training"
        self.installation_over(member)
        member.held = list(got.versions)
        member.life = Life(member.incarnation, got.step, [None] * self.policy.num_fragments)
        member.last_boundary_s = self.hub.now
        self.hub.note("joined", learner=member.name, incarnation=member.incarnation, role=role)
        self.hub.merging.joined(member)
        for fragment, version in enumerate(self.hub.merging.versions):
            if version > member.held[fragment]:
                self.hub.merging.announce(member, fragment)

    def installation_over(self, member: Member) -> None:
        """What was kept for this joiner may go."""
        if member.expected is not None:
            member.expected = None
            for fragment in range(self.policy.num_fragments):
                self.hub.merging.retire(fragment)

    def _note_own_state(self, member: Member, want: Expected, got: msg.Installed) -> None:
        """A rejoin of a method with own state: whether the learner's went on, or why it begins at zero."""
        found, life = member.own, member.life
        if found is None or not member.rejoining:
            return
        age = None if found.problem or life is None else life.step - found.step
        self.hub.note(
            "own_state", learner=member.name, incarnation=member.incarnation, age_steps=age,
            taken="zero" if want.own_digests is None else "own", reason=want.own_refusal,
            digests=got.own_digests,
        )  # fmt: skip

    def _forget_transfers(self, joiner: Member) -> None:
        self.tried.pop(joiner.name, None)
        for transfer in [t for t, (name, _) in self.transfers.items() if name == joiner.name]:
            del self.transfers[transfer]
            self.hub.timer(f"donor.{transfer}", None)
            self.hub.emit(act.DiscardState(transfer=transfer))

    # ---- after that ----------------------------------------------------------------------------------

    def merged(self, member: Member) -> None:
        """A contribution of this member was merged: the first one completes a rejoin."""
        if member.rejoining:
            member.rejoining = False
            self.rejoins += 1
            self.hub.note("rejoined", learner=member.name, incarnation=member.incarnation)

    def maybe_reset(self, member: Member) -> None:
        """A learner whose parameters are broken starts again from the syncer's; in lockstep nobody can wait."""
        limit = 1 if self.policy.pace == "lockstep" else RESET_AFTER_NON_FINITE
        refusals = sum(member.non_finite)
        if refusals >= limit:
            self.reset(member, f"{refusals} non-finite contributions in a row")

    def reset(self, member: Member, reason: str) -> None:
        self.hub.send(member, msg.Stop(reason="reset"))
        self.hub.lose(member, reason)

    def member_lost(self, member: Member) -> None:
        self.installation_over(member)
        self.tried.pop(member.name, None)
        if self.seeder == member.name and self.hub.phase == "birth":
            self.seeder = None
            self._appoint_seeder()
        for transfer, (joiner, donor) in sorted(self.transfers.items()):
            if donor == member.name and self.hub.membership.members[joiner].offer != transfer:
                self._next_donor(transfer, "the donor is gone")
            elif joiner == member.name:
                self._forget_transfers(member)

    def unlinked(self, member: Member) -> None:
        """For a joiner without a link nothing is kept: it joins anew, or has installed all that it needs."""
        if member.state == "joining":
            self._forget_transfers(member)
            for fragment in range(self.policy.num_fragments):
                self.hub.merging.retire(fragment)

    def review(self) -> None:
        """A seeder that fell silent gives up its lease; a joiner that did loses its link."""
        for member in self.hub.membership.present():
            connection = member.connection
            if member.state == "joining" and connection is not None and not member.live(self.hub.now):
                self.hub.emit(act.HangUp(connection=connection))
                self.hub.membership.unbind(connection)
                self.unlinked(member)
        if self.hub.phase == "birth" and self.seeder is not None:
            seeder = self.hub.membership.members[self.seeder]
            if not seeder.live(self.hub.now):
                self.reset(seeder, "silent while it should seed the run")  # it may only be slow
