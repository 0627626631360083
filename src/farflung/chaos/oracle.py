"""The verdict over a tape: which of the promises that a tape can show were broken, where, and by how much.

A pure function of records; it trusts no figure of the machines that it can count again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Any

from farflung.tape import Record

INVARIANTS = (
    "versions only grow",
    "no contribution is merged twice",
    "every token has a fate",
    "no merge below quorum",
    "never two rounds of one fragment",
    "no answer before its merge",
    "a wait has a deadline and a reason",
    "a donor has lineage",
    "a rejoin is proven",
    "progress while enough learners live",
)
VERSIONS, TWICE, FATES, QUORUM, ROUNDS, ANSWERS, WAITS, DONORS, REJOINS, PROGRESS = INVARIANTS

PATIENCE = 3  # times the longest lease, cycle and transfer together: so long may a merge be away


@dataclass(frozen=True)
class Finding:
    """One broken promise."""

    invariant: str
    t: float
    node: str
    detail: str

    def __str__(self) -> str:
        return f"{self.t:.3f} s {self.node}: {self.invariant}: {self.detail}"


@dataclass
class Verdict:
    """What the oracle found in a tape.

    Attributes:
        findings: broken promises, by time.
        records, merges, rejoins: what there was to judge.
        ended: how the run ended, as the tape says; None for a tape that breaks off.
    """

    findings: list[Finding] = field(default_factory=list)
    records: int = 0
    merges: int = 0
    rejoins: int = 0
    ended: str | None = None

    @property
    def ok(self) -> bool:
        return not self.findings

    def as_dict(self) -> dict[str, Any]:
        findings = [vars(f) for f in self.findings]
        return {**vars(self), "findings": findings, "ok": self.ok}

    def __str__(self) -> str:
        seen = (
            f"{self.records} records, {self.merges} merges, {self.rejoins} rejoins, {self.ended or 'cut off'}"
        )
        if self.ok:
            return f"{seen}: all {len(INVARIANTS)} promises kept"
        return "\n".join([f"{seen}: BROKEN", *map(str, self.findings)])


def judge(
    records: Iterable[Record],
    metrics: Iterable[dict[str, Any]] = (),
    *,
    policy: dict[str, Any] | None = None,
    bound_s: float | None = None,
) -> Verdict:
    """Check every invariant that a tape can show.

    Args:
        records: of a run, any nodes; each node's in its own order.
        metrics: of the same run: planned faults excuse the learners that they hold up.
        policy: where the tape has no header, as one in memory.
        bound_s: longest time without a merge while K learners live; None derives it from lease, steps and
            transfers.
    """
    nodes: dict[str, list[Record]] = {}
    for record in records:
        nodes.setdefault(record.node, []).append(record)
    verdict = Verdict(records=sum(map(len, nodes.values())))
    syncer = _Syncer(verdict, policy or {}, _excuses(metrics), bound_s)
    for node in sorted((n for n in nodes if _base(n) == "syncer"), key=_life):
        syncer.life(node, nodes[node])
    for node in sorted(n for n in nodes if _base(n) != "syncer"):
        verdict.findings += learner_findings(nodes[node])
    verdict.findings.sort(key=lambda f: f.t)
    return verdict


def _base(node: str) -> str:
    return node.partition(".")[0]


def _life(node: str) -> int:
    return int(node.partition(".")[2] or 1)


def _excuses(metrics: Iterable[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """(learner, from, until) of planned faults that last; in lockstep missed steps are made up for after it."""
    faults = [m for m in metrics if m.get("kind") == "fault" and m.get("for_s")]
    return [(str(m["target"]), float(m["t"]), float(m["t"]) + 2 * float(m["for_s"])) for m in faults]


# ---- learners ------------------------------------------------------------------------------------------


def learner_findings(records: list[Record]) -> Iterator[Finding]:
    """What one learner's segment shows: what it holds only grows until it installs anew; waits have reasons."""
    held: dict[int, int] = {}
    for record in records:
        report, command = record.data.get("report") or {}, record.data.get("command") or {}
        if report.get("type") == "Loaded":
            held = dict(enumerate(report["versions"]))
        for p, version in report.get("adopted") or ():
            if version <= held.get(p, -1):
                detail = f"fragment {p} went from {held[p]} to {version}"
                yield Finding(VERSIONS, record.t, record.node, detail)
            held[p] = version
        if (
            command.get("type") == "RunUntil"
            and command.get("step") is not None
            and not command.get("reason")
        ):
            yield Finding(WAITS, record.t, record.node, f"stands at step {command['step']} for no reason")


# ---- the syncer ----------------------------------------------------------------------------------------


@dataclass
class _Member:
    """What the tape says of one learner."""

    incarnation: int = 0
    training: bool = False
    counted: int = 0  # newest boundary report that was counted
    heard_s: float = -inf
    credit_s: float = 0.0  # the syncer's own lateness since then
    held: dict[int, int] = field(default_factory=dict)
    merged: bool = False  # work of this incarnation
    unmixed: int = 0  # gossip: tokens since its last round ended

    def live(self, now: float, lease_s: float) -> bool:
        return now <= self.heard_s + lease_s + self.credit_s


@dataclass
class _Round:
    final: bool
    members: dict[str, int]  # live when it opened: incarnations
    merge: dict[str, Any] | None = None


class _Syncer:
    """Folds the lives of a syncer, one after the other."""

    def __init__(
        self,
        verdict: Verdict,
        policy: dict[str, Any],
        excuses: list[tuple[str, float, float]],
        bound_s: float | None,
    ) -> None:
        self.verdict, self.policy, self.excuses, self.bound_s = verdict, policy, excuses, bound_s
        self.node, self.now, self.phase = "syncer", 0.0, "birth"
        self.members: dict[str, _Member] = {}
        self.names: dict[int, str] = {}  # by connection
        self.versions: dict[int, int] = {}
        self.rounds: dict[int, _Round] = {}
        self.timers: set[str] = set()
        self.used: set[str] = set()  # objects that a merge took
        self.committed: set[tuple[str, int, int]] = set()  # (learner, fragment, round) inside a version
        self.tokens = self.merged = 0  # counted again
        self.finite: dict[int, bool] = {}  # the merge just done, by fragment
        self.in_flight: int | None = None  # as last noted
        self.since_s = inf  # since when a merge is expected
        self.longest_s = 0.0  # step and transfer
        self.seen: dict[str, Callable[[dict[str, Any]], None]] = {
            "TimerFired": self._timer_fired,
            "Disconnected": self._disconnected,
            "MessageArrived": self._arrived,
            "MergeDone": self._merge_done,
            "SetTimer": self._set_timer,
            "Send": self._send,
            "Merge": self._merge,
            "Note": self._note,
            "Finished": self._finished,
        }
        self.notes: dict[str, Callable[[dict[str, Any]], object]] = {
            "born": self._born,
            "round_open": self._round_open,
            "merged": self._merged,
            "round_given_up": lambda note: self.rounds.pop(note["fragment"], None),
            "ending": self._ending,
            "waiting": self._waiting,
            "joined": self._joined,
            "lost": lambda note: self._training(note["learner"], False),
            "left": lambda note: self._training(note["learner"], False),
            "ledger": self._ledger,
            "rejoin_proved": self._proved,
            "rejoined": self._rejoined,
            "alarm": self._alarm,
        }

    def life(self, node: str, records: list[Record]) -> None:
        """One process of the syncer."""
        for round in self.rounds.values():  # a merge that its syncer did not live to commit never was
            self.used -= {part["object"] for part in (round.merge or {"parts": []})["parts"]}
        self.node, self.phase = node, "birth"
        self.names, self.rounds, self.timers = {}, {}, set()
        for record in records:
            if record.kind == "header":
                self._header(record.data)
                continue
            if record.kind == "event":
                self._settled()
            self.now = record.t
            if (see := self.seen.get(record.type)) is not None:
                see(record.data)
        self._settled()

    def broken(self, invariant: str, detail: str) -> None:
        self.verdict.findings.append(Finding(invariant, self.now, self.node, detail))

    def member(self, name: str) -> _Member:
        return self.members.setdefault(name, _Member())

    @property
    def lease_s(self) -> float:
        return float(self.policy.get("lease_s", 10.0))

    @property
    def gossip(self) -> bool:
        return self.policy.get("topology") == "gossip"

    # ---- where a life begins -------------------------------------------------------------------------

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
            self.members[m["name"]] = _Member(
                incarnation=m["incarnation"], training=m["state"] == "saved", counted=m["sequence"],
                heard_s=self.now, held=dict(enumerate(m["held"])), merged=m["merged"] > 0,
                unmixed=sum(window["open"] for window in saved["windows"].get(m["name"], ())),
            )  # fmt: skip
        self.since_s = self.now

    # ---- events --------------------------------------------------------------------------------------

    def _timer_fired(self, data: dict[str, Any]) -> None:
        self.timers.discard(data["name"])
        late_s = data.get("late_s") or 0.0
        for member in self.members.values():
            member.credit_s += late_s
        self.since_s += late_s
        if data["name"] == "lease":
            self._check_progress()

    def _disconnected(self, data: dict[str, Any]) -> None:
        self.names.pop(data["connection"], None)

    def _arrived(self, data: dict[str, Any]) -> None:
        connection, message = data["connection"], data["message"]
        if message["type"] == "Join":
            self.names[connection] = message["learner"]
        name = self.names.get(connection)
        if name is None:
            return
        member = self.member(name)
        member.heard_s, member.credit_s = self.now, 0.0
        if message["type"] == "Boundary" and member.training and message["sequence"] > member.counted:
            member.counted = message["sequence"]
            self.tokens += message["tokens"]
            self.longest_s = max(self.longest_s, message["step_s"])
            member.held |= dict(message["adopted"])
            member.unmixed += message["tokens"]
            self._mixed(member, message.get("mixed"))
        elif message["type"] == "Contribute":
            self.longest_s = max(self.longest_s, message["sync_s"])
        elif message["type"] == "Installed":
            member.held = dict(enumerate(message["versions"]))
        elif message["type"] in ("HandedIn", "Saved"):
            member.training = False

    def _mixed(self, member: _Member, mixed: dict[str, Any] | None) -> None:
        """Gossip: a round ended; what its learner trained is merged, with or without a partner."""
        if mixed is None:
            return
        self.merged, member.unmixed, self.since_s = self.merged + member.unmixed, 0, self.now
        member.merged |= any(not meeting["missed"] for meeting in mixed["meetings"])

    def _merge_done(self, data: dict[str, Any]) -> None:
        p = data["fragment"]
        round = self.rounds.get(p)
        if data["version"] != self.versions.get(p, 0) + 1:
            self.broken(VERSIONS, f"fragment {p} went from {self.versions.get(p, 0)} to {data['version']}")
        self.versions[p], self.finite[p], self.since_s = data["version"], data["finite"], self.now
        if round is None or round.merge is None:
            self.broken(ROUNDS, f"a merge of fragment {p} ended that was never begun")
        elif data["finite"]:
            for part in round.merge["parts"]:
                learner, incarnation, _, number = _names(part["object"])
                self.committed.add((learner, p, number))
                self.member(learner).merged |= self.member(learner).incarnation == incarnation

    # ---- actions -------------------------------------------------------------------------------------

    def _set_timer(self, data: dict[str, Any]) -> None:
        (self.timers.discard if data["at_s"] is None else self.timers.add)(data["name"])

    def _send(self, data: dict[str, Any]) -> None:
        message, name = data["message"], self.names.get(data["connection"])
        kind = message["type"]
        if kind == "Welcome" and name is not None:
            member = self.member(name)
            if message["incarnation"] != member.incarnation:
                self.members[name] = _Member(incarnation=message["incarnation"], heard_s=self.now)
        elif kind == "FateOf" and message["fate"] == "merged":
            if (name, message["fragment"], message["round"]) not in self.committed:
                self.broken(ANSWERS, f"{name}: fragment {message['fragment']} round {message['round']}")
        elif kind == "Announce" and message["version"] > self.versions.get(message["fragment"], 0):
            self.broken(ANSWERS, f"version {message['version']} of fragment {message['fragment']} announced")
        elif (
            kind == "Announce" and self.gossip and name is not None
        ):  # its learners keep their own parameters
            self.member(name).held[message["fragment"]] = message["version"]
        elif kind == "Donate":
            self._donor(message["transfer"])

    def _donor(self, transfer: str) -> None:
        joiner, _, name = transfer.split(".")
        donor = self.member(name)
        behind = [version - donor.held.get(p, -1) for p, version in self.versions.items()]
        if name == joiner or not donor.training or not donor.merged:
            self.broken(DONORS, f"{name} is asked for {joiner}, and nothing of it was ever merged")
        elif max(behind, default=0) > 1:
            self.broken(DONORS, f"{name} is asked for {joiner}, {max(behind)} versions behind")

    def _merge(self, data: dict[str, Any]) -> None:
        p, objects = data["fragment"], [part["object"] for part in data["parts"]]
        round = self.rounds.get(p)
        if round is None or round.merge is not None:
            self.broken(ROUNDS, f"a merge of fragment {p} begins {'again' if round else 'without a round'}")
        if round is not None:
            round.merge = data
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
        opened = [(self.member(name), incarnation) for name, incarnation in round.members.items()]
        there = [m for m, i in opened if m.incarnation == i and m.training and m.live(self.now, self.lease_s)]
        return max(1, len(there))

    def _finished(self, data: dict[str, Any]) -> None:
        if data["reason"] == "finished" and self.in_flight != 0:
            self.broken(FATES, f"in flight at the end: {self.in_flight}")
        self.verdict.ended, self.phase = data["reason"], "over"

    def _note(self, data: dict[str, Any]) -> None:
        if (see := self.notes.get(data["kind"])) is not None:
            see(data["data"])

    # ---- notes ---------------------------------------------------------------------------------------

    def _born(self, note: dict[str, Any]) -> None:
        self.phase, self.since_s = "training", self.now
        self.versions = dict.fromkeys(range(len(note["digests"])), 0)

    def _joined(self, note: dict[str, Any]) -> None:
        if note["role"] != "reattach":  # who reattaches is what it was
            self._training(note["learner"], True)

    def _training(self, name: str, is_so: bool) -> None:
        self.member(name).training = is_so

    def _round_open(self, note: dict[str, Any]) -> None:
        p = note["fragment"]
        if p in self.rounds:
            self.broken(ROUNDS, f"fragment {p}: round {note['round']} opens beside another")
        self.rounds[p] = _Round(note["final"], {n: self.members[n].incarnation for n in self._live()})

    def _live(self) -> list[str]:
        return [n for n, m in self.members.items() if m.training and m.live(self.now, self.lease_s)]

    def _merged(self, note: dict[str, Any]) -> None:
        p = note["fragment"]
        round = self.rounds.pop(p, None)
        self.verdict.merges += 1
        tokens = note["tokens"]
        if self.gossip:  # an average merges nothing, but for what was handed in at the end
            final = round is not None and round.final
            handed_in = [self.member(name) for name in (note["learners"] if final else ())]
            tokens = sum(member.unmixed for member in handed_in)
        self.merged += tokens if self.finite.pop(p, True) else 0

    def _ending(self, note: dict[str, Any]) -> None:
        self.phase = "ending"
        self.rounds = {
            p: r for p, r in self.rounds.items() if r.merge is not None
        }  # the others are cancelled

    def _waiting(self, note: dict[str, Any]) -> None:
        deadline_s = note.get("deadline_s")
        if not note.get("reason") or deadline_s is None or not self.now < deadline_s < inf:
            self.broken(WAITS, f"{note}")

    def _ledger(self, note: dict[str, Any]) -> None:
        tf = note["token_fragments"]
        known = tf["merged"] + sum(tf["discarded"].values()) + tf["in_flight"]
        reported = self.tokens * int(self.policy.get("num_fragments", 1))
        if known != tf["trained"]:
            self.broken(FATES, f"{known} token-fragments have a fate, {tf['trained']} were trained")
        if reported != tf["trained"]:
            self.broken(FATES, f"{reported} token-fragments were reported, the ledger has {tf['trained']}")
        if self.merged != tf["merged"]:
            self.broken(FATES, f"{self.merged} token-fragments lie in merges, the ledger has {tf['merged']}")
        self.in_flight = tf["in_flight"]

    def _proved(self, note: dict[str, Any]) -> None:
        wrong = [name for name, equal in note.items() if name.endswith("_equal") and not equal]
        if wrong:
            self.broken(REJOINS, f"{note['learner']}: not {', '.join(wrong)}")

    def _rejoined(self, note: dict[str, Any]) -> None:
        self.verdict.rejoins += 1

    def _alarm(self, note: dict[str, Any]) -> None:
        if note["what"] == "install_mismatch":
            self.broken(REJOINS, note["detail"])

    # ---- when an event was dealt with ----------------------------------------------------------------

    def _settled(self) -> None:
        """Whatever still waits has a timer."""
        for p, round in self.rounds.items():
            timer = "end" if round.final else f"round.{p}"
            if round.merge is None and timer not in self.timers and self.phase in ("training", "ending"):
                self.broken(WAITS, f"the round of fragment {p} has no timer {timer!r}")
                self.timers.add(timer)  # said once

    def _check_progress(self) -> None:
        """A merge is due while K learners live that no planned fault holds up."""
        live = self._live() if self.phase == "training" else []
        held_up = {
            name for name, start, stop in self.excuses if start <= self.now <= stop + self.lease_s
        }  # fmt: skip
        quorum = self.policy.get("quorum", 1)
        able = [name for name in live if name not in held_up]
        enough = len(able) == len(live) > 0 if quorum == "all" else len(able) >= quorum
        if not enough:
            self.since_s = self.now
        elif self.now - self.since_s > self._bound_s():
            self.broken(
                PROGRESS, f"no merge for {self.now - self.since_s:.1f} s with {len(able)} learners there"
            )
            self.since_s = self.now

    def _bound_s(self) -> float:
        if self.bound_s is not None:
            return self.bound_s
        steps = self.policy.get("sync_every_steps", 24) / self.policy.get("num_fragments", 1) + 1
        return float(PATIENCE * (self.lease_s + steps * self.longest_s))


def _names(object_name: str) -> tuple[str, int, int, int]:
    """Learner, incarnation, fragment and round of a contribution's object."""
    _, learner, incarnation, fragment, number = object_name.split(".")
    return learner, int(incarnation), int(fragment), int(number)
