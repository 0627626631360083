"""Train one model on far-flung, unreliable machines.

>>> import farflung as ff
>>> ff.methods.decoupled(num_fragments=6).policy.overlap_steps
2
"""

from typing import Any

__version__ = "0.1.0"
__all__ = ["Learner", "RunEnded", "methods"]


def __getattr__(name: str) -> Any:
    """Import on first use: the sidecar must not pay for torch."""
    if name in ("Learner", "RunEnded"):
        from farflung.runtime import face

        return getattr(face, name)
    if name == "methods":
        import importlib

        return importlib.import_module("farflung.methods")
    raise AttributeError(f"module 'farflung' has no attribute {name!r}")
