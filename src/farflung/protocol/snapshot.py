"""A Syncer machine as one JSON object: what an orderly stop writes and a resume reads."""

from typing import Any

import msgspec

from farflung.core.quorum import Ema
from farflung.protocol.gathering import Gathering
from farflung.protocol.ledger import Window
from farflung.protocol.membership import Member
from farflung.protocol.messages import Fate
from farflung.protocol.syncer import SyncerMachine


class Gathered(msgspec.Struct, frozen=True, kw_only=True):
    """Gossip: what a `Gathering` knows. Members come back by themselves, into a new epoch."""

    epoch: int
    round: int
    gathered: int
    half_exchanges: int
    meetings: int = 0
    missed: dict[str, int] = {}
    distance: float | None = None
    direct: dict[str, tuple[int, int]] = {}


class SyncerSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """State between rounds: nothing is open, nobody is being installed."""

    fingerprint: str
    layout: str
    tokens_trained: int
    merged: int
    discarded: dict[str, int]
    windows: dict[str, list[Window]]
    members: list[Member]
    versions: list[int]
    kept: list[list[int]]
    digests: list[tuple[int, int, str]]
    next_fragment: int
    next_number: list[int]
    closed: int
    xi_quorum: Ema
    xi_sync: Ema
    rejoins: int
    refused: dict[str, int]
    fates: list[tuple[str, int, int, dict[int, Fate]]] = []  # by learner, incarnation, fragment; for repeats
    gathering: Gathered | None = None


def snapshot(machine: SyncerMachine) -> SyncerSnapshot:
    """Describe a suspended machine."""
    merging, ledger = machine.merging, machine.ledger
    return SyncerSnapshot(
        fingerprint=machine.admission.fingerprint or "",
        layout=machine.admission.layout or "",
        tokens_trained=ledger.tokens_trained,
        merged=ledger.merged,
        discarded=ledger.discarded,
        windows=ledger.windows,
        members=machine.membership.sorted(),
        versions=merging.versions,
        kept=merging.kept,
        digests=[(p, v, digest) for (p, v), digest in sorted(merging.digests.items())],
        next_fragment=merging.rounds.next_fragment,
        next_number=merging.rounds.next_number,
        closed=merging.rounds.closed,
        xi_quorum=merging.rounds.xi_quorum,
        xi_sync=merging.rounds.xi_sync,
        rejoins=machine.admission.rejoins,
        refused=machine.refused,
        fates=[(*key, fates) for key, fates in sorted(merging.fates.items()) if fates],
        gathering=_gathered(merging) if isinstance(merging, Gathering) else None,
    )


def _gathered(gathering: Gathering) -> Gathered:
    return Gathered(**{field: getattr(gathering, field) for field in Gathered.__struct_fields__})


def restore(machine: SyncerMachine, saved: SyncerSnapshot, now: float) -> None:
    """Put a fresh machine where the suspended one was; its members are expected to reattach."""
    machine.restored = {"now": now, "snapshot": msgspec.to_builtins(saved)}
    machine.phase = "training"
    machine.admission.fingerprint, machine.admission.layout = saved.fingerprint, saved.layout
    machine.admission.rejoins, machine.refused = saved.rejoins, dict(saved.refused)
    ledger, merging = machine.ledger, machine.merging
    ledger.tokens_trained, ledger.merged = saved.tokens_trained, saved.merged
    ledger.discarded, ledger.windows = dict(saved.discarded), dict(saved.windows)
    merging.versions, merging.kept = list(saved.versions), [list(k) for k in saved.kept]
    merging.digests = {(p, v): digest for p, v, digest in saved.digests}
    merging.fates = {(name, life, p): dict(fates) for name, life, p, fates in saved.fates}
    rounds = merging.rounds
    rounds.next_fragment, rounds.next_number = saved.next_fragment, list(saved.next_number)
    rounds.closed, rounds.xi_quorum, rounds.xi_sync = saved.closed, saved.xi_quorum, saved.xi_sync
    if isinstance(merging, Gathering) and saved.gathering is not None:
        for field in Gathered.__struct_fields__:
            setattr(merging, field, getattr(saved.gathering, field))
        merging.missed, merging.direct = dict(saved.gathering.missed), dict(saved.gathering.direct)
    for member in sorted(saved.members, key=lambda m: m.index):
        member.connection = None
        if member.state == "saved":
            member.state, member.lease_until_s = "training", now + machine.policy.lease_s
        else:  # it did not save in time: it comes back by a rejoin
            member.state = "gone"
            ledger.lost(member.name, set())
        machine.membership.members[member.name] = member


def encode(saved: SyncerSnapshot) -> bytes:
    return msgspec.json.encode(saved)


def decode(data: bytes) -> SyncerSnapshot:
    """Raises ValueError with one line when the bytes are not a snapshot."""
    result: Any = msgspec.json.decode(data, type=SyncerSnapshot)
    assert isinstance(result, SyncerSnapshot)
    return result
