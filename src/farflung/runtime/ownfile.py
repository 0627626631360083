"""The method's own state of one learner on its disk, renewed with every round: what a crash leaves behind."""

from pathlib import Path

import msgspec
import safetensors
import safetensors.torch

from farflung.engine.own_state import Own, checked
from farflung.methods import Method
from farflung.protocol.own_state import DAMAGED, MISSING, OwnState

_META_KEY = "farflung"


def write(path: Path, own: Own) -> None:
    """Write it whole or not at all; an older file is replaced.

    Raises:
        OSError: it cannot be written. Then there is no file: an older one would be behind what was sent.
    """
    partial = path.with_name(path.name + ".partial")
    tensors = {name: t.detach().cpu().contiguous() for name, t in own.tensors.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(tensors, partial, {_META_KEY: msgspec.json.encode(own.about).decode()})
        partial.replace(path)
    except (OSError, safetensors.SafetensorError) as error:
        for left in (partial, path):
            left.unlink(missing_ok=True)
        raise OSError(f"{path}: {error}") from None


def read(path: Path, method: Method, num_elements: list[int]) -> Own:
    """What the last process kept, its digests checked; else `problem` says missing or damaged.

    Args:
        num_elements: of each fragment.
    """
    if not path.exists():
        return Own(about=OwnState(problem=MISSING), tensors={})
    try:
        with safetensors.safe_open(path, "pt") as file:
            about = msgspec.json.decode(file.metadata()[_META_KEY], type=OwnState)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError):
        return Own(about=OwnState(problem=DAMAGED), tensors={})
    return checked(Own(about=about, tensors=tensors), method, num_elements)
