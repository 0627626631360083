"""Follows a syncer over the tapes of its lives, and finds every promise that they show broken."""

from collections import defaultdict
from dataclasses import dataclass
from math import inf
from typing import Any

from farflung.chaos.liveness import Member, Progress
from farflung.chaos.verdict import (
    ANSWERS,
    DONORS,
    FATES,
    PROGRESS,
    QUORUM,
    REJOINS,
    ROUNDS,
    TWICE,
    VERSIONS,
    WAITS,
    Finding,
    Verdict,
)
from farflung.tape import Record


@dataclass
class _Round:
    final: bool
    members: dict[str, int]  # live when it opened: incarnations
    objects: list[str] | None = None  # of its merge, once begun


class SyncerChecks:
    """Folds the lives of a syncer, one after the other.

    Args:
        verdict: takes what is found.
        policy: of the run, where no header has it.
        progress: told of every merge.
    """

    def __init__(self, verdict: Verdict, policy: dict[str, Any], progress: Progress) -> None:
        self.verdict, self.policy, self.progress = verdict, policy, progress
        self.node, self.now, self.phase = "syncer", 0.0, "birth"
        self.members: defaultdict[str, Member] = defaultdict(Member)
        self.names: dict[int, str] = {}  # by connection
        self.versions: dict[int, int] = {}
        self.rounds: dict[int, _Round] = {}
        self.timers: set[str] = set()
        self.used: set[str] = set()  # objects that a merge took
        self.committed: set[tuple[str, int, int]] = set()  # (learner, fragment, round) inside a version
        self.tokens = self.merged = 0  # counted again
        self.finite: dict[int, bool] = {}  # the merge just done, by fragment
        self.in_flight: int | None = None  # as last noted

    def life(self, node: str, records: list[Record]) -> None:
        """One process of the syncer."""
        for round in self.rounds.values():  # a merge that its syncer did not live to commit never was
            self.used -= set(round.objects or ())
        self.node, self.phase = node, "birth"
        self.names, self.rounds, self.timers = {}, {}, set()
        for record in records:
            if record.kind == "header":
                self._header(record.data)
                continue
            if record.kind == "event":
                self._settled()
            self.now = record.t
            self._take(record.type, record.data)
        self._settled()

    def broken(self, invariant: str, detail: str) -> None:
        self.verdict.findings.append(Finding(invariant, self.now, self.node, detail))

    def live(self) -> list[str]:
        return [name for name, member in self.members.items() if member.live(self.now, self.policy)]

    @property
    def gossip(self) -> bool:
        return self.policy.get("topology") == "gossip"

    def _header(self, data: dict[str, Any]) -> None:
        self.policy = data.get("policy") or self.policy
        restored = data.get("restored")
        if restored is None:
            return
        saved, self.now, self.phase = restored["snapshot"], restored["now"], "training"
        for p, version in enumerate(saved["versions"]):
            if version < self.versions.get(p, version):
                self.broken(VERSIONS, f"fragment {p} restored at {version}, {self.versions[p]} was there")
            self.versions[p] = version
        self.tokens, self.merged = saved["tokens_trained"], saved["merged"]
        for m in saved["members"]:
            self.members[m["name"]] = Member(
                incarnation=m["incarnation"], training=m["state"] == "saved", counted=m["sequence"],
                heard_s=self.now, held=dict(enumerate(m["held"])), merged=m["merged"] > 0,
                unmixed=sum(window["open"] for window in saved["windows"].get(m["name"], ())),
            )  # fmt: skip
        self.progress.since_s = self.now

    def _take(self, kind: str, data: dict[str, Any]) -> None:
        """An event or an action."""
        match kind:
            case "TimerFired":
                self._timer_fired(data["name"], data.get("late_s") or 0.0)
            case "Disconnected":
                self.names.pop(data["connection"], None)
            case "MessageArrived":
                self._arrived(data["connection"], data["message"])
            case "MergeDone":
                self._merge_done(data["fragment"], data["version"], data["finite"])
            case "SetTimer":
                (self.timers.discard if data["at_s"] is None else self.timers.add)(data["name"])
            case "Send":
                self._send(self.names.get(data["connection"]), data["message"])
            case "Merge":
                self._merge(data["fragment"], [part["object"] for part in data["parts"]])
            case "Note":
                self._note(data["kind"], data["data"])
            case "Finished":
                if data["reason"] == "finished" and self.in_flight != 0:
                    self.broken(FATES, f"in flight at the end: {self.in_flight}")
                self.verdict.ended, self.phase = data["reason"], "over"

    def _settled(self) -> None:
        """An event was dealt with: whatever still waits has a timer."""
        for p, round in self.rounds.items():
            timer = "end" if round.final else f"round.{p}"
            if round.objects is None and timer not in self.timers and self.phase in ("training", "ending"):
                self.broken(WAITS, f"the round of fragment {p} has no timer {timer!r}")
                self.timers.add(timer)  # said once

    # ---- time and messages ---------------------------------------------------------------------------

    def _timer_fired(self, name: str, late_s: float) -> None:
        self.timers.discard(name)
        for member in self.members.values():
            member.credit_s += late_s
        self.progress.since_s += late_s
        if name == "lease":
            live = self.live() if self.phase == "training" else []
            if detail := self.progress.overdue(self.now, live, self.policy):
                self.broken(PROGRESS, detail)

    def _arrived(self, connection: int, message: dict[str, Any]) -> None:
        if message["type"] == "Join":
            self.names[connection] = message["learner"]
        name = self.names.get(connection)
        if name is None:
            return
        member = self.members[name]
        member.heard_s, member.credit_s = self.now, 0.0
        match message["type"]:
            case "Boundary" if member.training and message["sequence"] > member.counted:
                self._boundary(member, message)
            case "Contribute":
                self.progress.saw(message["sync_s"])
            case "Installed":
                member.held = dict(enumerate(message["versions"]))
            case "HandedIn" | "Saved":
                member.training = False

    def _boundary(self, member: Member, message: dict[str, Any]) -> None:
        member.counted = message["sequence"]
        self.tokens += message["tokens"]
        self.progress.saw(message["step_s"])
        member.held |= dict(message["adopted"])
        member.unmixed += message["tokens"]
        mixed = message.get("mixed")
        if (
            mixed is not None
        ):  # gossip: a round ended, so what it trained is merged, with a partner or without
            self.merged, member.unmixed, self.progress.since_s = self.merged + member.unmixed, 0, self.now
            member.merged |= any(not meeting["missed"] for meeting in mixed["meetings"])

    def _send(self, name: str | None, message: dict[str, Any]) -> None:
        match message["type"]:
            case "Welcome" if name is not None:
                if message["incarnation"] != self.members[name].incarnation:
                    self.members[name] = Member(incarnation=message["incarnation"], heard_s=self.now)
            case "FateOf" if message["fate"] == "merged":
                if (name, message["fragment"], message["round"]) not in self.committed:
                    self.broken(ANSWERS, f"{name}: fragment {message['fragment']} round {message['round']}")
            case "Announce" if message["version"] > self.versions.get(message["fragment"], 0):
                told = f"version {message['version']} of fragment {message['fragment']}"
                self.broken(ANSWERS, f"{told} announced")
            case "Announce" if self.gossip and name is not None:  # its learners keep their own parameters
                self.members[name].held[message["fragment"]] = message["version"]
            case "Donate":
                self._donor(message["transfer"])

    def _donor(self, transfer: str) -> None:
        joiner, _, name = transfer.split(".")
        donor = self.members[name]
        behind = [version - donor.held.get(p, -1) for p, version in self.versions.items()]
        if name == joiner or not donor.training or not donor.merged:
            self.broken(DONORS, f"{name} is asked for {joiner}, and nothing of it was ever merged")
        elif max(behind, default=0) > 1:
            self.broken(DONORS, f"{name} is asked for {joiner}, {max(behind)} versions behind")

    # ---- merges --------------------------------------------------------------------------------------

    def _merge(self, p: int, objects: list[str]) -> None:
        round = self.rounds.get(p)
        if round is None or round.objects is not None:
            self.broken(ROUNDS, f"a merge of fragment {p} begins {'again' if round else 'without a round'}")
        if round is not None:
            round.objects = objects
        for name in objects:
            if name in self.used or objects.count(name) > 1:
                self.broken(TWICE, name)
        self.used |= set(objects)
        if round is not None and not round.final and len(objects) < (needed := self._needed(round)):
            self.broken(QUORUM, f"fragment {p}: {len(objects)} of {needed}")

    def _needed(self, round: _Round) -> int:
        quorum = self.policy.get("quorum", 1)
        if quorum != "all":
            return int(quorum)
        opened = [(self.members[name], incarnation) for name, incarnation in round.members.items()]
        return max(1, sum(m.incarnation == i and m.live(self.now, self.policy) for m, i in opened))

    def _merge_done(self, p: int, version: int, finite: bool) -> None:
        round = self.rounds.get(p)
        if version != self.versions.get(p, 0) + 1:
            self.broken(VERSIONS, f"fragment {p} went from {self.versions.get(p, 0)} to {version}")
        self.versions[p], self.finite[p], self.progress.since_s = version, finite, self.now
        if round is None or round.objects is None:
            self.broken(ROUNDS, f"a merge of fragment {p} ended that was never begun")
        elif finite:
            for learner, incarnation, number in map(_names, round.objects):
                self.committed.add((learner, p, number))
                self.members[learner].merged |= self.members[learner].incarnation == incarnation

    # ---- notes ---------------------------------------------------------------------------------------

    def _note(self, kind: str, note: dict[str, Any]) -> None:
        match kind:
            case "born":
                self.phase, self.progress.since_s = "training", self.now
                self.versions = dict.fromkeys(range(len(note["digests"])), 0)
            case "joined" if note["role"] != "reattach":  # who reattaches is what it was
                self.members[note["learner"]].training = True
            case "lost" | "left":
                self.members[note["learner"]].training = False
            case "round_open":
                self._round_open(note)
            case "round_given_up":
                self.rounds.pop(note["fragment"], None)
            case "merged":
                self._merged(note)
            case "waiting":
                deadline_s = note.get("deadline_s")
                if not note.get("reason") or deadline_s is None or not self.now < deadline_s < inf:
                    self.broken(WAITS, f"{note}")
            case "ending":  # rounds that do not merge are cancelled
                self.phase = "ending"
                self.rounds = {p: r for p, r in self.rounds.items() if r.objects is not None}
            case "ledger":
                self._ledger(note["token_fragments"])
            case "rejoined":
                self.verdict.rejoins += 1
            case "rejoin_proved":
                wrong = [name for name, equal in note.items() if name.endswith("_equal") and not equal]
                if wrong:
                    self.broken(REJOINS, f"{note['learner']}: not {', '.join(wrong)}")
            case "alarm" if note["what"] == "install_mismatch":
                self.broken(REJOINS, note["detail"])

    def _round_open(self, note: dict[str, Any]) -> None:
        p = note["fragment"]
        if p in self.rounds:
            self.broken(ROUNDS, f"fragment {p}: round {note['round']} opens beside another")
        self.rounds[p] = _Round(note["final"], {n: self.members[n].incarnation for n in self.live()})

    def _merged(self, note: dict[str, Any]) -> None:
        p = note["fragment"]
        round = self.rounds.pop(p, None)
        self.verdict.merges += 1
        tokens = note["tokens"]
        if self.gossip:  # an average merges nothing, but for what was handed in at the end
            handed_in = note["learners"] if round is not None and round.final else ()
            tokens = sum(self.members[name].unmixed for name in handed_in)
        self.merged += tokens if self.finite.pop(p, True) else 0

    def _ledger(self, tf: dict[str, Any]) -> None:
        known = tf["merged"] + sum(tf["discarded"].values()) + tf["in_flight"]
        reported = self.tokens * int(self.policy.get("num_fragments", 1))
        if known != tf["trained"]:
            self.broken(FATES, f"{known} token-fragments have a fate, {tf['trained']} were trained")
        if reported != tf["trained"]:
            self.broken(FATES, f"{reported} token-fragments were reported, the ledger has {tf['trained']}")
        if self.merged != tf["merged"]:
            self.broken(FATES, f"{self.merged} token-fragments lie in merges, the ledger has {tf['merged']}")
        self.in_flight = tf["in_flight"]


def _names(object_name: str) -> tuple[str, int, int]:
    """Learner, incarnation and round of a contribution's object."""
    _, learner, incarnation, _, number = object_name.split(".")
    return learner, int(incarnation), int(number)
