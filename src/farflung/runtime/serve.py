"""The syncer as a process: listen, serve one run to its end, leave its results in the run folder.

Started by the supervisor (``python -m farflung.runtime.serve``) or by ``farflung serve``.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from farflung import tape
from farflung.config import RunConfig, read_config
from farflung.errors import UserError
from farflung.protocol import events as ev
from farflung.protocol.byte_table import ByteTable, Row
from farflung.protocol.gathering import Gathering
from farflung.protocol.syncer import SyncerMachine
from farflung.recipe import Serve
from farflung.runtime import checkpoint
from farflung.runtime.lifeline import follow_parent
from farflung.runtime.memory import keep_freed_memory
from farflung.runtime.security import check_listen, client_context, server_context
from farflung.runtime.server import HUB, check_free, start
from farflung.runtime.syncer import SyncerDriver

SYNCER = "syncer.json"  # in the run folder: what only the syncer knows at the end
COUNTED = "bytes.json"  # what its transport had counted at an orderly stop
SHOW_S = 0.25  # between two looks at the status
WORKERS = "workers"  # gossip: folder of what each learner handed in, until it was evaluated


def check_serve(options: Serve) -> ssl.SSLContext | None:
    """Find what would keep a syncer from listening as told; returns its TLS context, None for plain HTTP.

    Raises:
        UserError: TLS files that are missing or wrong, TLS missing beyond loopback, an address that is taken.
    """
    check_listen(options.host, options.cert is not None, options.insecure)
    if options.cert is None and (options.key or options.client_ca):
        raise UserError(
            "serve.key and serve.client_ca need serve.cert: give the certificate, or leave them out"
        )
    if options.ca is not None:
        client_context(options.ca)
    tls = None
    if options.cert is not None:
        tls = server_context(options.cert, options.key or options.cert, options.client_ca)
    check_free(options.host, options.port)
    return tls


async def serve(
    config: RunConfig,
    run_dir: Path,
    token: str,
    *,
    resume: bool = False,
    stop_within_s: float | None = None,
    keep_workers: bool = False,
    expected: str | None = None,
    ready: Callable[[str], None],
    show: Callable[[dict[str, Any]], None] | None = None,
) -> str:
    """Serve a run until it is finished or suspended; returns which.

    Args:
        stop_within_s: for the learners to save after a signal to stop; None: one lease.
        keep_workers: gossip: leave the parameters that each learner handed in, for whoever evaluates them.
        expected: fingerprint that a learner's model must have; None: the first one that joins decides.
        ready: called with the address once it listens.
        show: called with the run's status, several times a second.

    Raises:
        UserError: the address cannot be had or needs TLS, or there is nothing to resume.
    """
    options = config.recipe.serve
    tls = check_serve(options)
    machine = SyncerMachine(
        config.policy, run=config.run, num_learners=config.recipe.num_learners,
        budget_tokens=config.budget_tokens,
    )  # fmt: skip
    method = config.method
    hub = checkpoint.read(run_dir, method, machine, config.clock()) if resume else None
    counted = _counted_before(run_dir) if resume else []
    driver = SyncerDriver(method, machine, config.clock, tape.free_segment(run_dir, "syncer"))
    driver.hub, driver.expected = hub, expected
    app = driver.application(token)
    app[HUB].table.add_rows(counted)
    runner, port = await start(app, options.host, options.port, tls)
    try:
        scheme = "https" if tls is not None else "http"
        host = options.advertise or ("127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host)
        host = f"[{host}]" if ":" in host else host  # IPv6
        driver.checkpoint = lambda: _checkpoint(run_dir, driver, config)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(
                number, lambda: driver.feed(ev.StopRequested(mode="suspend", within_s=stop_within_s))
            )
        ready(f"{scheme}://{host}:{port}")
        watching = asyncio.create_task(_watch(driver, show)) if show is not None else None
        try:
            reason = await driver.finished
        finally:
            if watching is not None:
                watching.cancel()
        if reason == "finished":
            checkpoint.remove(run_dir)
    finally:
        with contextlib.suppress(Exception):
            _write_results(run_dir, driver)
        await runner.cleanup()
        driver.close()
    _write_results(run_dir, driver)
    if keep_workers and reason == "finished":
        driver.save_shown(run_dir / WORKERS)
    return reason


async def _watch(driver: SyncerDriver, show: Callable[[dict[str, Any]], None]) -> None:
    """In a thread: a terminal that does not take a line must not hold up the run."""
    while True:
        await asyncio.to_thread(show, driver.status())
        await asyncio.sleep(SHOW_S)


def _checkpoint(run_dir: Path, driver: SyncerDriver, config: RunConfig) -> None:
    if driver.hub is not None:
        checkpoint.write(run_dir, driver.hub, driver.machine, config.clock())


def _counted_before(run_dir: Path) -> list[Row]:
    """The bytes that passed before a stop; taken out, so that nobody takes them for this process's."""
    path = run_dir / COUNTED
    try:
        rows: list[Row] = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return []
    path.unlink()
    return rows


def _write_results(run_dir: Path, driver: SyncerDriver) -> None:
    """The model, its digest and the bytes counted at the transport, by hub and learners."""
    assert driver.app is not None
    transport, gossip = driver.app[HUB], driver.machine.merging
    if driver.machine.phase == "suspended":
        tape.write_atomically(run_dir / COUNTED, json.dumps(transport.table.rows()).encode())
    table = ByteTable()
    table.add_rows(transport.table.rows())
    for learner, (up, down) in gossip.direct.items() if isinstance(gossip, Gathering) else ():
        table.add(learner, "offer", 0, up, down)
    results: dict[str, Any] = {
        "outcome": driver.machine.phase,
        "bytes_up": table.bytes_up,
        "bytes_down": table.bytes_down,
        "bytes_control": transport.total.bytes_control,
        "bytes_by": table.rows(),
        "rejoins": driver.machine.admission.rejoins,
    }
    if driver.hub is not None and driver.machine.phase != "birth":
        results["digest"] = driver.hub.model_digest()
        driver.save_model(run_dir / tape.MODEL)
    tape.write_atomically(run_dir / SYNCER, json.dumps(results).encode())


def main() -> None:
    parser = argparse.ArgumentParser(prog="farflung.runtime.serve")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--stop-within-s", type=float)
    args = parser.parse_args()
    follow_parent()
    keep_freed_memory()
    torch.set_num_threads(1)
    config = read_config(args.run_dir)
    try:
        reason = asyncio.run(
            serve(
                config, args.run_dir, os.environ["FARFLUNG_TOKEN"],
                resume=args.resume, stop_within_s=args.stop_within_s, keep_workers=True,
                ready=lambda url: print(json.dumps({"url": url}), flush=True),
            )
        )  # fmt: skip
    except UserError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        sys.exit(2)
    print(json.dumps({"finished": reason}), flush=True)


if __name__ == "__main__":
    main()
