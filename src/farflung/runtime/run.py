"""`farflung run`: a syncer and its learners as local processes, watched, broken on purpose, and put back.

The supervisor starts, restarts and ends processes; it takes no part in training and decides nothing about it.
"""

import asyncio
import contextlib
import json
import secrets
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from farflung import tape
from farflung.chaos.plan import LINK, Fault, check_for_run
from farflung.config import RunConfig, read_config, resolve, write_config
from farflung.errors import UserError
from farflung.recipe import Recipe
from farflung.runtime import checkpoint, faulty, processes, savefile
from farflung.runtime.client import HubClient
from farflung.runtime.faults import Faults
from farflung.runtime.processes import Child
from farflung.runtime.security import client_context, new_token
from farflung.runtime.serve import SYNCER, WORKERS, check_serve
from farflung.runtime.transport import TransportError

POLL_S = 0.25
ORDERS = "chaos"  # folder of what the sidecars' transport was told to do
SAVE_S = 2.0  # for the learners to save after Ctrl-C
STOP_S = 3.0  # for an orderly stop after Ctrl-C; what still runs is killed then
START_S = 60.0  # for the syncer to listen
UNWELCOME = 2  # exit code of an island that must not be started again
RESTARTS = 20  # of one learner in a run; beyond that something is wrong that a restart cannot mend
BARREN = 3  # deaths in a row without a finished step between: a restart will not mend that either
WORDS = 200  # characters of a learner's last line that a note repeats


def new_run_dir(out: Path) -> None:
    """Create a run folder. UserError when a run is there already."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: already exists; choose another --out, or --resume it")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out}: cannot be created: {error.strerror}") from None


class Supervisor:
    """One run on this machine.

    Args:
        config: resolved.
        run_dir: its folder; config.json lies there.
        resume: go on from the folder's checkpoint.
        show: called with each status, several times a second.
    """

    def __init__(
        self, config: RunConfig, run_dir: Path, *, resume: bool, show: Callable[[dict[str, Any]], None]
    ) -> None:
        self.config, self.run_dir, self.resume, self._show = config, run_dir, resume, show
        self.token = new_token()
        self.url = ""
        self.interrupted = False
        self.evals: list[dict[str, Any]] = []
        self._syncer: Child | None = None
        self._evaluator: Child | None = None
        self._islands: dict[str, Child] = {}
        self._starts: dict[str, int] = {}
        self._segments: dict[str, Path] = {}  # of the newest start
        self._log_starts: dict[str, int] = {}  # where the newest start's lines begin in its log
        self._unread = set(config.recipe.learners()) if resume else set()  # may yet tell of a damaged save
        self._lost: set[str] = set()  # learners that are not started again
        self._outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._evaluated = asyncio.Event()
        self._metrics = (run_dir / tape.METRICS).open("a")
        self._plan = [] if resume else config.recipe.plan()
        self._faults = Faults(self._plan, self._islands.get, self._record_fault, self._order)
        self._first_step_s: float | None = None
        self._wishes = 0
        self._own_notes: list[dict[str, Any]] = []

    async def run(self) -> str:
        """Run to the end; returns finished, suspended or interrupted."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        try:
            await self._start()
            watchers = [asyncio.create_task(self._keep(name)) for name in self.config.recipe.learners()]
            watchers.append(asyncio.create_task(self._watch()))
            try:
                outcome = await self._first_of(watchers)
            finally:
                for watcher in watchers:
                    watcher.cancel()
            if outcome == "finished":
                await self._evaluate_model()
            return outcome
        finally:
            await self._end_all()
            self._metrics.close()

    async def _first_of(self, watchers: list[asyncio.Task[None]]) -> str:
        """The outcome; or the error of a watcher, which is a defect."""
        for watcher in watchers:
            watcher.add_done_callback(self._watcher_done)
        return await self._outcome

    def _watcher_done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._outcome.done():
            self._outcome.set_exception(error)

    # ---- starting ------------------------------------------------------------------------------------

    async def _start(self) -> None:
        args = [str(self.run_dir), "--stop-within-s", str(SAVE_S), *(["--resume"] if self.resume else [])]
        self._syncer = await processes.start(
            "syncer", "farflung.runtime.serve", *args, log=self._log("syncer"), token=self.token,
            on_line=self._syncer_said,
        )  # fmt: skip
        exited = asyncio.create_task(self._syncer.process.wait())
        exited.add_done_callback(self._syncer_gone)
        try:
            self.url = await asyncio.wait_for(self._listening, START_S)
        except TimeoutError:
            raise UserError(
                f"the syncer did not start within {START_S:.0f} s: see {self._log('syncer')}"
            ) from None
        for name in self.config.recipe.learners():
            await self._start_island(name)
        skip = ["--skip-first"] if self.resume else []
        self._evaluator = await processes.start(
            "evaluator", "farflung.runtime.evaluator", str(self.run_dir), "--connect", self.url, *skip,
            log=self._log("evaluator"), token=self.token, on_line=self._evaluator_said,
        )  # fmt: skip

    async def _start_island(self, name: str) -> Child:
        segment = self._segments[name] = tape.free_segment(self.run_dir, name)
        log = self._log(name)
        self._log_starts[name] = log.stat().st_size if log.exists() else 0
        child = self._islands[name] = await processes.start(
            name, "farflung.runtime.island", str(self.run_dir), "--name", name, "--connect", self.url,
            "--tape", str(segment), "--save-dir", str(self.run_dir / tape.CHECKPOINTS),
            log=log, token=self.token, more_env=self._weather(name),
        )  # fmt: skip
        self._starts[name] = self._starts.get(name, 0) + 1
        self._record("process", learner=name, event="started" if self._starts[name] == 1 else "restarted")
        return child

    def _orders(self, name: str) -> Path:
        return self.run_dir.resolve() / ORDERS / f"{name}.jsonl"

    def _order(self, fault: Fault) -> None:
        faulty.order(self._orders(fault.target), fault, self.config.clock())

    def _weather(self, name: str) -> dict[str, str]:
        """Only who has link faults before it looks for orders."""
        planned = any(f.target == name and f.kind in LINK for f in self._plan)
        return {faulty.CHAOS_VARIABLE: str(self._orders(name))} if planned else {}

    async def _keep(self, name: str) -> None:
        """Start a learner again whenever it dies, as long as the run wants it and it gets anywhere."""
        barren = 0
        while True:
            code = await self._islands[name].process.wait()
            self._islands[name].signal(signal.SIGKILL)  # a sidecar may have outlived its trainer
            self._record("process", learner=name, event="exited", code=code)
            if code in (0, UNWELCOME) or self._outcome.done() or self.interrupted:
                if code == UNWELCOME:
                    self._give_up_on(name, f"cannot take part: {self._last_words(name) or 'no reason given'}")
                return
            if self._starts[name] > RESTARTS:
                self._give_up_on(name, f"died {RESTARTS} times: given up, see {self._log(name)}")
                return
            why = self._last_words(name)
            if self._has_stepped(name):
                barren = 0
            elif code != -signal.SIGKILL:  # that came from outside
                barren += 1
            if barren >= BARREN:
                reason = f"died {BARREN} times in a row without a finished step{in_brackets(why)}"
                self._give_up_on(name, f"{reason}: given up, see {self._log(name)}")
                return
            self._note(f"{name} exited with code {code}{in_brackets(why)}; starting it again")
            await asyncio.sleep(self.config.recipe.restart_s)
            await self._start_island(name)

    def _last_words(self, name: str) -> str:
        """The last line that the newest process of a learner wrote."""
        return last_line(self._log(name), self._log_starts[name])[:WORDS]

    def _has_stepped(self, name: str) -> bool:
        """Whether the newest process of a learner finished a step: then its tape has a report of one."""
        segment = self._segments[name]
        return any(map(has_step, [segment, *segment.parent.glob(f"{segment.stem}.*.jsonl")]))

    def _tell_damage(self, status: dict[str, Any]) -> None:
        """After a resume: show what a learner says of a save file that it cannot read."""
        for name in sorted(self._unread):
            for line in lines_of(self._log(name), self._log_starts[name]):
                if savefile.IS_DAMAGED in line:
                    self._unread.discard(name)
                    self._note(line)
        self._unread -= {m["name"] for m in status["learners"] if m["state"] == "training"}

    def _give_up_on(self, name: str, why: str) -> None:
        """Go on without a learner; without any, there is nothing to go on with."""
        self._note(f"{name} {why}")
        self._lost.add(name)
        if len(self._lost) == len(self._islands) and not self._outcome.done():
            self._outcome.set_exception(UserError(f"no learner is left: {name} {why}"))

    # ---- watching ------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Poll the syncer: show, evaluate, break things when their time has come."""
        tls = client_context(self.config.recipe.serve.ca) if self.url.startswith("https") else None
        async with HubClient(self.url, self.token, self.config.run, tls, backoff_s=()) as client:
            while True:
                with contextlib.suppress(TransportError):
                    status = await client.call("GET", "/status")
                    self._see(status)
                await asyncio.sleep(POLL_S)

    def _see(self, status: dict[str, Any]) -> None:
        progress = status["tokens"] / status["budget_tokens"]
        if status["tokens"] and self._first_step_s is None:
            self._first_step_s = time.monotonic()
        since_s = 0.0 if self._first_step_s is None else time.monotonic() - self._first_step_s
        if self._first_step_s is not None and status["phase"] == "training":
            self._faults.review(progress, since_s)
        if self.config.recipe.evals and status["phase"] == "training":
            due = self._evals_due(progress, status)
            if due > self._wishes:
                self._wishes = due
                self._wish("now")
        self._tell_damage(status)
        notes = sorted([*status["notes"], *self._own_notes], key=lambda n: n["t"])
        self._show({**status, "evals": self.evals, "eval": self.evals, "notes": notes})

    def _evals_due(self, progress: float, status: dict[str, Any]) -> int:
        """How many evaluations of global parameters were due so far: with gossip, one a consensus average."""
        if status["gossip"] is not None:
            return int(status["gossip"]["version"])
        return int(progress * (self.config.recipe.evals + 1))

    def _wish(self, line: str) -> None:
        if self._evaluator is not None and self._evaluator.process.stdin is not None:
            with contextlib.suppress(ConnectionError, RuntimeError):
                self._evaluator.process.stdin.write(f"{line}\n".encode())

    async def _evaluate_model(self) -> None:
        """The final figure is that of the file that is left behind."""
        summary = json.loads((self.run_dir / SYNCER).read_bytes())
        tokens = summary.get("tokens_trained", self.config.budget_tokens)
        self._evaluated.clear()
        workers = self.run_dir / WORKERS
        gossip = self.config.policy.topology == "gossip"
        self._wish(f"{self.run_dir / tape.MODEL}\t{tokens}" + (f"\t{workers}" if gossip else ""))
        if self._evaluator is not None and self._evaluator.running:
            gone = asyncio.create_task(self._evaluator.process.wait())
            final = asyncio.create_task(self._final_eval())
            await asyncio.wait([gone, final], return_when=asyncio.FIRST_COMPLETED)
            final.cancel()
            gone.cancel()
        shutil.rmtree(workers, ignore_errors=True)

    async def _final_eval(self) -> None:
        while not any(record["tokens"] and not record["versions"] for record in self.evals):
            self._evaluated.clear()
            await self._evaluated.wait()

    # ---- what children say ---------------------------------------------------------------------------

    def _syncer_said(self, line: str) -> None:
        said = json.loads(line)
        if "url" in said and not self._listening.done():
            self._listening.set_result(said["url"])
        elif "error" in said and not self._listening.done():
            self._listening.set_exception(UserError(said["error"]))
        elif "finished" in said and not self._outcome.done():
            self._outcome.set_result(said["finished"])

    def _syncer_gone(self, task: "asyncio.Task[int]") -> None:
        if task.cancelled():
            return
        error = RuntimeError(f"the syncer exited with code {task.result()}: see {self._log('syncer')}")
        loop = asyncio.get_running_loop()
        loop.call_later(0.5, self._fail, error)  # after its last words were read

    def _fail(self, error: Exception) -> None:
        for future in (self._listening, self._outcome):
            if not future.done():
                if self.interrupted:
                    future.set_result("interrupted")
                else:
                    future.set_exception(error)
                    future.exception()  # whoever still waits for it raises it

    def _evaluator_said(self, line: str) -> None:
        record = json.loads(line)
        self.evals.append(record)
        self._write(record)
        self._evaluated.set()

    def _record_fault(self, kind: str, **details: Any) -> None:
        self._record(kind, **details)
        self._note(f"fault: {details['fault']} {details['target']}")

    def _record(self, kind: str, **details: Any) -> None:
        self._write({"t": self.config.clock(), "kind": kind, **details})

    def _write(self, record: dict[str, Any]) -> None:
        self._metrics.write(json.dumps(record) + "\n")
        self._metrics.flush()

    def _note(self, text: str) -> None:
        self._own_notes = [*self._own_notes[-8:], {"t": self.config.clock(), "text": text}]

    def _log(self, name: str) -> Path:
        return self.run_dir / tape.LOGS / f"{name}.log"

    # ---- ending --------------------------------------------------------------------------------------

    def _interrupt(self) -> None:
        """Ctrl-C: stop in order; a second one ends everything at once."""
        if self.interrupted or self._syncer is None or not self.url:
            self.interrupted = True
            if not self._listening.done():
                self._listening.set_exception(KeyboardInterrupt())
            if not self._outcome.done():
                self._outcome.set_result("interrupted")
            return
        self.interrupted = True
        self._note("stopping: learners save their state")
        self._syncer.signal(signal.SIGTERM)
        loop = asyncio.get_running_loop()
        loop.call_later(STOP_S, self._give_up)

    def _give_up(self) -> None:
        if not self._outcome.done():
            self._outcome.set_result("interrupted")

    async def _end_all(self) -> None:
        """End every process that we started, and wait until it is gone."""
        patience_s = 0.3 if self.interrupted else 3.0
        children = [c for c in (*self._islands.values(), self._evaluator, self._syncer) if c is not None]
        for child in children:
            if child.process.stdin is not None:
                child.process.stdin.close()
        await asyncio.gather(*(child.end(patience_s) for child in children))


def lines_of(path: Path, start: int) -> list[str]:
    """The lines of a log from a byte on, without empty ones; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()]


def last_line(path: Path, start: int) -> str:
    """The last line of a log: the reason, as a program gave it; empty if it gave none."""
    return (lines_of(path, start) or [""])[-1]


def in_brackets(why: str) -> str:
    """A reason as an aside; nothing for none.

    >>> in_brackets("no memory"), in_brackets("")
    (' (no memory)', '')
    """
    return f" ({why})" if why else ""


def has_step(segment: Path) -> bool:
    """Whether a learner's tape has a finished step; looks no further than the first one."""
    try:
        with segment.open(errors="replace") as lines:
            reports = (line for line in lines if '"type":"BoundaryPassed"' in line)
            return any('"step_s":0.0,' not in line for line in reports)  # else it only waited
    except OSError:
        return False


async def run_recipe(
    recipe: Recipe, out: Path, show: Callable[[dict[str, Any]], None]
) -> tuple[RunConfig, Supervisor, str]:
    """Start a new run in an empty folder and see it through."""
    check_for_run(recipe.plan())
    config = resolve(recipe, secrets.token_hex(4))
    if recipe.serve.client_ca is not None:
        raise UserError(
            "serve.client_ca: the learners of `run` have no certificates; it is for `farflung serve`"
        )
    check_serve(recipe.serve)
    new_run_dir(out)
    write_config(config, out)
    supervisor = Supervisor(config, out, resume=False, show=show)
    return config, supervisor, await supervisor.run()


async def resume_run(
    run_dir: Path, show: Callable[[dict[str, Any]], None]
) -> tuple[RunConfig, Supervisor, str]:
    """Go on with a run that was stopped in order."""
    config = reopen(run_dir)
    supervisor = Supervisor(config, run_dir, resume=True, show=show)
    return config, supervisor, await supervisor.run()


def reopen(run_dir: Path) -> RunConfig:
    """Make a stopped run's folder ready to go on; its clock goes on where it stood.

    Raises:
        UserError: no run folder, nothing to resume, or an address that cannot be had.
    """
    old = read_config(run_dir)
    elapsed_s = checkpoint.elapsed_s(run_dir)
    check_serve(old.recipe.serve)
    config = RunConfig(
        run=old.run, recipe=old.recipe, policy=old.policy, budget_tokens=old.budget_tokens,
        started_s=time.monotonic() - elapsed_s,
    )  # fmt: skip
    write_config(config, run_dir)
    for name in (tape.TAPE, tape.SUMMARY, tape.REPORT, SYNCER):
        (run_dir / name).unlink(missing_ok=True)
    return config


def results(run_dir: Path, supervisor: Supervisor, outcome: str) -> dict[str, Any]:
    """What the logs of a run cannot know: byte counts, digest, how it ended."""
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((run_dir / SYNCER).read_bytes())
    return {**found, "outcome": outcome, "wall_s": supervisor.config.clock()}


def discard(run_dir: Path) -> None:
    """Remove a run folder that holds nothing but a configuration: the run never started."""
    if not (run_dir / tape.TAPE_DIR).exists():
        shutil.rmtree(run_dir, ignore_errors=True)
