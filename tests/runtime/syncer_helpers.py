"""A syncer on a thread of its own, and learners of this process that join it."""

import asyncio
import threading
import time

import torch

import farflung as ff
from farflung.protocol.syncer import SyncerMachine
from farflung.runtime import server
from farflung.runtime.syncer import SyncerDriver

TOKEN = "open-sesame"
POLICY = {"num_fragments": 2, "sync_every_steps": 4, "overlap_steps": 1, "lease_s": 60.0}


class Syncer:
    """As if it were on another machine.

    Args:
        budget_tokens: of the run.
        method: None: decoupled, with `policy`.
        num_learners: that it expects.
    """

    url = "http://127.0.0.1:1"  # until it listens, which is never without `with`

    def __init__(self, budget_tokens: int, method=None, num_learners: int = 1, **policy) -> None:
        self.method = method or ff.methods.decoupled(**{**POLICY, **policy})
        self._budget_tokens, self._num_learners = budget_tokens, num_learners
        self._listening = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.machine = SyncerMachine(
            self.method.policy, run="run-1", num_learners=self._num_learners,
            budget_tokens=self._budget_tokens,
        )  # fmt: skip
        self.driver = SyncerDriver(self.method, self.machine, time.monotonic, None)
        runner, port = await server.start(self.driver.application(TOKEN), "127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        self._listening.set()
        await self._stop.wait()
        await runner.cleanup()
        self.driver.close()

    def __enter__(self) -> "Syncer":
        self._thread.start()
        self._listening.wait()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End it; repeats do nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def learner(self, model, optimizer=None, **options) -> ff.Learner:
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"connect": self.url, "token": TOKEN, "name": "ada", **options}
        return ff.Learner(model, optimizer, self.method, **options)
