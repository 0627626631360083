"""Real `farflung` processes for tests: a served run and whoever joins it."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from farflung import tape

DEADLOCK_S = 120.0  # a run that takes so long hangs


def start(folder: Path, *args: str, token: str = "") -> "subprocess.Popen[str]":
    """A Python process in `folder`, in a session of its own: ``-m farflung.cli VERB ...`` or a script.

    It hears Ctrl-C, also where the tests themselves were started in the background and do not.
    """
    env = {**os.environ, "FARFLUNG_TOKEN": token, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, *args], cwd=folder, env=env, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Wait for the end; returns exit code, output and errors."""
    out, err = process.communicate(timeout=DEADLOCK_S)
    return process.returncode, out, err


def end(process: "subprocess.Popen[str]") -> None:
    """Whatever happened, nothing of this process is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


class Served:
    """`farflung serve` that listens, and its learners. Its line for them was read: `url`, `token`."""

    def __init__(self, folder: Path, *args: str) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        out = [] if "--resume" in args else ["--out", "run"]
        self.process = start(folder, "-m", "farflung.cli", "serve", *args, *out)
        self._learners: list[subprocess.Popen[str]] = []
        try:
            self._listen()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for process in (*self._learners, self.process):
            end(process)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        said = ""
        while "or in a loop of your own" not in said:
            line = self.process.stdout.readline()
            assert line, f"serve ended: {said} {finish(self.process)}"
            said += line
        found = re.search(r"FARFLUNG_TOKEN=(\S+) (farflung join .*--connect (\S+)) --name", said)
        assert found is not None, said
        self.token, self.line, self.url = found[1], found[2], found[3]

    def join(self, name: str) -> "subprocess.Popen[str]":
        """The printed line, as somebody would paste it, with a name of its own."""
        return self.learner("-m", "farflung.cli", *self.line.split()[1:], "--name", name)

    def learner(self, *args: str) -> "subprocess.Popen[str]":
        """Any Python program with this run's token."""
        self._learners.append(start(self.folder, *args, token=self.token))
        return self._learners[-1]

    def notes(self, kind: str) -> list[dict]:
        """The syncer's notes of a kind, so far."""
        records = tape.read_segment(self.run_dir / tape.TAPE_DIR / "syncer.jsonl").records
        return [r.data["data"] for r in records if r.type == "Note" and r.data["kind"] == kind]
