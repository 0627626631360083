"""A made-up run folder, written with the real message structs through the real tape writer.

Four learners of 0.5 s steps; learner-1 is killed at 20 s, noticed at 22.5 s, back at 25.2 s, proven at 25.9 s
and merged again at about 28 s; learner-2 is frozen for 5 s at 40 s. `decoupled` merges a fragment a second;
`diloco` merges everything every 8 steps and stands still until the dead learner's lease has lapsed.
"""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from farflung import tape
from farflung.protocol import actions, events, messages
from farflung.protocol.policy import Policy

KILL_S, LAPSED_S, JOIN_S, INSTALL_S = 20.0, 22.5, 25.2, 0.7
PROVED_S = JOIN_S + INSTALL_S
FREEZE_S, FREEZE_FOR_S = 40.0, 5.0
STEP_S, TOKENS, END_S = 0.5, 4096, 60.0
NAMES = [f"learner-{i}" for i in range(4)]
P = 4
LAYOUT = json.dumps(
    {
        "strategy": "balanced",
        "tensors": [],
        "fragments": [
            {"index": i, "pieces": [{"length": 50_000}], "buffers": [], "counters": []} for i in range(P)
        ],
    }
)


class Run:
    """Collects events and actions out of order and writes them in order."""

    def __init__(self, method: str, seed: int = 0):
        self.method, self.random = method, random.Random(seed)
        self.records: list[tuple[float, int, str, msgspec.Struct]] = []
        self.metrics: list[dict[str, Any]] = []
        self.incarnation = dict.fromkeys(NAMES, 1)
        self.sequence = dict.fromkeys(NAMES, 0)
        self.connection = {name: i for i, name in enumerate(NAMES)}

    def event(self, t: float, event: events.Event) -> None:
        self.records.append((t, len(self.records), "event", event))

    def action(self, t: float, action: actions.Action) -> None:
        self.records.append((t, len(self.records), "action", action))

    def note(self, t: float, kind: str, **data: Any) -> None:
        self.action(t, actions.Note(kind=kind, data=data))

    def hear(self, t: float, learner: str, message: Any) -> None:
        self.event(t, events.MessageArrived(connection=self.connection[learner], message=message))

    def join(self, t: float, learner: str, role: str) -> None:
        connection, incarnation = self.connection[learner], self.incarnation[learner]
        self.event(t, events.Connected(connection=connection))
        method = f"{self.method}:abc"
        self.hear(
            t,
            learner,
            messages.Join(
                protocol=1, run=None, learner=learner, fingerprint="f", layout=LAYOUT, method=method
            ),
        )
        welcome = messages.Welcome(
            run="r", incarnation=incarnation, index=connection, tokens=0, budget_tokens=1
        )
        self.action(t, actions.Send(connection=connection, message=welcome))
        self.hear(
            t + INSTALL_S,
            learner,
            messages.Installed(versions=[0] * P, digests=[], inner_digest=None, lr=0.001, cursor=0, step=0),
        )
        donor = "learner-0" if role == "rejoin" else None
        self.note(
            t + INSTALL_S, "rejoin_proved", learner=learner, incarnation=incarnation, donor=donor, role=role,
            state="warm" if donor else "cold", params_equal=True, inner_equal=True, lr_equal=True,
            cursor_equal=True,
        )  # fmt: skip
        self.note(t + INSTALL_S, "joined", learner=learner, incarnation=incarnation, role=role)

    def boundary(
        self, t: float, learner: str, step_s: float = STEP_S, wait_s: float = 0.0, **more: Any
    ) -> None:
        self.sequence[learner] += 1
        noise = self.random.gauss(0, 0.08)
        message = messages.Boundary(
            sequence=self.sequence[learner],
            step=self.sequence[learner],
            tokens=TOKENS if step_s else 0,
            step_s=step_s,
            wait_s=wait_s,
            loss=loss_at(t) + noise,
            lr=0.001,
            cursor=self.sequence[learner],
            **more,
        )
        self.hear(t, learner, message)

    def merge(
        self, t: float, fragment: int, version: int, learners: list[str], live: int, **more: Any
    ) -> None:
        parts = [
            actions.Part(object=f"c.{x}", learner=x, base_version=version - 1, weight=1 / len(learners))
            for x in sorted(learners)
        ]
        for name in learners:
            self.hear(
                t - 0.1,
                name,
                messages.Contribute(
                    fragment=fragment, round=version, base_version=version - 1, steps=8, tokens=8 * TOKENS,
                    num_bytes=100_000,
                ),
            )  # fmt: skip
        self.action(t, actions.Merge(fragment=fragment, version=version, parts=parts, **more))
        done = events.MergeDone(
            fragment=fragment, version=version, finite=True, norm=1.0, digest="d", merge_s=0.01
        )
        self.event(t + 0.02, done)
        data = {"fragment": fragment, "version": version, "breadth": len(learners), "learners": learners}
        data |= {"tokens": 8 * TOKENS * len(learners), "quorum_s": 0.1, "grace_s": 0.2, "norm": 1.0}
        self.note(t + 0.02, "merged", live=live, **data)

    def write(self, run_dir: Path) -> Path:
        (run_dir / tape.TAPE_DIR).mkdir(parents=True)
        quorum: Any = "all" if self.method == "diloco" else 2
        policy = Policy(
            method=self.method,
            pace="lockstep" if self.method == "diloco" else "free",
            num_fragments=P, sync_every_steps=8, overlap_steps=0 if self.method == "diloco" else 1,
            quorum=quorum,
        )  # fmt: skip
        header = {"schema": 1, "machine": "syncer", "run": "r", "num_learners": 4, "budget_tokens": 1_900_000}
        header["policy"] = msgspec.to_builtins(policy)
        with (run_dir / tape.TAPE_DIR / "syncer.jsonl").open("w") as out:
            writer = tape.TapeWriter(out, "syncer")
            writer.write(0.0, "header", json.dumps(header))
            for t, _, kind, struct in sorted(self.records, key=lambda r: r[:2]):
                writer.write(round(t, 4), kind, msgspec.json.encode(struct).decode())
        (run_dir / tape.METRICS).write_text("".join(json.dumps(m) + "\n" for m in self.metrics))
        config = {"method": self.method, "task": "shakespeare", "seed": 0, "num_learners": 4, "scale": "tiny"}
        config |= {"budget_tokens": 1_900_000, "policy": header["policy"]}
        (run_dir / tape.CONFIG).write_text(json.dumps(config))
        return run_dir


def loss_at(t: float) -> float:
    return 1.6 + 2.6 * math.exp(-t / 18)


def _births(run: Run) -> None:
    for i, name in enumerate(NAMES):
        run.metrics.append({"t": 0.1 * i, "kind": "process", "learner": name, "event": "started"})
        run.join(1.0 + 0.1 * i, name, "birth")


def _faults(run: Run) -> None:
    run.metrics += [
        {"t": KILL_S, "kind": "fault", "fault": "kill", "target": "learner-1"},
        {"t": KILL_S + 0.1, "kind": "process", "learner": "learner-1", "event": "exited", "code": -9},
        {"t": 23.4, "kind": "process", "learner": "learner-1", "event": "restarted"},
        {"t": FREEZE_S, "kind": "fault", "fault": "freeze", "target": "learner-2", "for_s": FREEZE_FOR_S},
    ]
    run.event(KILL_S + 0.2, events.Disconnected(connection=1, reason="connection reset"))
    run.note(LAPSED_S, "lease_lapsed", learner="learner-1")


def _return(run: Run) -> None:
    run.incarnation["learner-1"], run.sequence["learner-1"] = 2, 0
    run.connection["learner-1"] = 10
    run.note(JOIN_S, "lost", learner="learner-1", incarnation=1, reason="fenced by a newer process")
    run.join(JOIN_S, "learner-1", "rejoin")


def _step_ends(run: Run) -> list[float]:
    reports = ((t, getattr(s, "message", None)) for t, _, _, s in run.records)
    return [t for t, m in reports if isinstance(m, messages.Boundary) and m.tokens]


def _end(run: Run, t: float, ledger: bool = True) -> None:
    steps = len(_step_ends(run))
    trained = steps * TOKENS * P
    discarded = {"overlap": trained // 14, "learner_lost": 4 * 8 * TOKENS, "late": 2 * TOKENS}
    merged = trained - sum(discarded.values())
    fates = {"trained": trained, "merged": merged, "discarded": discarded, "in_flight": 0}
    if ledger:
        run.note(t, "ledger", tokens_trained=steps * TOKENS, token_fragments=fates)
    run.action(t, actions.Finished(reason="finished"))
    for name in NAMES:
        run.metrics.append({"t": t + 0.3, "kind": "process", "learner": name, "event": "exited", "code": 0})


def _evals(run: Run, times: list[float]) -> None:
    ends = _step_ends(run)
    for t in times:
        tokens = TOKENS * sum(end <= t for end in ends)
        run.metrics.append(
            {"t": t, "kind": "eval", "tokens": tokens, "loss": loss_at(t) + 0.02, "versions": [0] * P}
        )


def decoupled(ledger: bool = True) -> Run:
    run = Run("decoupled")
    _births(run)
    _faults(run)
    back = True
    for i, name in enumerate(NAMES):
        t, adopted = 2.0 + 0.05 * i, 0
        while t + STEP_S < END_S - 1:
            if name == "learner-1" and t + STEP_S > KILL_S and back:
                back = False
                _return(run)
                t = PROVED_S
            step_s = STEP_S * run.random.uniform(0.95, 1.1)
            if name == "learner-2" and t < FREEZE_S < t + step_s:
                step_s += FREEZE_FOR_S
            t += step_s
            adopted += 1
            run.boundary(t, name, step_s, adopted=[(adopted % P, adopted)] if adopted % 2 else [])
    for version, second in enumerate(range(7, int(END_S) - 2)):
        live = [n for n in NAMES if not (n == "learner-1" and KILL_S < second < JOIN_S + 2.7)]
        here = [n for n in live if not (n == "learner-2" and FREEZE_S < second < FREEZE_S + FREEZE_FOR_S + 1)]
        run.merge(second + run.random.uniform(0, 0.2), version % P, version // P + 1, here, len(live))
    run.note(28.2, "rejoined", learner="learner-1", incarnation=2)
    run.note(15.0, "late", learner="learner-3", fragment=1, round=2)
    run.note(33.0, "refused", learner="stranger", reason="fingerprint", detail="other model")
    for p in range(P):
        run.merge(END_S - 0.4, p, 20, NAMES, 4, final=True)
    _evals(run, [2.0 * i for i in range(1, 30)])
    _end(run, END_S, ledger)
    return run


def diloco() -> Run:
    run = Run("diloco")
    _births(run)
    _faults(run)
    run.metrics.pop()  # no freeze here
    t, version, live = 2.0, 1, list(NAMES)
    while t < 72:
        killed = t < KILL_S < t + 8 * STEP_S
        for name in live:
            for k in range(1, 9):
                at = t + k * STEP_S
                if name == "learner-1" and killed and at > KILL_S:
                    break
                run.boundary(at, name)
        end = t + 8 * STEP_S
        if killed:
            live.remove("learner-1")
            for name in live:
                run.boundary(32.0, name, step_s=0.0, wait_s=32.0 - end)
            run.note(end + 0.1, "waiting", fragment=0, round=version, reason="learner-1 owes a contribution",
                     deadline_s=30.0)  # fmt: skip
            end = 32.0
        run.merge(end + 0.1, 0, version, live, len(live))
        if killed:
            _return(run)
            live.append("learner-1")
        elif version == 7:
            run.note(end + 0.2, "rejoined", learner="learner-1", incarnation=2)
        t, version = end + 0.3, version + 1
    _evals(run, [t for t in [2.0 * i for i in range(1, 40)] if t < 75])
    _end(run, t + 0.5)
    return run


def folder(path: Path, make: Callable[[], Run] = decoupled) -> Path:
    return make().write(path)
