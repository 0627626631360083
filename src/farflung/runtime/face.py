"""`farflung.Learner`: one island in three lines of anybody's training loop.

It starts the sidecar, gives it the model's shape and waits for the first parameters. From then on `step` is the
boundary between two inner steps: it looks at the mailbox, executes what is due, reports, and never waits for
the network (in lockstep pace it waits for the round, as that pace demands).
"""

import contextlib
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import torch
from torch import nn

from farflung.core.fragments import FragmentPlan, make_plan
from farflung.core.vectors import describe
from farflung.engine.make import increment_sizes, make_island, offer_sizes, slot_sizes
from farflung.engine.own_state import Own, own_names
from farflung.engine.trainer import Trainer
from farflung.errors import UserError
from farflung.ipc.arena import Arena
from farflung.ipc.channel import PeerGone
from farflung.methods import Method
from farflung.protocol import mailbox as box
from farflung.protocol.meeting import MAX_PARTNERS
from farflung.protocol.own_state import MISSING, OwnState
from farflung.recipe import LEARNER_NAME
from farflung.runtime import listen as listening
from farflung.runtime import ownfile, savefile
from farflung.runtime.security import check_token, client_context
from farflung.runtime.sidecar_config import SidecarConfig
from farflung.runtime.sidecar_process import SidecarProcess
from farflung.train.inner import ModelInner

Batch = TypeVar("Batch")
CONNECT_S = 30.0  # people start learners before the syncer, but not much before
REASON = 200  # characters of an exception that a learner leaves with
LOOP_ENDED = "the loop ended"
WAIT_S = 0.5  # between looks at the mailbox while there is nothing to do
TOKEN_VARIABLE = "FARFLUNG_TOKEN"


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class Data(Protocol):
    """A data position that the hub keeps for this learner: it is the learner's own, never a donor's."""

    @property
    def cursor(self) -> int: ...

    def seek(self, cursor: int) -> None: ...


class RunEnded(Exception):
    """The run does not want this learner: `reason` says why."""


class Learner:
    """A learner of a run, around a model and an optimizer of your own.

    Args:
        model: any module; trainable parameters are shared by name, BatchNorm buffers too.
        optimizer: the inner optimizer; its state stays here, and helps a learner that lost its own.
        method: the run's method, such as ``farflung.methods.decoupled()``; all learners give the same.
        connect: the syncer's address, ``http://host:port`` or ``https://...``.
        token: the join token; None reads FARFLUNG_TOKEN.
        name: unique in the run, and the same after a restart: it owns the data position.
        run: refuse any other run.
        data: the data position (``cursor``, ``seek``); without it steps are counted.
        stateful: objects with ``state_dict`` / ``load_state_dict`` of JSON-able values (a schedule, counters) that
            belong to the inner state: saved, and handed to a learner that rejoins.
        save_dir: where an orderly stop writes this learner's state, and where a restart finds it. A method with
            own state (a residual, a momentum) is kept there too, once a round, for a restart after a crash.
        tape_path: where the sidecar writes its tape.
        pace_s: least seconds of a step.
        connect_within_s: give up when nobody answers the first call for so long; None: never. A syncer that was
            reached once may be away for any time.
        ca, cert, key: TLS files.
        listen: gossip: HOST:PORT where partners may dial this learner (port 0: any), with TLS if there is `cert`.
            None: on loopback if the syncer is there, else nowhere; "off": nowhere. Who cannot be dialled is
            reached through the syncer, at its cost.
        advertise: gossip: HOST or HOST:PORT that partners dial, where that is not what is listened on.
        insecure: gossip: listen beyond loopback without TLS.

    Raises:
        UserError: bad name, token, address or TLS file.
        ValueError: the model cannot be laid out in the method's fragments.
        RunEnded: the syncer refused this learner, or nobody answered.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        method: Method,
        *,
        connect: str,
        token: str | None = None,
        name: str | None = None,
        run: str | None = None,
        data: Data | None = None,
        stateful: Mapping[str, Stateful] | None = None,
        save_dir: str | os.PathLike[str] | None = None,
        tape_path: str | os.PathLike[str] | None = None,
        started_s: float | None = None,
        pace_s: float = 0.0,
        connect_within_s: float | None = CONNECT_S,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        listen: str | None = None,
        advertise: str | None = None,
        insecure: bool = False,
    ) -> None:
        self.name = name or f"{socket.gethostname().replace('.', '-')}-{os.getpid()}"
        if not LEARNER_NAME.fullmatch(self.name):
            raise UserError(f"name = {self.name!r}: use letters, digits, '_' and '-', at most 64")
        token = token or os.environ.get(TOKEN_VARIABLE)
        if not token:
            raise UserError(f"no join token: give token=..., or set {TOKEN_VARIABLE}")
        check_token(token, "join token")
        check_url(connect)
        if connect.startswith("https"):
            client_context(ca, cert, key)  # a wrong file shows here, not in the sidecar
        policy = method.policy
        listens = None
        if policy.topology == "gossip":
            listens = listening.choose(listen, advertise, hub=connect, cert=cert, key=key, insecure=insecure)
        elif listen is not None or advertise is not None:
            raise UserError(f"listen and advertise have no effect on {policy.method}: it has no partners")
        self.plan = make_plan(describe(model), policy.num_fragments, policy.fragment_plan)
        self._method, self._model, self._run = method, model, run
        self._inner = ModelInner(model, optimizer, data, dict(stateful or {}))
        self._workdir = tempfile.TemporaryDirectory(prefix="farflung-")
        self._state_path = Path(self._workdir.name) / "state"
        self._save_path = Path(save_dir) / f"{self.name}.safetensors" if save_dir is not None else None
        self._own_path = Path(save_dir) / f"{self.name}.own.safetensors" if save_dir is not None else None
        slots: dict[str, list[torch.Tensor]] = {"up": [], "down": []}
        self._island, its_inner = make_island(
            model, self.plan, method, lambda p: slots["up"][p], lambda p: slots["down"][p], self._inner
        )
        uplink, downlink = _arenas(self.plan, method)
        for arena, views in ((uplink, slots["up"]), (downlink, slots["down"])):
            views += [_tensor(arena.slot(p)) for p in range(len(arena.sizes))]
        self.trainer = Trainer(
            self._island,
            its_inner,
            put_state=self._put_state,
            get_state=self._state_path.read_bytes,
            save=self._save,
            keep=self._keep if self._own_path is not None else None,
        )
        self._pace_s = pace_s
        config = SidecarConfig(
            url=connect.rstrip("/"), token=token, learner=self.name, policy=policy, run=run,
            channel_fd=-1, uplink_fd=-1, uplink_sizes=[], downlink_fd=-1, downlink_sizes=[],
            increment_sizes=increment_sizes(self.plan, method),
            offer_sizes=offer_sizes(self.plan, method) if policy.topology == "gossip" else [],
            state_path=str(self._state_path), connect_within_s=connect_within_s,
            tape_path=os.fspath(tape_path) if tape_path else None,
            started_s=time.monotonic() if started_s is None else started_s, ca=ca, cert=cert, key=key,
            listen=listens,
        )  # fmt: skip
        self._sidecar = SidecarProcess(config, uplink, downlink)
        ready = self._restore()
        self._sidecar.start(ready)
        try:
            self._first_parameters()
        except BaseException as error:
            self.close(why_left(error))
            raise
        self._step_began = time.perf_counter()
        self._waited_s = 0.0
        self._progress_tokens = 0  # what `progress` was last read as

    # ---- what a loop reads ---------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether the loop should stop: the run's budget is spent, or it was stopped."""
        return self.trainer.ended is not None

    @property
    def end_reason(self) -> str | None:
        """Why it is done: finished, suspended, fenced, or one line of refusal."""
        return self.trainer.ended

    @property
    def progress(self) -> float:
        """Share of the whole run's token budget that is spent, 0..1: what schedules should follow."""
        self._progress_tokens = self.trainer.progress.tokens
        return self.trainer.progress.fraction

    @property
    def index(self) -> int:
        """This learner's number among all learners ever seen, from 0."""
        return self.trainer.begun.index if self.trainer.begun is not None else 0

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Pass batches on, starting over when the loader is exhausted, until the run is done."""
        while not self.done:
            empty = True
            for batch in loader:
                empty = False
                yield batch
                if self.done:
                    return
            if empty:
                raise UserError("batches(loader): the loader is empty")

    # ---- the boundary --------------------------------------------------------------------------------

    def step(self, num_tokens: int, loss: float | None = None) -> None:
        """Call after each optimizer step, with the tokens it trained on."""
        took_s = time.perf_counter() - self._step_began
        if took_s < self._pace_s:
            time.sleep(self._pace_s - took_s)
            took_s = time.perf_counter() - self._step_began
        self._inner.count_step()
        self._look()
        self.trainer.stepped(
            num_tokens, step_s=took_s, wait_s=self._waited_s, loss=loss, progress_tokens=self._progress_tokens
        )
        self._speak()
        self._waited_s = self._wait()
        self._step_began = time.perf_counter()

    def restart_clock(self) -> None:
        """Call after work between two steps that is no training (an evaluation): it does not count as a step."""
        self._step_began = time.perf_counter()

    def close(self, reason: str = LOOP_ENDED) -> None:
        """Leave the run, if it is not over, and end the sidecar; others are told `reason`."""
        if self.end_reason == "finished" and self._own_path is not None:
            self._own_path.unlink(missing_ok=True)
        self._sidecar.close(None if self.done else box.Ended(reason=reason))
        self._workdir.cleanup()

    def __enter__(self) -> "Learner":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(why_left(error))

    # ---- mailbox -------------------------------------------------------------------------------------

    def _look(self, timeout_s: float = 0.0) -> None:
        """Take the commands that are there; a sidecar that died is replaced and told where we are."""
        try:
            channel = self._sidecar.channel
            commands = channel.wait(timeout_s) if timeout_s else channel.poll()
        except PeerGone:
            if not self.done:
                self._replace_sidecar()
            return
        for command in commands:
            self.trainer.take(command)

    def _speak(self) -> None:
        reports, self.trainer.reports = self.trainer.reports, []
        for report in reports:
            with contextlib.suppress(PeerGone):
                self._sidecar.channel.send(report)

    def _wait(self) -> float:
        """Stand at the boundary until the next step may begin. Returns the seconds waited."""
        began_s = time.perf_counter()
        while not self.trainer.may_step()[0] and not self.done:
            self._look(WAIT_S)
            self.trainer.idle(time.perf_counter() - began_s)
            self._speak()
        return time.perf_counter() - began_s

    def _first_parameters(self) -> None:
        self._wait()
        if self.done and not self.trainer.installed:
            raise RunEnded(self.end_reason or "")

    # ---- sidecar -------------------------------------------------------------------------------------

    def _ready(self, run: str | None = None, incarnation: int | None = None, saved: str = "") -> box.Ready:
        found = self.trainer.found.about if self.trainer.found is not None else OwnState(problem=MISSING)
        return box.Ready(
            learner=self.name, fingerprint=self.plan.fingerprint(), layout=self.plan.to_json(),
            method=f"{self._method.policy.method}:{self._method.policy.digest()}", run=run or self._run,
            incarnation=incarnation, held=self._island.versions, step=self._island.step,
            sequence=self.trainer.sequence, outstanding=self._island.outstanding(),
            recent=list(self.trainer.recent), worked=self._island.counters(0)[0],
            own=found if own_names(self._method) else None, saved=saved,
        )  # fmt: skip

    def _replace_sidecar(self) -> None:
        """The network stack crashed; training did not. A new one takes over where the old one was."""
        self._sidecar.bury()
        begun = self.trainer.begun
        installed = self.trainer.installed and begun is not None
        self._island.drop_queue()
        self._hold("the sidecar starts again")
        self._sidecar.start(
            self._ready(begun.run, begun.incarnation) if installed and begun else self._ready()
        )

    def _hold(self, reason: str) -> None:
        """No further step until a machine has posted what comes next; in free pace with a hub that is anything."""
        policy = self._method.policy
        if policy.pace == "lockstep" or policy.topology == "gossip":
            self._island.post(box.RunUntil(step=self._island.step, reason=reason))

    def _put_state(self, state: bytes) -> None:
        self._state_path.write_bytes(state)

    # ---- orderly stop and resume ---------------------------------------------------------------------

    def _save(self) -> str | None:
        if self._save_path is None or self.trainer.begun is None:
            return None
        return savefile.write(self._save_path, self._model, self._island, self._inner, self.trainer)

    def _keep(self, own: Own) -> None:
        assert self._own_path is not None
        try:
            ownfile.write(self._own_path, own)
        except OSError as error:  # training goes on; a crash now costs what was not sent
            self.trainer.reports.append(box.KeepFailed(reason=str(error)))

    def _find_own(self) -> None:
        """What a process before this one kept, if it did not stop in order."""
        if self._own_path is not None and own_names(self._method):
            num_elements = [fragment.num_elements for fragment in self.plan.fragments]
            self.trainer.found = ownfile.read(self._own_path, self._method, num_elements)

    def _restore(self) -> box.Ready:
        if self._save_path is None or not self._save_path.exists():
            self._find_own()
            return self._ready()
        try:
            saved = savefile.read(self._save_path, self._model, self._island, self._inner, self.trainer)
        except savefile.Damaged as error:  # as a new process, which claims no incarnation
            print(
                f"{self.name}: {error}: it rejoins from the syncer and a donor", file=sys.stderr, flush=True
            )
            savefile.set_aside(self._save_path)
            self._find_own()
            return self._ready()
        self._waited_s = 0.0
        self._save_path.unlink()  # it is true for this start only
        self._hold("resuming")
        return self._ready(saved.run, saved.incarnation, saved.digest)


def why_left(error: BaseException | None) -> str:
    """What others are told of a learner that leaves before the run is over: one line.

    >>> why_left(None), why_left(KeyboardInterrupt())
    ('the loop ended', 'interrupted')
    >>> why_left(ZeroDivisionError("division by zero"))
    'failed: ZeroDivisionError: division by zero'
    """
    if error is None:
        return LOOP_ENDED
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    text = f"failed: {type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
    return text if len(text) <= REASON else f"{text[: REASON - 3]}..."


def check_url(url: str) -> None:
    """UserError for an address that cannot be dialled.

    >>> check_url("http://127.0.0.1:7070")
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise UserError(
            f"connect = {url!r}: write http://HOST:PORT or https://HOST:PORT, as `serve` printed it"
        )


def _arenas(plan: FragmentPlan, method: Method) -> tuple[Arena, Arena]:
    """Memory for what goes up and down. Of a gossip learner's slots few are ever written; others cost nothing."""
    up, down = slot_sizes(plan, method)
    gossip = method.policy.topology == "gossip"
    num_up = 2 if gossip else plan.num_fragments
    num_down = 1 + 2 * MAX_PARTNERS if gossip else plan.num_fragments
    return Arena([up(p) for p in range(num_up)]), Arena([down(p) for p in range(num_down)])


def _tensor(view: memoryview) -> torch.Tensor:
    return torch.frombuffer(view, dtype=torch.uint8) if len(view) else torch.empty(0, dtype=torch.uint8)


__all__ = ["Learner", "RunEnded"]
