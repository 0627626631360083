"""Python's cycle collector, seldom: hundreds of machines and trainers are many objects, and live long."""

import contextlib
import gc
from collections.abc import Iterator

SELDOM = (50_000, 20, 20)  # thresholds of the three generations; Python's are 700, 10, 10 (or alike)


@contextlib.contextmanager
def collected_seldom() -> Iterator[None]:
    """Within, cycles are looked for seldom; afterwards as before."""
    before = gc.get_threshold()
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)
