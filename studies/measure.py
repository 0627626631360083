"""One cell of a study: a recipe, run in the lab without a folder, and its figures."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from farflung.config import REFERENCE, resolve
from farflung.lab.data_parallel import DataParallel
from farflung.lab.lab import Lab
from farflung.lab.start import lab_config
from farflung.lab.virtual_run import Tape
from farflung.protocol import messages as msg
from farflung.recipe import Recipe, make_recipe
from farflung.report.figures import figures, mean_breadth
from farflung.report.folder import read_folder
from farflung.report.history import History, read_history
from farflung.tape import Record

Figures = dict[str, Any]


class SyncerTape:
    """Passes everything on to another tape, and keeps in memory what the syncer sees and does.

    So that goodput and its like are those of a run's report, without writing a file for every cell.
    """

    def __init__(self, inner: Tape, syncer: Any) -> None:
        self._inner = inner
        self.records: list[Record] = []
        header = {**syncer.header(), "policy": msgspec.to_builtins(syncer.policy)}
        self._keep(0.0, "header", header)

    def open(self, node: str, machine: Any) -> None:
        self._inner.open(node, machine)

    def handle(self, node: str, machine: Any, event: Any, now: float) -> Sequence[Any]:
        actions = self._inner.handle(node, machine, event, now)
        if node == "syncer":
            self._keep(now, "event", event)
            for action in actions:
                if isinstance(getattr(action, "message", None), msg.Invite | msg.Announce | msg.FateOf):
                    continue  # most of all actions, and no figure reads them
                self._keep(now, "action", action)
        return actions

    def _keep(self, now: float, kind: str, item: Any) -> None:
        self.records.append(Record(now, "syncer", len(self.records), kind, msgspec.to_builtins(item)))


def measure(raw_recipe: dict[str, Any]) -> Figures:
    """Run a recipe to its end in virtual time.

    Returns:
        Figures as in a run's report. Fractions are 0..1; ``discarded`` is a share of what was trained, by
        reason; ``round_breadth`` is the merges' breadth without those of the hand-in; ``eval_loss`` is the
        mean held-out loss of the global model at the end, in nats. What else the task measures is there by its
        name: ``accuracy``.
    """
    recipe = make_recipe(raw_recipe)
    if recipe.method == REFERENCE:
        return _measure_reference(recipe)
    lab = Lab(resolve(recipe, f"study-{recipe.seed}"), None)
    seen = SyncerTape(lab.run.tape, lab.run.syncer)
    lab.run.tape = seen
    results = lab.go()
    history = read_history(seen.records, lab.faults)
    ledger = lab.run.syncer.ledger.summary()
    return _figures(results, history, lab.evals, ledger) | _gossip_figures(lab, seen.records)


def _measure_reference(recipe: Recipe) -> Figures:
    """The same of data-parallel training, whose ledger has one line: all that was trained is merged."""
    with TemporaryDirectory(prefix="farflung-study-") as folder:
        driver = DataParallel(lab_config(recipe), Path(folder))
        results = driver.go()
        history = read_folder(Path(folder)).history
    fates = {"trained": driver.tokens, "merged": driver.tokens, "discarded": {}}
    ledger = {"tokens_trained": driver.tokens, "token_fragments": fates}
    return _figures(results, history, driver.evals, ledger)


def _figures(
    results: Figures, history: History, evals: list[dict[str, Any]], ledger: dict[str, Any]
) -> Figures:
    numbers, fates = figures(history), ledger["token_fragments"]
    trained = fates["trained"]
    return {
        "outcome": results["outcome"],
        "eval_loss_start": evals[0]["loss"],
        "eval_loss": evals[-1]["loss"],
        **evals[-1].get("figures", {}),
        "goodput": numbers.goodput,
        "uptime": numbers.uptime,
        "tokens": ledger["tokens_trained"],
        "curve": [(round(e["t"], 3), e["tokens"], round(e["loss"], 5)) for e in evals],
        "merged_share": fates["merged"] / trained,
        "discarded": {reason: lost / trained for reason, lost in fates["discarded"].items()},
        "mean_merge_breadth": numbers.mean_merge_breadth,
        "round_breadth": mean_breadth(m for m in history.merges if not m.final),
        "merges": numbers.merges,
        "clipped_share": numbers.clipped / max(1.0, numbers.merges * numbers.mean_merge_breadth),
        "bytes_up": results["bytes_up"],
        "bytes_down": results["bytes_down"],
        "virtual_s": numbers.duration_s,
        "steps_of": numbers.steps_of,
        "digest": results["digest"],
    }


def _gossip_figures(lab: Lab, records: Sequence[Record]) -> Figures:
    """Of a gossip run: how far its learners ended apart, and the loss of their own parameters."""
    if lab.config.policy.topology != "gossip":
        return {}
    notes = [r.data["data"] for r in records if r.type == "Note" and r.data["kind"] == "consensus"]
    meetings = [
        meeting
        for r in records
        if r.type == "MessageArrived" and (mixed := r.data["message"].get("mixed")) is not None
        for meeting in mixed["meetings"]
    ]
    losses = [*lab.evals[-1].get("workers", {}).values()]
    workers = {}
    if losses:
        workers = {
            "workers_loss": sum(losses) / len(losses),
            "workers_loss_range": [min(losses), max(losses)],
        }
    return {
        **workers,
        "consensus_distance": notes[-1]["distance"],
        "meetings": len(meetings),
        "missed": sum(bool(meeting["missed"]) for meeting in meetings),
    }
