"""One learner's state at an orderly stop: everything that lets it go on as if nothing had happened."""

import contextlib
import copy
import json
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import nn

from farflung.engine.held import SavedIsland
from farflung.engine.island import Island
from farflung.engine.own_state import digest_of
from farflung.engine.trainer import Trainer
from farflung.errors import UserError
from farflung.protocol import mailbox as box
from farflung.tape import write_atomically
from farflung.train.inner import ModelInner

WRONG = (OSError, KeyError, TypeError, AttributeError, ValueError, RuntimeError, safetensors.SafetensorError)
IS_DAMAGED = "is damaged ("  # in the line of a file that could not be read


class Damaged(UserError):
    """A save file that nobody can go on from: it is cut off, garbled, or of another model."""


@dataclass(frozen=True)
class Saved:
    """Whose state was read, and the digest of what the learner holds now."""

    run: str
    incarnation: int
    digest: str


def _tensors(model: nn.Module, island: Island, inner: ModelInner) -> dict[str, torch.Tensor]:
    """All tensors of a learner: parameters and buffers, bases, method state, inner state."""
    tensors = {f"model.{name}": t.detach().contiguous() for name, t in _unique(model).items()}
    tensors |= {f"island.{name}": t.contiguous() for name, t in island.save().tensors.items()}
    return tensors | {"inner": torch.frombuffer(bytearray(inner.donate()), dtype=torch.uint8)}


def write(path: Path, model: nn.Module, island: Island, inner: ModelInner, trainer: Trainer) -> str:
    """Write model, island, inner state and position to one safetensors file, atomically; returns a digest."""
    assert trainer.begun is not None
    tensors = _tensors(model, island, inner)
    meta = {
        "run": trainer.begun.run,
        "incarnation": trainer.begun.incarnation,
        "index": trainer.begun.index,
        "sequence": trainer.sequence,
        "cursor": inner.cursor,
        "tokens": trainer.progress.tokens,
        "budget_tokens": trainer.progress.budget_tokens,
        "island": island.save().meta,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, safetensors.torch.save(tensors, {"farflung": json.dumps(meta)}))
    return digest_of(tensors)


def read(path: Path, model: nn.Module, island: Island, inner: ModelInner, trainer: Trainer) -> Saved:
    """Put a learner back where `write` left it.

    Raises:
        Damaged: the file is damaged or belongs to another model; the learner is as it was before.
    """
    before = {name: t.detach().clone() for name, t in _unique(model).items()}
    its_island, its_inner, cursor = copy.deepcopy(island.save()), inner.donate(), inner.cursor
    try:
        with safetensors.safe_open(path, "pt") as file:
            meta = json.loads(file.metadata()["farflung"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        with torch.no_grad():
            for name, live in _unique(model).items():
                live.copy_(tensors[f"model.{name}"])
        parts = {n.removeprefix("island."): t for n, t in tensors.items() if n.startswith("island.")}
        island.load_saved(SavedIsland(tensors=parts, meta=meta["island"]))
        inner.receive(tensors["inner"].numpy().tobytes())
        inner.cursor = meta["cursor"]
        begun = box.Begin(run=meta["run"], incarnation=meta["incarnation"], index=meta["index"])
        tokens, budget_tokens, sequence = meta["tokens"], meta["budget_tokens"], meta["sequence"]
    except WRONG as error:
        with torch.no_grad():
            for name, live in _unique(model).items():
                live.copy_(before[name])
        island.load_saved(its_island)
        inner.receive(its_inner)
        inner.cursor = cursor
        why = f"{type(error).__name__}: {error}" if isinstance(error, KeyError | TypeError) else error
        raise Damaged(f"{path} {IS_DAMAGED}{' '.join(str(why).split())})") from None
    trainer.begun = begun
    trainer.progress.tokens, trainer.progress.budget_tokens = tokens, budget_tokens
    trainer.installed, trainer.sequence = True, sequence
    return Saved(meta["run"], meta["incarnation"], digest_of(_tensors(model, island, inner)))


def set_aside(path: Path) -> None:
    """Keep a damaged file for whoever wants to look at it, where no learner finds it again."""
    with contextlib.suppress(OSError):
        path.replace(path.with_name(path.name + ".damaged"))


def _unique(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, tied ones once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
