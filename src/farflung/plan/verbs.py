"""``farflung plan``: options in, a table or JSON out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from farflung.errors import UserError

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output, nothing else.")
]
Ints = list[int] | None
SHOWN = 12


def plan(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="TOML with the options below as keys (step_s = 1.0), or a recipe.", show_default=False
        ),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="Compare a finished run with its prediction; takes no other option."
        ),
    ] = None,
    params: Annotated[float | None, typer.Option(help="Of the model.")] = None,
    scale: Annotated[
        str | None, typer.Option(help="... or a built-in model: micro, tiny, small, medium.")
    ] = None,
    model_bytes: Annotated[float | None, typer.Option(help="... or its size in fp32.")] = None,
    islands: Annotated[int | None, typer.Option(help="Places that train by themselves. Default: 8.")] = None,
    chips: Annotated[int | None, typer.Option(help="Of each island. Default: 1.")] = None,
    step_s: Annotated[float | None, typer.Option(help="Seconds of an island's step. Default: 1.")] = None,
    tokens_per_s: Annotated[float | None, typer.Option(help="... or an island's tokens a second.")] = None,
    tokens_per_step: Annotated[float | None, typer.Option(help="Of an island. Default: 1.")] = None,
    slowest: Annotated[
        float | None, typer.Option(help="How much longer one island's step takes; 0.18: 18 % slower.")
    ] = None,
    jitter: Annotated[
        float | None, typer.Option(help="Relative standard deviation of a step's time.")
    ] = None,
    budget_tokens: Annotated[float | None, typer.Option(help="Of the whole run. Default: 1.")] = None,
    up_mbps: Annotated[
        float | None, typer.Option(help="An island's uplink, Mbit/s. Default: unlimited.")
    ] = None,
    down_mbps: Annotated[float | None, typer.Option(help="Its downlink.")] = None,
    hub_mbps: Annotated[
        float | None, typer.Option(help="The syncer's own line, each way, shared by all learners.")
    ] = None,
    latency_s: Annotated[float | None, typer.Option(help="One way.")] = None,
    merge_s: Annotated[float | None, typer.Option(help="Of a merge at the syncer.")] = None,
    mtbi_days: Annotated[
        float | None, typer.Option(help="Mean time between interruptions of one chip. Default: never.")
    ] = None,
    away_s: Annotated[float | None, typer.Option(help="Mean seconds until failed chips are back.")] = None,
    stands_s: Annotated[
        float | None,
        typer.Option(help="Seconds that a learner stands to go on without chips, or to take them in."),
    ] = None,
    elastic: Annotated[
        bool | None, typer.Option("--elastic/--not-elastic", help="A learner goes on without failed chips.")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="Only this: decoupled, streaming, diloco, sparseloco, gasloc; may be repeated."),
    ] = None,
    learners: Annotated[Ints, typer.Option(help="Only this M; may be repeated, as all that follow.")] = None,
    quorum: Annotated[Ints, typer.Option(help="K.")] = None,
    sync_every: Annotated[Ints, typer.Option(help="H, steps.")] = None,
    fragments: Annotated[Ints, typer.Option(help="P.")] = None,
    overlap: Annotated[Ints, typer.Option(help="tau, steps.")] = None,
    codec: Annotated[list[str] | None, typer.Option(help="fp32, bf16, int8, int4, ...")] = None,
    downlink_codec: Annotated[
        list[str] | None, typer.Option(help="Of increments to versions; fp32: versions go down as they are.")
    ] = None,
    max_loss: Annotated[
        float, typer.Option(help="Percent of loss that may be paid, as far as measured.")
    ] = 3.0,
    simulated: Annotated[int, typer.Option(help="So many candidates go through the simulator.")] = SHOWN,
    max_seeds: Annotated[int, typer.Option(help="Of the simulator, at most so many.")] = 12,
    seed: Annotated[int, typer.Option(help="Of chance: equal seeds give equal results.")] = 0,
    everything: Annotated[
        bool, typer.Option("--all", help="Show every candidate, not only the best.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Plan a run: the best method, M, K, H, P, tau and codec for given islands, links and failures.

    Every candidate is told with its time, goodput and bytes, and what limits it. What it costs in loss is
    said only where a study measured it. --check compares a finished run with its prediction (docs/plan.md).
    """
    values = {
        name: value
        for name, value in {
            "params": params, "scale": scale, "model_bytes": model_bytes, "islands": islands, "chips": chips,
            "step_s": step_s, "tokens_per_s": tokens_per_s, "tokens_per_step": tokens_per_step,
            "slowest": slowest, "jitter": jitter, "budget_tokens": budget_tokens, "up_mbps": up_mbps,
            "down_mbps": down_mbps, "hub_mbps": hub_mbps, "latency_s": latency_s, "merge_s": merge_s,
            "mtbi_days": mtbi_days, "away_s": away_s, "stands_s": stands_s, "elastic": elastic,
        }.items()
        if value is not None
    }  # fmt: skip
    choice = {
        "methods": method, "learners": learners, "quorums": quorum, "steps": sync_every, "fragments": fragments,
        "overlaps": overlap, "codecs": codec, "downlink_codecs": downlink_codec,
    }  # fmt: skip
    chosen = {name: tuple(value) for name, value in choice.items() if value}
    if check is not None:
        if file is not None or values or chosen:
            raise UserError("--check takes a run as it was: give nothing else with it, but --json")
        _check(check, as_json)
        return
    from farflung.plan.judging import EFFORT, Wish
    from farflung.simulate.cluster import require

    require(max_loss >= 0, "max_loss", max_loss, "at least 0")
    require(simulated >= 0, "simulated", simulated, "at least 0")
    require(max_seeds >= 2, "max_seeds", max_seeds, "at least 2")
    require(seed >= 0, "seed", seed, "at least 0")
    effort = replace(EFFORT, max_seeds=max_seeds, seed=seed)
    _plan(
        file, values, chosen, Wish(max_loss=max_loss, simulated=simulated, effort=effort), everything, as_json
    )


def _plan(
    file: Path | None,
    values: dict[str, Any],
    chosen: dict[str, Any],
    wish: Any,
    everything: bool,
    as_json: bool,
) -> None:
    from farflung.plan import show
    from farflung.plan.candidate import Choices, candidates
    from farflung.plan.judging import judge, reference
    from farflung.plan.reading import make_setting, read_file, without

    own = None
    if file is not None:
        found, own = read_file(file)
        values = {**without(found, values), **values}
    setting = make_setting(values)
    listed = list(candidates(setting, Choices(**chosen)))
    if own is not None and setting.islands == own.learners:
        listed = [own, *(c for c in listed if c.policy != own.policy)]
    with Console(stderr=True).status("") as status:
        judged = judge(setting, listed, wish, lambda c: status.update(f"simulating {c.method}"))
        beaten = reference(setting, wish.effort)
    if as_json:
        named = {"setting": show.plain(setting), "data_parallel": beaten}
        print(json.dumps({**named, "candidates": [one.as_dict() for one in judged]}))
        return
    best = judged if everything else [one for one in judged if one.simulated] or judged[:SHOWN]
    console = Console(width=max(Console().width, show.WIDTH))
    console.print(show.plan_table(setting, best, beaten))
    for line in show.notes(best):
        console.print(line, style="dim", markup=False)
    console.print(
        f"{len(judged)} candidates; --all shows them, --json has every figure", style="dim", markup=False
    )


def _check(run_dir: Path, as_json: bool) -> None:
    import os
    import sys

    from farflung.plan import show
    from farflung.plan.check import as_json as figures_as_json
    from farflung.plan.check import check
    from farflung.plan.past import read_past

    sys.path.insert(0, os.getcwd())  # a recipe's own task lives beside it
    with Console(stderr=True).status(f"rehearsing {run_dir}"):
        past = read_past(run_dir)
        figures = check(run_dir, past)
    if as_json:
        print(figures_as_json(run_dir, figures, past.not_predicted))
        return
    Console().print(show.check_table(str(run_dir), figures))
    for line in past.not_predicted:
        Console().print(line, markup=False, highlight=False)
