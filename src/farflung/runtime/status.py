"""What GET /status says: the live view's and the supervisor's only source."""

from collections.abc import Iterable
from typing import Any

from farflung.protocol.gathering import Gathering
from farflung.protocol.membership import Member
from farflung.protocol.rounds import PATIENCE_S
from farflung.protocol.syncer import SyncerMachine
from farflung.runtime.transport import Traffic

RECENT = 8  # merges shown
SHOWN = ("joined", "lost", "left", "lease_lapsed", "lease_renewed", "rejoin_proved", "rejoined", "refused",
         "alarm", "ending", "donor_failed", "disconnected", "born", "epoch", "half_exchange", "own_state",
         "resume_proved")  # fmt: skip


def status(
    machine: SyncerMachine, now: float, recent: Iterable[dict[str, Any]], traffic: Traffic
) -> dict[str, Any]:
    """One JSON-able snapshot of a run, read from its machine. `gossip` is None where a hub merges."""
    notes = list(recent)
    members = machine.membership.sorted()
    may_wait = machine.policy.pace == "lockstep" or machine.policy.topology == "gossip"
    gossip = machine.merging if isinstance(machine.merging, Gathering) else None
    training = [m for m in members if _state(m, now, may_wait) in ("training", "waiting") and m.steps_done]
    merges = [n for n in notes if n["kind"] == "merged"]
    open_rounds = {(p, r.number) for p, r in machine.merging.rounds.open.items() if not r.merging}
    waits = {
        (n["fragment"], n["round"]): n["reason"]
        for n in notes[-50:]
        if n["kind"] == "waiting" and (n["fragment"], n["round"]) in open_rounds
    }
    return {
        "run": machine.run,
        "phase": machine.phase,
        "method": machine.policy.method,
        "t_s": now,
        "tokens": machine.ledger.tokens_trained,
        "budget_tokens": machine.budget_tokens,
        "tokens_per_s": sum(_rate(m) for m in training),
        "live": len(training),
        "num_learners": machine.num_learners,
        "bytes_up": traffic.bytes_up + (gossip.bytes_up if gossip else 0),
        "bytes_down": traffic.bytes_down + (gossip.bytes_down if gossip else 0),
        "bytes_control": traffic.bytes_control,
        "learners": [_learner(m, now, may_wait) for m in members],
        "merges": [_merge(n) for n in merges[-RECENT:]],
        "num_merges": machine.merging.rounds.closed,
        "waiting": list(waits.values())[-2:],
        "notes": [{"t": n["t"], "text": text(n)} for n in notes if n["kind"] in SHOWN][-12:],
        "refused": dict(machine.refused),
        "rejoins": machine.admission.rejoins,
        "ledger": machine.ledger.summary()["token_fragments"],
        "gossip": _gossip(gossip) if gossip else None,
    }


def _gossip(gathering: Gathering) -> dict[str, Any]:
    """`version` is that of the newest consensus average."""
    return {
        "epoch": gathering.epoch,
        "round": gathering.round,
        "members": len(gathering.members),
        "meetings": gathering.meetings,
        "missed": dict(gathering.missed),
        "half_exchanges": gathering.half_exchanges,
        "version": gathering.versions[0],
        "distance": gathering.distance,
    }


def _rate(member: Member) -> float:
    if not member.step_s.value or not member.steps_done:
        return 0.0
    return member.tokens / member.steps_done / member.step_s.value


def _state(member: Member, now: float, waits: bool) -> str:
    """Link and progress are two signals: who is heard but does not step waits, if methods do that, or is stuck."""
    if member.state != "training" or member.progressing(now, PATIENCE_S):
        return member.state
    return "waiting" if waits and member.live(now) else "silent"


def _learner(member: Member, now: float, waits: bool) -> dict[str, Any]:
    state = _state(member, now, waits)
    silent = state == "silent"
    return {
        "name": member.name,
        "state": state,
        "incarnation": member.incarnation,
        "step": member.step,
        "loss": member.loss,
        "tokens": member.tokens,
        "tokens_per_s": 0.0 if silent else _rate(member),
        "seen_s_ago": None if member.last_boundary_s is None else now - member.last_boundary_s,
    }


def _merge(note: dict[str, Any]) -> dict[str, Any]:
    return {k: note[k] for k in ("t", "fragment", "version", "breadth", "live", "grace_s", "quorum_s")}


def _own_state(note: dict[str, Any]) -> str:
    if note["taken"] == "own":
        return f"its own method state, kept {max(0, note['age_steps'])} steps before"
    return f"method state zero: what it kept is {note['reason']}"


def text(note: dict[str, Any]) -> str:
    """A note as one line for a person."""
    who = note.get("learner", "")
    match note["kind"]:
        case "born":
            return f"{who} gave the run its first parameters"
        case "joined":
            return f"{who} joined ({note['role']}, incarnation {note['incarnation']})"
        case "lost" | "left":
            return f"{who} {note['kind']}: {note['reason']}"
        case "lease_lapsed":
            return f"{who} is silent: nobody waits for it"
        case "lease_renewed":
            return f"{who} is heard again"
        case "rejoin_proved":
            equal = all(value for check, value in note.items() if check.endswith("_equal"))
            verdict = "digests agree" if equal else "DIGESTS DIFFER"
            return f"{who} installed {note['role']}, inner state {note['state']}: {verdict}"
        case "own_state":
            return f"{who} goes on with {_own_state(note)}"
        case "resume_proved":
            return f"{who} resumed: {'digests agree' if note['state_equal'] else 'DIGESTS DIFFER'}"
        case "rejoined":
            return f"{who}: first work merged after its rejoin"
        case "refused":
            return f"refused {who}: {note['reason']} ({note['detail']})"
        case "donor_failed":
            return f"donor {note['donor']} failed {who}: {note['reason']}"
        case "disconnected":
            return f"{who} disconnected: {note['reason']}"
        case "epoch":
            who = ", ".join(note["members"]) or "nobody"
            return f"epoch {note['number']}, from round {note['round']} on: {who}"
        case "half_exchange":
            return f"round {note['round']}: only one side of {' and '.join(note['learners'])} mixed"
        case "ending":
            return f"ending: {note['reason']}"
        case _:
            return f"{note['kind']}: {note.get('detail', note.get('what', ''))}"
