"""The syncer's part of an orderly stop: fragments, outer state, machine; written whole or not at all."""

import json
from pathlib import Path

import safetensors
import safetensors.torch

from farflung.core.fragments import FragmentPlan
from farflung.engine.hub import HubState
from farflung.errors import UserError
from farflung.methods import Method
from farflung.protocol import snapshot
from farflung.protocol.syncer import SyncerMachine
from farflung.tape import CHECKPOINTS, write_atomically

FILE = "syncer.safetensors"


def write(run_dir: Path, hub: HubState, machine: SyncerMachine, elapsed_s: float) -> None:
    """Write everything of a suspended syncer to one file."""
    path = run_dir / CHECKPOINTS / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = {
        "machine": snapshot.encode(snapshot.snapshot(machine)).decode(),
        "elapsed_s": json.dumps(elapsed_s),
    }
    write_atomically(path, safetensors.torch.save(hub.save(), meta))


def exists(run_dir: Path) -> bool:
    """Whether there is something to resume."""
    return (run_dir / CHECKPOINTS / FILE).exists()


def remove(run_dir: Path) -> None:
    """The run is over: nobody shall resume it by mistake."""
    (run_dir / CHECKPOINTS / FILE).unlink(missing_ok=True)


def elapsed_s(run_dir: Path) -> float:
    """Seconds that the run had lasted. UserError when there is nothing to resume, or it is damaged."""
    return _read_meta(run_dir)[1]


def read(run_dir: Path, method: Method, machine: SyncerMachine, now: float) -> HubState:
    """Restore the machine in place and return the tensors."""
    meta, _ = _read_meta(run_dir)
    path = run_dir / CHECKPOINTS / FILE
    try:
        saved = snapshot.decode(meta["machine"].encode())
        hub = HubState(FragmentPlan.from_json(saved.layout), method)
        hub.load(safetensors.torch.load_file(path))
    except (ValueError, KeyError, OSError, safetensors.SafetensorError) as error:
        raise _damaged(path, error) from None
    snapshot.restore(machine, saved, now)
    return hub


def _read_meta(run_dir: Path) -> tuple[dict[str, str], float]:
    path = run_dir / CHECKPOINTS / FILE
    if not path.exists():
        raise UserError(
            f"{run_dir}: nothing to resume: only a run stopped in order (Ctrl-C) has {CHECKPOINTS}/{FILE}"
        )
    try:
        with safetensors.safe_open(path, "pt") as file:
            meta = file.metadata()
        return meta, float(json.loads(meta["elapsed_s"]))
    except (OSError, KeyError, ValueError, TypeError, safetensors.SafetensorError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> UserError:
    why = "it has no record of a run" if isinstance(error, KeyError | TypeError) else error
    return UserError(f"{path}: damaged, nothing can be resumed from it: {why}")
