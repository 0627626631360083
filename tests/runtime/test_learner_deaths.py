"""What `farflung run` says of learners that die, and when it stops starting them again."""

import asyncio
import json
import signal
from pathlib import Path

import pytest

from farflung.config import resolve
from farflung.recipe import make_recipe
from farflung.runtime import processes, run

STEP = (
    '{"t":1.0,"event":{"type":"Reported","report":{"type":"BoundaryPassed","step":1,"step_s":0.2,"x":0}}}\n'
)
IDLE = STEP.replace("0.2", "0.0")
TRACE = 'Traceback (most recent call last):\n  File "task.py"\nZeroDivisionError: division by zero\n\n'


class Dead:
    """A learner's process that has ended."""

    def __init__(self, code: int) -> None:
        self.code, self.process = code, self

    async def wait(self) -> int:
        return self.code

    def signal(self, number: int) -> None:
        pass


@pytest.fixture
def die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Have one learner die again and again; returns the notes, and why the run gave up."""

    async def lives(code: int, said: str, taped: str) -> tuple[list[str], str]:
        async def start(name: str, module: str, *args: str, log: Path, **options: object) -> Dead:
            segment = Path(args[args.index("--tape") + 1])
            for path, text in ((log, said), (segment, taped)):
                path.parent.mkdir(exist_ok=True)
                with path.open("a") as file:
                    file.write(text)
            return Dead(code)

        monkeypatch.setattr(processes, "start", start)
        monkeypatch.setattr(run, "RESTARTS", 6)
        recipe = make_recipe({"budget_tokens": 9, "num_learners": 1, "restart_s": 0.0})
        supervisor = run.Supervisor(
            resolve(recipe, "run", trains=False), tmp_path, resume=False, show=lambda status: None
        )
        (name,) = recipe.learners()
        await supervisor._start_island(name)
        await asyncio.wait_for(supervisor._keep(name), 10)
        supervisor._metrics.close()
        return [note["text"] for note in supervisor._own_notes], str(supervisor._outcome.exception())

    return lives


async def test_a_learner_that_never_finishes_a_step_is_started_three_times(die, tmp_path: Path) -> None:
    for taped in ("", IDLE):
        notes, why = await die(1, TRACE, taped)
        again = "learner-0 exited with code 1 (ZeroDivisionError: division by zero); starting it again"
        assert notes[:-1] == [again] * 2
        assert notes[-1] == (
            "learner-0 died 3 times in a row without a finished step (ZeroDivisionError: division by zero): "
            f"given up, see {tmp_path / 'logs' / 'learner-0.log'}"
        )
        assert why == f"no learner is left: {notes[-1]}"


async def test_a_learner_that_gets_somewhere_is_started_more_often(die) -> None:
    notes, why = await die(1, TRACE, STEP)
    assert len(notes) == 7 and "died 6 times: given up" in why


async def test_who_is_killed_from_outside_did_not_fail_and_said_nothing(die) -> None:
    notes, why = await die(-signal.SIGKILL, "", "")
    assert notes[0] == "learner-0 exited with code -9; starting it again"
    assert len(notes) == 7 and "died 6 times" in why


async def test_who_cannot_take_part_is_named_once(die) -> None:
    notes, _ = await die(run.UNWELCOME, "nobody answered\n", "")
    assert notes == ["learner-0 cannot take part: nobody answered"]


def test_the_last_words_are_those_of_the_newest_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert run.last_line(log, 0) == ""
    log.write_text("old\n\n")
    assert (run.last_line(log, 0), run.last_line(log, 5)) == ("old", "")


def test_the_tape_of_a_real_step_is_known(tmp_path: Path) -> None:
    """The words that are looked for are those that a sidecar writes."""
    from farflung.protocol import events as ev
    from farflung.protocol import mailbox as box
    from farflung.protocol.learner import LearnerMachine
    from farflung.recorder import Recorder

    policy = resolve(make_recipe({"budget_tokens": 9}), "run", trains=False).policy
    for step_s in (0.0, 0.25):
        path = tmp_path / f"{step_s}.jsonl"
        recorder = Recorder(LearnerMachine(policy, learner="a", run=None), "a", lambda: 0.0, path)
        recorder.handle(ev.Reported(report=box.BoundaryPassed(step=3, tokens=8, step_s=step_s)))
        recorder.close()
        assert json.loads(path.read_text().splitlines()[1])
        assert run.has_step(path) is (step_s > 0)
    assert not run.has_step(tmp_path / "missing")
