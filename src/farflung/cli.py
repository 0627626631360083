"""The command line: thin verbs. Bad input gets one clear line and exit code 2; stack traces are for bugs."""

import asyncio
import contextlib
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from farflung import __version__
from farflung.errors import UserError
from farflung.plan.verbs import plan
from farflung.simulate.verbs import simulate

app = typer.Typer(
    help="Train one model on far-flung, unreliable machines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

RecipeArgument = Annotated[
    Path | None,
    typer.Argument(help="A recipe (TOML). Without one every default applies.", show_default=False),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="Change one key of the recipe, for example policy.quorum=2."
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output, nothing else.")
]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def run(
    recipe: RecipeArgument = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; must be new or empty. Default: runs/RECIPE-N.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this folder, stopped in order (Ctrl-C).")
    ] = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a recipe on this machine. A syncer and learners start as processes; progress is shown live.

    Keys of a recipe, each with a default: method, policy.* (num_fragments, sync_every_steps, quorum, ...), task
    (text, text_muon, vision, vision_muon, or package.module:function), data.path, scale, num_learners, steps or
    budget_tokens, batch_size, lr, warmup_steps, seed, threads, evals, eval_batches, pace_s, restart_s, serve.*,
    [[faults]]. A wrong key or value is told with what is allowed.

    The run folder then holds report.html, summary.json, model.safetensors, logs, and the tape of every event and
    decision. Ctrl-C stops in order: fragments, outer state, ledger and every learner's state are written, and
    `farflung run --resume DIR` goes on from there. Exit codes: 0 finished or stopped in order, 2 bad input (one
    line says what to do), 130 interrupted before there was anything to save.
    """
    from farflung.recipe import load_recipe
    from farflung.report.closing import close_run
    from farflung.report.live import LiveView, result_table
    from farflung.runtime import checkpoint
    from farflung.runtime import run as runs

    console = Console(stderr=True)
    if resume is not None and (recipe is not None or settings or out is not None):
        raise UserError("--resume takes the run as it is: give no recipe, --set or --out with it")
    if resume is not None and (resume / SERVED_WITH).exists():
        raise UserError(
            f"{resume}: its learners run elsewhere: go on with `farflung serve --resume {resume}`"
        )
    sys.path.insert(0, os.getcwd())  # a recipe's own task lives beside it
    loaded = load_recipe(recipe, settings or []) if resume is None else None
    run_dir = resume or out or _default_out(recipe)
    with LiveView(console) as view:
        if loaded is not None:
            work = runs.run_recipe(loaded, run_dir, view.update)
        else:
            work = runs.resume_run(run_dir, view.update)
        try:
            _, supervisor, outcome = asyncio.run(work)
        except KeyboardInterrupt:
            runs.discard(run_dir)
            raise typer.Exit(130) from None
    summary = close_run(run_dir, runs.results(run_dir, supervisor, outcome))
    if as_json:
        print(json.dumps(summary))
    else:
        Console().print(result_table(summary))
        Console().print(f"report: {run_dir / 'report.html'}", soft_wrap=True)
        if outcome == "suspended" and checkpoint.exists(run_dir):
            Console().print(f"go on with: farflung run --resume {run_dir}", soft_wrap=True)
    if outcome == "interrupted":
        raise typer.Exit(130)


def _default_out(recipe: Path | None) -> Path:
    """The first free ``runs/NAME-N``."""
    stem = recipe.stem if recipe is not None else "run"
    number = 1
    while (path := Path("runs") / f"{stem}-{number}").exists():
        number += 1
    return path


@app.command()
def lab(
    recipe: RecipeArgument = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; must be new or empty.")] = None,
    order: Annotated[
        Path | None,
        typer.Option(
            help="Execute the order found in this run's tape, and compare the model bit for bit. Hub methods only."
        ),
    ] = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """The same run in virtual time: real training, simulated links and failures, deterministic.

    The recipe's [lab] table says what is pretended: step times, links, bandwidth. Equal recipes give equal
    tapes, byte for byte. Here the method may also be data_parallel, the reference that averages gradients in
    every step; its [policy] has elastic and reconfigure_s.
    """
    from farflung.config import write_config
    from farflung.lab.start import lab_config, run_lab
    from farflung.recipe import load_recipe
    from farflung.report.closing import close_run
    from farflung.report.live import result_table
    from farflung.runtime.run import new_run_dir

    sys.path.insert(0, os.getcwd())
    if order is not None:
        if recipe is not None or settings or out is not None:
            raise UserError("--order takes the run as it is: give no recipe, --set or --out with it")
        _repeat(order, as_json)
        return
    config = lab_config(load_recipe(recipe, settings or []))
    run_dir = out or _default_out(recipe)
    new_run_dir(run_dir)
    write_config(config, run_dir)
    console = Console(stderr=True)

    def show(record: dict[str, Any]) -> None:
        share = record["tokens"] / config.budget_tokens
        console.print(f"{record['t']:9.1f} virtual s  {share:4.0%} of the tokens  loss {record['loss']:.3f}")

    summary = close_run(run_dir, run_lab(config, run_dir, show))
    if as_json:
        print(json.dumps(summary))
    else:
        Console().print(result_table(summary))
        Console().print(f"report: {run_dir / 'report.html'}", soft_wrap=True)


def _repeat(run_dir: Path, as_json: bool) -> None:
    """`lab --order`: the same bits from the same order, or where they part."""
    from farflung import tape
    from farflung.config import read_config
    from farflung.lab.order import OrderBroken, repeat
    from farflung.report.folder import read_folder

    taped = read_folder(run_dir).summary.get("digest")
    try:
        digest = repeat(run_dir, read_config(run_dir))
    except OrderBroken as error:
        print(f"farflung: {run_dir}: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    if taped is None:
        raise UserError(
            f"{run_dir}: no digest in {tape.SUMMARY} to compare with: give the folder of a whole run"
        )
    agree = digest == taped
    result = {"run": str(run_dir), "digest": digest, "digest_of_run": taped, "agree": agree}
    verdict = "bit-identical" if agree else "DIFFERENT"
    print(json.dumps(result) if as_json else f"{verdict}: {digest[:16]} here, {str(taped)[:16]} in {run_dir}")
    if not agree:
        raise typer.Exit(1)


@app.command()
def chaos(
    recipe: Annotated[
        Path | None, typer.Argument(help="A recipe with faults; or a run folder, to judge only.")
    ] = None,
    in_lab: Annotated[bool, typer.Option("--lab", help="In virtual time instead of real processes.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; must be new or empty.")] = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a recipe with its fault plan, then let the oracle judge the tape; exit code 1 for a broken promise.

    A plan is [[faults]] (kind, target, at_progress or at_s, ...) and [[generate]] (generator, seed, ...), which
    draws faults: poisson, region_loss, stragglers, partitions, throttled_links. kill, freeze, slow, disconnect,
    partition, delay, throttle, duplicate and corrupt happen to real processes too; clock_jump, disk_full and
    syncer_loss only with --lab.
    """
    import io

    from farflung import tape
    from farflung.chaos.oracle import judge
    from farflung.report.folder import read_folder

    if recipe is not None and recipe.is_dir():
        if in_lab or settings or out is not None:
            raise UserError(f"{recipe}: a run folder is only judged: give no --lab, --set or --out with it")
        run_dir = recipe
    else:
        run_dir = out or _default_out(recipe)
        with contextlib.redirect_stdout(io.StringIO()) if as_json else contextlib.nullcontext():
            if in_lab:
                lab(recipe, run_dir, None, settings, False)
            else:
                run(recipe, run_dir, None, settings, False)
    folder, records = read_folder(run_dir), list(tape.read_run(run_dir))
    if not any(r.node.partition(".")[0] == "syncer" and r.kind != "header" for r in records):
        raise UserError(f"{run_dir}: nothing to judge: its tape holds no records of a syncer")
    verdict = judge(records, folder.history.metrics)
    if as_json:
        print(json.dumps({"run": str(run_dir), "verdict": verdict.as_dict(), "summary": folder.summary}))
    else:
        print(verdict)
    if not verdict.ok:
        raise typer.Exit(1)


@app.command()
def replay(
    run_dir: Annotated[Path, typer.Argument(help="A run folder, of `run` or `lab`.")],
    as_json: JsonOption = False,
) -> None:
    """Feed a run's tape to fresh machines and compare every action; exit code 1 where they differ."""
    from farflung.testing.tapes import replay_run

    verdicts = replay_run(run_dir)
    if as_json:
        print(
            json.dumps({"machines": [v.as_dict() for v in verdicts], "same": all(v.same for v in verdicts)})
        )
    else:
        for verdict in verdicts:
            print(verdict)
    if not all(v.same for v in verdicts):
        raise typer.Exit(1)


@app.command()
def compare(
    recipes: Annotated[list[Path], typer.Argument(help="Recipes (TOML), at least two.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for all of it; must be new or empty. Default: runs/compare-N."),
    ] = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run recipes in the lab on the same token budget, and show them side by side.

    Task, data, scale, seed and token budget must be equal; --set applies to all. OUT then holds one run folder a
    recipe and comparison.html: a table, and loss against tokens, virtual time and bytes.
    """
    from farflung.compare import PAGE, comparison_table
    from farflung.compare import compare as compare_recipes

    sys.path.insert(0, os.getcwd())
    if len(recipes) < 2:
        raise UserError("compare: name at least two recipes")
    folder, console = out or _default_out(Path("compare")), Console(stderr=True)

    def show(name: str, record: dict[str, Any]) -> None:
        moment = f"{record['t']:9.1f} virtual s  {record['tokens']:,} tokens"
        console.print(f"{name}: {moment}  loss {record['loss']:.3f}")

    summaries = compare_recipes(recipes, folder, settings or [], show)
    if as_json:
        print(json.dumps(summaries))
    else:
        Console().print(comparison_table(summaries))
        Console().print(f"page: {folder / PAGE}", soft_wrap=True)


@app.command()
def serve(
    recipe: RecipeArgument = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; must be new or empty. Default: runs/RECIPE-N.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Go on with a served run that was stopped in order.")
    ] = None,
    settings: SetOption = None,
) -> None:
    """Serve a run for learners on other machines. The line that starts a learner is printed.

    Address, port and TLS stand in the recipe's [serve] table: host, port, advertise (the address that learners
    dial), cert, key, ca, client_ca. Beyond loopback it wants TLS, or an explicit `--set serve.insecure=true`.

    Learners of your own (farflung.Learner in your training loop) may bring any model: give budget_tokens, and
    the recipe's task is not looked at. The join token is FARFLUNG_TOKEN if that is set, else a new one; it is
    kept in the run folder's file `token`.

    Ctrl-C stops in order: model, outer state and ledger are written, and `farflung serve --resume DIR` goes on
    from there. Learners are started again with the same line and continue their part of the data; inner optimizer
    state begins anew. Nothing is evaluated: `run` does that.
    """
    import secrets

    from farflung.config import resolve, write_config
    from farflung.recipe import load_recipe
    from farflung.runtime.run import new_run_dir, reopen
    from farflung.runtime.security import check_token, new_token, save_token
    from farflung.runtime.serve import check_serve

    sys.path.insert(0, os.getcwd())
    given = os.environ.get("FARFLUNG_TOKEN")
    if resume is not None:
        if recipe is not None or settings or out is not None:
            raise UserError("--resume takes the run as it is: give no recipe, --set or --out with it")
        words, token = _served_with(resume)
        config = reopen(resume)
        _serve(config, resume, check_token(given or token, "FARFLUNG_TOKEN"), words, resume=True)
        return
    config = resolve(load_recipe(recipe, settings or []), secrets.token_hex(4), trains=False)
    token = check_token(given or new_token(), "FARFLUNG_TOKEN")
    check_serve(config.recipe.serve)
    run_dir = out or _default_out(recipe)
    new_run_dir(run_dir)
    write_config(config, run_dir)
    save_token(run_dir / "token", token)
    words = [str(recipe)] if recipe is not None else []
    for setting in settings or []:
        words += ["--set", setting]
    (run_dir / SERVED_WITH).write_text(json.dumps(words))
    _serve(config, run_dir, token, words)


SERVED_WITH = "join.json"  # in the folder of a served run: what learners are to be started with


def _served_with(run_dir: Path) -> tuple[list[str], str]:
    """Recipe and options for `join`, and the token."""
    try:
        words: list[str] = json.loads((run_dir / SERVED_WITH).read_bytes())
        return words, (run_dir / "token").read_text().strip()
    except (OSError, ValueError):
        raise UserError(
            f"{run_dir}: this run was not served: go on with `farflung run --resume {run_dir}`"
        ) from None


def _serve(config: Any, run_dir: Path, token: str, words: list[str], resume: bool = False) -> None:
    from farflung import tape
    from farflung.config import expected_fingerprint
    from farflung.report.closing import close_run
    from farflung.report.live import LiveView
    from farflung.runtime.serve import SYNCER
    from farflung.runtime.serve import serve as serve_run

    def ready(url: str) -> None:
        ca = config.recipe.serve.ca
        options = [*words, *(["--ca", ca] if ca is not None else [])]
        line = shlex.join(["farflung", "join", *options, "--connect", url, "--name", "learner-0"])
        print(f"serving run {config.run} at {url}; start each learner, under a name of its own, with\n")
        print(f"  FARFLUNG_TOKEN={token} {line}\n")
        if config.policy.topology == "gossip":
            print("with --listen HOST:PORT where partners can dial it; else its vectors pass through here;\n")
        print("or in a loop of your own with farflung.Learner(..., connect=...)", flush=True)

    with LiveView(Console(stderr=True)) as view:
        outcome = asyncio.run(
            serve_run(
                config, run_dir, token, resume=resume, expected=expected_fingerprint(config), ready=ready,
                show=lambda status: view.update({**status, "evals": []}),
            )
        )  # fmt: skip
    results = json.loads((run_dir / SYNCER).read_bytes())
    close_run(run_dir, {**results, "outcome": outcome, "wall_s": config.clock()})
    model = run_dir / tape.MODEL
    print(f"{outcome}: {model}" if model.exists() else f"{outcome}: nobody trained")
    print(f"report: {run_dir / tape.REPORT}")
    if outcome == "suspended":
        print(f"go on with: farflung serve --resume {run_dir}")


@app.command()
def join(
    connect: Annotated[str, typer.Option(help="The syncer's address, as `serve` printed it.")],
    recipe: RecipeArgument = None,
    name: Annotated[
        str | None,
        typer.Option(help="Unique in the run; the same after a restart. Default: host and process."),
    ] = None,
    settings: SetOption = None,
    ca: Annotated[Path | None, typer.Option(help="Trust this TLS authority.")] = None,
    cert: Annotated[Path | None, typer.Option(help="Certificate to show, for mutual TLS.")] = None,
    key: Annotated[Path | None, typer.Option(help="Its key.")] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Gossip: where partners may dial, with TLS if --cert is given; port 0 takes a free one. 'off': "
            "nowhere, all goes through the syncer. Default: on loopback if the syncer is there, else off.",
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(metavar="HOST[:PORT]", help="Gossip: what partners dial, where it is not --listen."),
    ] = None,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="Give up when nobody answers for so long at the start.")
    ] = 30.0,
) -> None:
    """Join a served run as a learner. `serve` prints the whole line.

    Recipe and --set must be those of the syncer; FARFLUNG_TOKEN holds the join token. A learner only dials out
    (a gossip learner may listen for its partners too); a syncer that goes away later is waited for. Started again
    under its old name it goes on with its own part of the data. Ctrl-C leaves the run.
    """
    from farflung.config import resolve
    from farflung.recipe import load_recipe
    from farflung.runtime.face import RunEnded
    from farflung.runtime.island import ORDERLY, told, train

    sys.path.insert(0, os.getcwd())
    config = resolve(load_recipe(recipe, settings or []), "")
    tls: dict[str, Any] = {
        k: str(v) for k, v in {"ca": ca, "cert": cert, "key": key}.items() if v is not None
    }
    try:
        reason = train(
            config, connect=connect, name=name, connect_within_s=wait, listen=listen, advertise=advertise,
            insecure=config.recipe.serve.insecure, **tls,
        )  # fmt: skip
    except RunEnded as error:
        reason = str(error)
    except KeyboardInterrupt:
        print("interrupted: left the run", file=sys.stderr)
        raise typer.Exit(130) from None
    if reason not in ORDERLY:
        raise UserError(told(reason, name))
    print(reason)
    if told(reason, name) != reason:
        print(told(reason, name), file=sys.stderr)


app.command()(simulate)
app.command()(plan)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; several are shown side by side.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write. Default: report.html in the first folder.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write report.html from run folders. It opens without a server; the runs may still be going on.

    With several folders the page shows them side by side. --json prints the summary instead of writing a page;
    of several folders, an object with one summary a folder.
    """
    from farflung import tape
    from farflung.report.folder import read_folder
    from farflung.report.page import render
    from farflung.report.summary import summarise

    if as_json:
        summaries = {str(run_dir): read_folder(run_dir).summary or summarise(run_dir) for run_dir in runs}
        print(json.dumps(summaries if len(runs) > 1 else summaries[str(runs[0])]))
        return
    path = out or (runs[0] / tape.REPORT if len(runs) == 1 else runs[0] / "comparison.html")
    page = render(runs if len(runs) > 1 else runs[0])
    try:
        tape.write_atomically(path, page.encode())
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    print(path)


@app.command()
def bench(
    names: Annotated[
        list[str] | None, typer.Argument(help="Measurements to take. Without one: all of them.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small and few: shows that it works, not how fast it is.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure this machine against its limits.

    What being a learner costs a training loop, merges, codecs and transport, each as a ratio to what this machine
    can do. The table says what every number means.
    """
    from farflung.bench import suite
    from farflung.bench.measure import FULL, QUICK

    settings, measured = QUICK if quick else FULL, {}
    with Console(stderr=True).status("") as status:
        for name in suite.chosen(names or []):
            status.update(f"measuring {name}")
            measured[name] = suite.measure(name, settings)
    if as_json:
        print(json.dumps(suite.as_json(measured, settings)))
    else:
        Console().print(suite.table(measured, settings))


def main() -> None:
    """Entry point: UserError becomes one line and exit code 2."""
    try:
        app()
    except UserError as error:
        print("farflung:", *str(error).split(), file=sys.stderr)  # one line, whatever it quotes
        sys.exit(2)


if __name__ == "__main__":
    main()
