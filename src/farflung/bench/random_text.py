"""A text that any installation has: random letters. Speed does not depend on what it says."""

from pathlib import Path

import torch

TEXT_BYTES = 1_000_000


def random_text(folder: Path) -> Path:
    """Write it, always the same, and return its path."""
    path = folder / "letters.txt"
    letters = torch.randint(97, 123, (TEXT_BYTES,), generator=torch.Generator().manual_seed(0))
    path.write_bytes(bytes(letters.tolist()))
    return path
