"""A small gossip run by hand, with the real message structs: three learners, three rounds of two steps.

Round 0: learner-0 and learner-1 meet. Round 1: learner-2 waits for learner-1 until its deadline; learner-1, frozen
at the time, comes late. Round 2: learner-0 mixes learner-2, which has given it up: a half exchange.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from farflung import tape
from farflung.protocol import actions, events, messages
from farflung.protocol.objects import offer
from farflung.protocol.policy import Policy
from farflung.units import FRAME_BYTES

NAMES = ["learner-0", "learner-1", "learner-2"]
STEP_S, TOKENS, VECTOR_BYTES = 1.0, 10, 700
LAYOUT = json.dumps({"fragments": [{"pieces": [{"length": 350}], "buffers": [], "counters": []}]})


class Tape:
    """Records by node, and metrics."""

    def __init__(self) -> None:
        self.records: dict[str, list[tuple[float, str, msgspec.Struct]]] = {n: [] for n in ["syncer", *NAMES]}
        self.sequence = dict.fromkeys(NAMES, 0)

    def put(self, t: float, node: str, struct: msgspec.Struct) -> None:
        kind = "action" if isinstance(struct, actions.Action) else "event"
        self.records[node].append((t, kind, struct))

    def note(self, t: float, kind: str, **data: Any) -> None:
        self.put(t, "syncer", actions.Note(kind=kind, data=data))

    def hear(self, t: float, learner: str, message: Any) -> None:
        self.put(t, "syncer", events.MessageArrived(connection=NAMES.index(learner), message=message))

    def boundary(self, t: float, learner: str, **more: Any) -> None:
        self.sequence[learner] += 1
        self.hear(t, learner, messages.Boundary(sequence=self.sequence[learner], step=0, **more))

    def round(
        self,
        number: int,
        learner: str,
        steps_end_s: float,
        mixed_s: float,
        partner: str = "",
        missed: str = "",
    ) -> None:
        """Two steps, a wait for the partner with a deadline 2 s ahead, the end of the round."""
        for end_s in (steps_end_s - STEP_S, steps_end_s):
            self.boundary(end_s, learner, tokens=TOKENS, step_s=STEP_S)
        meetings = []
        if partner:
            meetings = [messages.Meeting(partner=partner, missed=missed, distance=0.0 if missed else 3.0)]
            ours, theirs = offer(1, number, learner, partner), offer(1, number, partner, learner)
            to = f"lab://{partner}"
            self.put(steps_end_s, learner, actions.SetTimer(name="meet", at_s=steps_end_s + 2.0))
            self.put(
                steps_end_s,
                learner,
                actions.Offer(object=ours, partner=partner, address=to, num_bytes=VECTOR_BYTES),
            )
            if not missed:
                self.put(
                    mixed_s, learner, events.Uploaded(object=ours, sent_bytes=VECTOR_BYTES + FRAME_BYTES)
                )
                self.put(
                    mixed_s, learner, events.Arrived(object=theirs, num_bytes=VECTOR_BYTES + FRAME_BYTES)
                )
            self.put(mixed_s, learner, actions.SetTimer(name="meet", at_s=None))
        ended = messages.RoundMixed(epoch=1, round=number, meetings=meetings, correction=0.75)
        self.boundary(mixed_s, learner, mixed=ended)

    def write(self, run_dir: Path) -> Path:
        (run_dir / tape.TAPE_DIR).mkdir(parents=True)
        policy = Policy(
            method="gasloc", topology="gossip", num_fragments=1, sync_every_steps=2, overlap_steps=0
        )
        header = {"schema": 1, "machine": "syncer", "run": "r", "num_learners": 3, "budget_tokens": 180}
        for node, records in self.records.items():
            with (run_dir / tape.TAPE_DIR / f"{node}.jsonl").open("w") as out:
                writer = tape.TapeWriter(out, node)
                writer.write(0.0, "header", json.dumps({**header, "policy": msgspec.to_builtins(policy)}))
                for t, kind, struct in sorted(records, key=lambda r: r[0]):
                    writer.write(t, kind, msgspec.json.encode(struct).decode())
        metrics: list[dict[str, Any]] = [
            {"t": 0.0, "kind": "eval", "tokens": 0, "loss": 5.0},
            {"t": 7.5, "kind": "fault", "fault": "freeze", "target": "learner-1", "for_s": 2.0},
            {"t": 13.0, "kind": "eval", "tokens": 180, "loss": 2.0,
             "workers": {"learner-0": 2.0, "learner-1": 2.5, "learner-2": 3.0}},
        ]  # fmt: skip
        (run_dir / tape.METRICS).write_text("".join(json.dumps(m) + "\n" for m in metrics))
        (run_dir / tape.CONFIG).write_text(json.dumps({"method": "gasloc", "task": "text"}))
        return run_dir


def gossip() -> Tape:
    run = Tape()
    for i, name in enumerate(NAMES):
        join = messages.Join(
            protocol=1, run=None, learner=name, fingerprint="f", layout=LAYOUT, method="gasloc:abc"
        )
        run.hear(0.5, name, join)
        welcome = messages.Welcome(run="r", incarnation=1, index=i, tokens=0, budget_tokens=180)
        run.put(0.5, "syncer", actions.Send(connection=i, message=welcome))
        run.note(1.0, "joined", learner=name, incarnation=1, role="birth")
    run.note(1.0, "epoch", number=1, round=0, members=NAMES)
    run.round(0, "learner-0", 3.0, 4.5, partner="learner-1")
    run.round(0, "learner-1", 4.0, 4.5, partner="learner-0")
    run.round(0, "learner-2", 3.0, 3.0)
    run.round(1, "learner-0", 6.5, 6.5)
    run.round(1, "learner-2", 5.0, 7.0, partner="learner-1", missed="deadline")
    run.round(1, "learner-1", 6.5, 9.5, partner="learner-2", missed="late")  # frozen from 7.5 to 9.5
    run.round(2, "learner-2", 9.0, 11.0, partner="learner-0", missed="deadline")
    run.round(2, "learner-0", 11.0, 11.2, partner="learner-2")
    run.round(2, "learner-1", 11.5, 11.5)
    run.note(11.2, "half_exchange", epoch=1, round=2, learners=["learner-0", "learner-2"], drift=0.25)
    for version, (t, distance) in enumerate([(6.0, 4.0), (13.0, 1.0)], 1):
        run.note(t, "merged", fragment=0, version=version, breadth=3, live=3, learners=NAMES, tokens=0)
        run.note(t, "consensus", version=version, round=version - 1, learners=NAMES, distance=distance)
    fates = {"trained": 180, "merged": 180, "discarded": {}, "in_flight": 0}
    run.note(13.0, "ledger", tokens_trained=180, token_fragments=fates)
    run.put(13.0, "syncer", actions.Finished(reason="finished"))
    return run


def folder(path: Path) -> Path:
    return gossip().write(path)
