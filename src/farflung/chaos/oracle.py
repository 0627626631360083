"""Judges a run's tape: which of the promises that a tape can show were broken, where, and by how much.

A pure function of records; it trusts no figure of the machines that it can count again.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from farflung.chaos.liveness import Progress, excuses_of
from farflung.chaos.syncer_checks import SyncerChecks
from farflung.chaos.verdict import VERSIONS, WAITS, Finding, Verdict
from farflung.tape import Record


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
    syncer = SyncerChecks(verdict, policy or {}, Progress(excuses_of(metrics), bound_s))
    for node in sorted((n for n in nodes if _base(n) == "syncer"), key=_life):
        syncer.life(node, nodes[node])
    for node in sorted(n for n in nodes if _base(n) != "syncer"):
        verdict.findings += _learner_findings(nodes[node])
    verdict.findings.sort(key=lambda f: f.t)
    return verdict


def _base(node: str) -> str:
    return node.partition(".")[0]


def _life(node: str) -> int:
    return int(node.partition(".")[2] or 1)


def _learner_findings(records: list[Record]) -> Iterator[Finding]:
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
        stops = command.get("type") == "RunUntil" and command.get("step") is not None
        if stops and not command.get("reason"):
            yield Finding(WAITS, record.t, record.node, f"stands at step {command['step']} for no reason")
