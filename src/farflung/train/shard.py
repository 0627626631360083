"""What a driver of a built-in task needs beside the loop: the learner's own data, and the schedule's own state."""

from typing import Any

from farflung.train.base import Batches, Task
from farflung.train.loop import InnerLoop


class Shard:
    """A learner's part of the data, opened when the syncer has said which one it is."""

    def __init__(self, task: Task, num_learners: int) -> None:
        self._task, self._num_learners = task, num_learners
        self._batches: Batches | None = None
        self._cursor = 0

    def open(self, index: int) -> None:
        """Use shard `index`; repeats change nothing."""
        if self._batches is not None:
            return
        self._batches = self._task.build_batches(index % self._num_learners, self._num_learners)
        self._batches.seek(self._cursor)

    @property
    def cursor(self) -> int:
        return self._batches.cursor if self._batches is not None else self._cursor

    def seek(self, cursor: int) -> None:
        self._cursor = cursor
        if self._batches is not None:
            self._batches.seek(cursor)

    def __next__(self) -> Any:
        assert self._batches is not None, "open the shard first"
        return next(self._batches)


class OwnSteps:
    """The schedule's own state: steps of this lineage of inner state, handed on by a donor."""

    def __init__(self, loop: InnerLoop) -> None:
        self._loop = loop

    def state_dict(self) -> dict[str, Any]:
        return {"own_steps": self._loop.own_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loop.own_steps = int(state["own_steps"])
