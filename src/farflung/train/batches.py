"""Batches drawn at random from one learner's part of the data, whose position is one integer."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farflung.errors import UserError

_MAX_KEY = 2**64  # Philox keys are 64-bit words


class ShardBatches:
    """Endless random batches from one shard; the whole state is ``cursor``, the number of batches drawn.

    Batch n is a function of (seed, learner_index, n) alone: Philox, a counter-based generator, is keyed by
    the first two and set to the third. So seeking is free and a resumed run sees exactly what it would have.
    The raw 64-bit words are used, because numpy promises no stable stream above them. Draws are independent:
    a position may come twice before another has come once.

    Args:
        gather: makes a batch of positions in the shard, int64 [batch_size].
        num_positions: positions are below it; at least 1.
        batch_size: positions in a batch.
        seed: at least 0.
        learner_index: keeps learners with equal seeds apart.
    """

    def __init__(
        self,
        gather: Callable[[Tensor], Any],
        num_positions: int,
        batch_size: int,
        seed: int,
        learner_index: int = 0,
    ) -> None:
        self._gather = gather
        self._num_positions = num_positions
        self._batch_size = batch_size
        self._key = np.array([seed % _MAX_KEY, learner_index], dtype=np.uint64)
        self._cursor = 0

    @property
    def cursor(self) -> int:
        """The number of batches drawn so far."""
        return self._cursor

    def seek(self, cursor: int) -> None:
        """Continue as if ``cursor`` batches had been drawn."""
        if cursor < 0:
            raise UserError(f"data cursor = {cursor}: give a number of batches of at least 0")
        self._cursor = int(cursor)

    def __iter__(self) -> "ShardBatches":
        return self

    def __next__(self) -> Any:
        """Return the next batch; there is always one."""
        counter = np.array([0, 0, 0, self._cursor], dtype=np.uint64)
        words_B = np.random.Philox(key=self._key, counter=counter).random_raw(self._batch_size)
        positions_B = torch.from_numpy((words_B % np.uint64(self._num_positions)).astype(np.int64))
        self._cursor += 1
        return self._gather(positions_B)

    def state_dict(self) -> dict[str, int]:
        """Return ``{"position": cursor}``."""
        return {"position": self._cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Seek to a position that ``state_dict`` gave."""
        self.seek(state["position"])


def check_learner(learner_index: int, num_learners: int) -> None:
    """Raise UserError unless there is a shard of this index."""
    if not 0 <= learner_index < num_learners:
        raise UserError(
            f"learner_index = {learner_index} of num_learners = {num_learners}: indices start at 0"
        )
