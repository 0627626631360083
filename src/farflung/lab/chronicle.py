"""The run folder of the data-parallel reference: what happened, in the words of a syncer's tape.

Nothing decides there, so there is no machine to replay; the header says ``"machine": "data_parallel"``. Reports
take steps, waits, losses of learners and bytes from it, by the same code as from any other run, so the figures
compare.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
from torch import Tensor

from farflung import tape
from farflung.chaos.plan import Fault
from farflung.config import RunConfig
from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import messages as msg

NODE = "syncer"


class Chronicle:
    """Counts, and writes if there is a folder.

    Args:
        config: of the run.
        run_dir: None writes nothing.
        options: of the method, for the header.
    """

    def __init__(self, config: RunConfig, run_dir: Path | None, options: dict[str, Any]) -> None:
        self._names = config.recipe.learners()
        self._run_dir = run_dir
        self._files: list[Any] = []
        self._incarnation = dict.fromkeys(self._names, 0)
        self._sequence = dict.fromkeys(self._names, 0)
        self._steps = dict.fromkeys(self._names, 0)
        self._lost: set[str] = set()
        self._rejoining: set[str] = set()
        self.kills = self.rejoins = self._versions = 0
        self._tape: tape.TapeWriter | None = None
        if run_dir is not None:
            (run_dir / tape.TAPE_DIR).mkdir(parents=True, exist_ok=True)
            segment = (run_dir / tape.TAPE_DIR / f"{NODE}.jsonl").open("w", encoding="utf-8")
            self._metrics = (run_dir / tape.METRICS).open("w", encoding="utf-8")
            self._files = [segment, self._metrics]
            self._tape = tape.TapeWriter(segment, NODE)
            header = {
                "schema": tape.SCHEMA, "machine": "data_parallel", "run": config.run,
                "num_learners": len(self._names), "budget_tokens": config.budget_tokens, **options,
                "policy": msgspec.to_builtins(config.policy),
            }  # fmt: skip
            self._tape.write(0.0, "header", json.dumps(header))

    def joined(self, t: float, learner: str, role: str) -> None:
        """A learner takes part from now on."""
        self._incarnation[learner] += 1
        self._sequence[learner] = 0
        join = msg.Join(
            protocol=msg.PROTOCOL, run=None, learner=learner, fingerprint="", layout="", method=""
        )
        self._heard(t, learner, join)
        self._note(t, "joined", learner=learner, incarnation=self._incarnation[learner], role=role)

    def lost(self, t: float, learner: str, reason: str) -> None:
        if learner not in self._lost:
            self._lost.add(learner)
            self._note(t, "lost", learner=learner, reason=reason)

    def present(self, t: float, learner: str) -> None:
        """It takes part in the step that begins: after a loss, a rejoin."""
        if learner in self._lost:
            self._lost.remove(learner)
            self._rejoining.add(learner)
            self.joined(t, learner, "rejoin")

    def stepped(self, t: float, learner: str, **report: Any) -> None:
        self._sequence[learner] += 1
        self._steps[learner] += 1
        boundary = msg.Boundary(sequence=self._sequence[learner], step=self._steps[learner], **report)
        self._heard(t, learner, boundary)

    def all_reduced(self, t: float, learners: Sequence[str], tokens: int, bytes_each: int) -> None:
        """The gradients of a step became one, and the step of all was taken."""
        self._versions += 1
        self._note(t, "all_reduced", learners=learners, up=bytes_each, down=bytes_each)
        self._note(
            t, "merged", fragment=0, version=self._versions, breadth=len(learners), live=len(learners),
            learners=learners, tokens=tokens,
        )  # fmt: skip
        for learner in sorted(self._rejoining.intersection(learners)):
            self._rejoining.remove(learner)
            self.rejoins += 1
            self._note(t, "rejoined", learner=learner)

    def finished(self, t: float, tokens: int) -> None:
        fates = {"trained": tokens, "merged": tokens, "discarded": {}, "in_flight": 0}
        self._note(t, "ledger", tokens_trained=tokens, token_fragments=fates)
        self._write(t, "action", act.Finished(reason="finished"))

    def fault(self, t: float, fault: Fault) -> None:
        self.kills += fault.kind == "kill"
        self.metric({"t": t, "kind": "fault", **fault.details()})

    def restarted(self, t: float, learner: str) -> None:
        self.metric({"t": t, "kind": "process", "learner": learner, "event": "restarted"})

    def metric(self, record: dict[str, Any]) -> None:
        if self._tape is not None:
            self._metrics.write(json.dumps(record) + "\n")

    def model(self, tensors: dict[str, Tensor]) -> None:
        if self._run_dir is not None:
            tape.write_atomically(self._run_dir / tape.MODEL, safetensors.torch.save(tensors))

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _heard(self, t: float, learner: str, message: msg.LearnerMessage) -> None:
        connection = self._names.index(learner) + 1
        self._write(t, "event", ev.MessageArrived(connection=connection, message=message))

    def _note(self, t: float, kind: str, **data: Any) -> None:
        self._write(t, "action", act.Note(kind=kind, data=data))

    def _write(self, t: float, kind: str, item: msgspec.Struct) -> None:
        if self._tape is not None:
            self._tape.write(t, kind, msgspec.json.encode(item).decode())
