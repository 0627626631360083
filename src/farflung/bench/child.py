"""A child process that prints one JSON line when it is ready, and ends with the block that started it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from farflung.errors import UserError

PATIENCE_S = 10.0


@contextmanager
def child(module: str, *args: str, **environment: str) -> Iterator[dict[str, Any]]:
    """Run ``python -m module args``; gives what its first line says. The module must follow its parent.

    Raises:
        UserError: the line holds an ``error``, or the process ended without one.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module, *args],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    with process:  # closes the pipes and waits
        try:
            said = json.loads(process.stdout.readline() or b'{"error": "ended before it was ready"}')
            if "error" in said:
                raise UserError(f"{module}: {said['error']}")
            yield said
        finally:
            process.stdin.close()  # its lifeline
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
