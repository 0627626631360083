"""Downlink increments: a version as its difference from the one before, encoded, in place of the whole value.

    e_t <- (Theta'_t - Theta_{t-1}) + e_{t-1}          Theta'_t: what the outer step makes of Theta_{t-1}
    q_t  = encode(e_t)
    Theta_t = Theta_{t-1} + decode(q_t)                what the hub adopts itself
    e_t <- e_t - decode(q_t)                           carried to the next version

So hub and learners hold equal bits whatever the codec cuts off, and what it cuts off arrives later (error
feedback on the decoded increment, as at the learners). On the wire increments lie one behind the other, each in
the layout of a payload; buffers and counters of the last one count.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from farflung.core.codecs import Codec
from farflung.core.fragments import Fragment, TensorSpec
from farflung.engine.buffers import Buffer, Pool
from farflung.engine.layout import Layout, Sections, codec_of, in_round, payload_layout, put


class Increments:
    """One fragment's increments: their format, at hub and learner alike.

    Args:
        fragment: what they are increments of.
        codec: the run's downlink codec.
        tensors: the plan's.
    """

    def __init__(self, fragment: Fragment, codec: Codec, tensors: Sequence[TensorSpec]) -> None:
        self._num_elements = fragment.num_elements
        self._codec = codec_of(fragment, codec, tensors)
        self.layout: Layout = payload_layout(fragment, self._codec)

    @property
    def size_bytes(self) -> int:
        """Bytes of one increment."""
        return self.layout.size_bytes

    def encode(self, change: Tensor, version: int, out: Tensor) -> Tensor:
        """Encode the step to a version into ``out``, uint8; returns what it decodes to, fp32 ``[N]``."""
        codec = in_round(self._codec, version)
        codec.encode(change, out=out)
        return codec.decode(out, self._num_elements)

    def add_to(self, base: Tensor, raw: Tensor, base_version: int, version: int) -> tuple[Tensor, Sections]:
        """Go from one version to another.

        Args:
            base: parameters of `base_version`, fp32 ``[N]``.
            raw: the increments between, uint8; what lies behind them is ignored.

        Returns:
            The parameters of `version`, and the sections of its increment, whose buffers and counters are its own.
        """
        value = base
        for number, at in enumerate(range(base_version + 1, version + 1)):
            start = number * self.size_bytes
            last = self.layout.split(raw[start : start + self.size_bytes])
            step = in_round(self._codec, at).decode(last.params, self._num_elements)
            value = value + step.to(base.device)
        return value, last


class IncrementLog:
    """The hub's side of a fragment: makes increments, keeps those of the versions that are kept.

    Args:
        increments: the format.
        pool: where buffers come from.
    """

    def __init__(self, increments: Increments, pool: Pool) -> None:
        self._increments, self._pool = increments, pool
        self._kept: dict[int, Buffer] = {}
        self.unsent: Tensor | None = None
        """What the codec has cut off so far, e; None before the first increment."""

    def advance(self, version: int, present: Tensor, new: Tensor, buffers: Tensor, counters: Tensor) -> bool:
        """Make the increment to a version, and turn ``new`` into what it leads to.

        Args:
            present, new: parameters before and after the outer step, fp32 ``[N]``; ``new`` is written.
            buffers, counters: the new version's.

        Returns:
            Whether the parameters are still finite; if not there is no increment, and nothing is carried over.
        """
        change = new - present if self.unsent is None else (new - present).add_(self.unsent)
        buffer = self._pool.take(self._increments.size_bytes)
        sections = self._increments.layout.split(buffer.raw)
        decoded = self._increments.encode(change, version, sections.params)
        put(sections.buffers, buffers)
        put(sections.counters, counters)
        torch.add(present, decoded, out=new)
        if not bool(torch.isfinite(new).all()):
            self._pool.give(buffer)
            return False
        self.unsent = change.sub_(decoded)
        self._kept[version] = buffer
        return True

    def read(self, base_version: int, version: int) -> memoryview:
        """The increments between two versions, read-only.

        Raises:
            KeyError: one of them is not kept (any more).
        """
        parts = [self._kept[at].lend() for at in range(base_version + 1, version + 1)]
        if len(parts) == 1:
            return parts[0].data.toreadonly()
        return np.concatenate(parts).data.toreadonly()

    @property
    def size_bytes(self) -> int:
        """Bytes of one increment."""
        return self._increments.size_bytes

    def retire(self, version: int) -> None:
        """Forget the step to a version; unknown ones are fine."""
        buffer = self._kept.pop(version, None)
        if buffer is not None:
            self._pool.give(buffer)

    def clear(self) -> None:
        """Begin anew: whoever holds a version from before gets the whole value."""
        for version in list(self._kept):
            self.retire(version)
        self.unsent = None
