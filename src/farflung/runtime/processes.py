"""Child processes of a run: each in a session of its own, tied to us by a lifeline, ended by its id."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path


class Child:
    """One process of ours and its process group.

    Args:
        name: for logs.
        process: its standard input is the lifeline.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name, self.process = name, process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    def signal(self, number: int) -> None:
        """Signal the whole process group; a group that is gone is fine."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    async def end(self, patience_s: float) -> int:
        """Wait for the process; kill the group when it takes too long. Returns its exit code."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), patience_s)
        self.signal(signal.SIGCONT)  # a stopped group cannot die of anything but this and SIGKILL
        self.signal(signal.SIGKILL)
        return await self.process.wait()


async def start(
    name: str,
    module: str,
    *args: str,
    log: Path,
    token: str,
    on_line: Callable[[str], None] | None = None,
    more_env: dict[str, str] | None = None,
) -> Child:
    """Start ``python -m module args`` in a session of its own; standard error goes to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "FARFLUNG_TOKEN": token, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    env |= more_env or {}
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *args,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE if on_line else errors,
            stderr=errors, env=env, start_new_session=True,
        )  # fmt: skip
    child = Child(name, process)
    if on_line is not None:
        child.reader = asyncio.create_task(_read(process, on_line))  # type: ignore[attr-defined]
    return child


async def _read(process: asyncio.subprocess.Process, on_line: Callable[[str], None]) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        on_line(line.decode().rstrip("\n"))


def descendants(pid: int) -> list[int]:
    """Process ids of the children of a process (Linux)."""
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
