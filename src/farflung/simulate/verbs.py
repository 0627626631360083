"""``farflung simulate``: options in, a table, JSON or a picture out."""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from farflung.errors import UserError
from farflung.units import MIB

DAY_S, HOUR_S = 86_400.0, 3600.0

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output, nothing else.")
]


OF_A_PRESET = ("preset", "half_width", "max_seeds", "seed", "picture", "as_json")


def simulate(
    context: typer.Context,
    preset: Annotated[
        str | None,
        typer.Option(
            help="A paper's table: table1, table4, table5, bandwidth; and table1_correlated, table1_gasloc."
        ),
    ] = None,
    method: Annotated[
        str, typer.Option(help="data_parallel, diloco, streaming, decoupled or gasloc.")
    ] = "decoupled",
    learners: Annotated[int | None, typer.Option(help="M, islands. Default: 8; data_parallel: 1.")] = None,
    chips: Annotated[int, typer.Option(help="Of the whole cluster.")] = 1_200_000,
    mtbi_days: Annotated[float, typer.Option(help="Mean time between interruptions of one chip.")] = 365.0,
    elastic: Annotated[bool, typer.Option(help="An island goes on without failed chips.")] = True,
    down_s: Annotated[
        float, typer.Option(help="Seconds that an island stands to go on without chips.")
    ] = 15.0,
    up_s: Annotated[float, typer.Option(help="... to take chips in again, or to restart.")] = 15.0,
    away_s: Annotated[float, typer.Option(help="Mean seconds until failed chips are back.")] = 62.0,
    away_shape: Annotated[float, typer.Option(help="Shape of that time (exponentiated Weibull).")] = 1.0,
    away_exponent: Annotated[float, typer.Option(help="Exponent of that time.")] = 1.0,
    speed_spread: Annotated[float, typer.Option(help="Relative standard deviation of chips' speeds.")] = 0.0,
    checkpoint_every_s: Annotated[
        float,
        typer.Option(
            help="Running seconds between checkpoints that a failure goes back to; 0: nothing is lost."
        ),
    ] = 0.0,
    checkpoint_cost_s: Annotated[float, typer.Option(help="Seconds that each checkpoint takes.")] = 0.0,
    burst: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=CHIPS/DAYS", help="Chips that fail together, as host=8/730; may be repeated."
        ),
    ] = None,
    outage: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=DOMAINS/DAYS/HOURS",
            help="Parts of the cluster that go dark, as region=8/30/4: eight, each once in 30 days for 4 h.",
        ),
    ] = None,
    quorum: Annotated[int | None, typer.Option(help="K.")] = None,
    fragments: Annotated[int | None, typer.Option(help="P.")] = None,
    sync_every: Annotated[int | None, typer.Option(help="H, steps.")] = None,
    overlap: Annotated[int | None, typer.Option(help="tau, steps.")] = None,
    max_lead: Annotated[
        int | None, typer.Option(help="Steps that a learner may be ahead of the syncer.")
    ] = None,
    grace_gamma: Annotated[float | None, typer.Option(help="Share of the slack that grace may use.")] = None,
    codec: Annotated[str | None, typer.Option(help="fp32, bf16, int8, int4, 2bit or 1bit.")] = None,
    downlink_codec: Annotated[
        str | None, typer.Option(help="Of increments to versions; without: fp32 state goes down.")
    ] = None,
    step_s: Annotated[float, typer.Option(help="Seconds of a step.")] = 1.0,
    slowest: Annotated[
        float, typer.Option(help="How much longer one learner's step takes; 0.18: 18 % slower.")
    ] = 0.0,
    jitter: Annotated[float, typer.Option(help="Relative standard deviation of a step's time.")] = 0.0,
    params: Annotated[float, typer.Option(help="Of the model, for bytes and transfer times.")] = 0.0,
    up_mbps: Annotated[float, typer.Option(help="A learner's uplink, Mbit/s; inf costs no time.")] = math.inf,
    down_mbps: Annotated[float, typer.Option(help="Its downlink.")] = math.inf,
    latency_s: Annotated[float, typer.Option(help="One way.")] = 0.0,
    merge_s: Annotated[float, typer.Option(help="Of a merge at the syncer.")] = 0.0,
    tokens_per_step: Annotated[float, typer.Option(help="Of one learner.")] = 1.0,
    half_width: Annotated[float, typer.Option(help="Of goodput's 95 % interval, at which to stop.")] = 0.01,
    max_seeds: Annotated[int, typer.Option(help="At most so many.")] = 64,
    seed: Annotated[int, typer.Option(help="Of chance: equal seeds give equal results.")] = 0,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write the islands' failures as a fault plan for `lab` and `run`, and stop."),
    ] = None,
    trace_for_s: Annotated[float, typer.Option(help="Simulated seconds of the trace.")] = 1000.0,
    time_scale: Annotated[
        float, typer.Option(help="Seconds of the plan a simulated second: step time of the run / --step-s.")
    ] = 1.0,
    reading: Annotated[
        str,
        typer.Option(
            help="islands: they stand while they reconfigure. job: all chips are one job, which stands. "
            "chips: a learner is away as long as its chip."
        ),
    ] = "islands",
    picture: Annotated[
        Path | None, typer.Option(help="Of a preset: write a picture (svg, png, pdf).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate the goodput of many chips that fail: how many learners, which K, H, P, tau, codec.

    Islands live event by event through the failures of their chips; rounds open and close by the code that trains.
    All shares are fractions. A preset prints its cells beside the published values (docs/simulate.md).
    """
    from farflung.simulate import presets, show
    from farflung.simulate.cluster import Cluster, require
    from farflung.simulate.returns import Returns
    from farflung.simulate.scenario import Links, Scenario, policy_of
    from farflung.simulate.simulating import Effort
    from farflung.simulate.simulating import simulate as simulated

    require(0 < half_width < 1, "half_width", half_width, "above 0 and below 1")
    require(max_seeds >= 2, "max_seeds", max_seeds, "at least 2")
    require(seed >= 0, "seed", seed, "at least 0")
    effort = Effort(half_width=half_width, max_seeds=max_seeds, seed=seed)
    if preset is not None:
        _only_of_a_preset(context)
        _preset(presets.preset(preset), preset, effort, picture, as_json)
        return
    if picture is not None:
        raise UserError("--picture draws a preset: give --preset")
    cluster = Cluster(
        chips=chips, mtbi_s=mtbi_days * DAY_S, elastic=elastic, down_s=down_s, up_s=up_s,
        returns=Returns.of_mean(away_s, away_shape, away_exponent), speed_spread=speed_spread,
        checkpoint_every_s=checkpoint_every_s, checkpoint_cost_s=checkpoint_cost_s,
        bursts=tuple(_burst(text) for text in burst or ()), outages=tuple(_outage(text) for text in outage or ()),
    )  # fmt: skip
    options = {
        "quorum": quorum, "num_fragments": fragments, "sync_every_steps": sync_every, "overlap_steps": overlap,
        "max_lead_steps": max_lead, "grace_gamma": grace_gamma, "codec": codec,
        "downlink_codec": downlink_codec,
    }  # fmt: skip
    given = {name: value for name, value in options.items() if value is not None}
    if method == "data_parallel" and given:
        raise UserError(f"{', '.join(given)}: no effect with method = data_parallel")
    scenario = Scenario(
        method=method, learners=learners if learners is not None else 1 if method == "data_parallel" else 8,
        cluster=cluster, policy=policy_of(method, given) if given else None, step_s=step_s, slowest=slowest,
        jitter=jitter, tokens_per_step=tokens_per_step,
        links=Links(params=params, up_mbps=up_mbps, down_mbps=down_mbps, latency_s=latency_s, merge_s=merge_s),
    )  # fmt: skip
    if trace is not None:
        _trace(scenario, trace, trace_for_s, time_scale, reading, seed, as_json)
        return
    outcome = simulated(scenario, effort)
    if as_json:
        named = {"method": method, "learners": scenario.learners, "chips": chips}
        print(json.dumps({**named, **outcome.as_dict()}))
    else:
        Console().print(show.outcome_table(outcome))


def _only_of_a_preset(context: typer.Context) -> None:
    """UserError where an option was given that a preset does not use."""
    given = [
        "--" + name.replace("_", "-")
        for name in context.params
        if name not in OF_A_PRESET
        and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if given:
        raise UserError(f"{', '.join(given)}: no effect with --preset, whose scenarios are a paper's")


def _preset(make: Any, name: str, effort: Any, picture: Path | None, as_json: bool) -> None:
    from farflung.simulate import show

    with Console(stderr=True).status(f"simulating {name}"):
        cells = list(make(effort))
    if picture is not None:
        show.picture(picture, name, cells)
    if as_json:
        print(json.dumps({"preset": name, "cells": cells}))
    else:
        Console().print(show.cells_table(name, cells))


def _trace(
    scenario: Any, path: Path, for_s: float, time_scale: float, reading: Any, seed: int, as_json: bool
) -> None:
    from farflung.simulate import trace
    from farflung.simulate.cluster import require

    require(0 < for_s < math.inf, "trace_for_s", for_s, "above 0")
    lives, faults = trace.faults_of(scenario.cluster, scenario.learners, for_s, seed, reading, time_scale)
    what = f"{scenario.cluster.chips} chips, {scenario.learners} learners, {for_s:g} s, seed {seed}"
    trace.write(path, faults, f"{what}; 1 s here is {1 / time_scale:g} s there")
    goodput = sum(one.goodput for one in lives) / len(lives)
    found = {"file": str(path), "faults": len(faults), "goodput": goodput}
    print(
        json.dumps(found) if as_json else f"{path}: {len(faults)} faults, goodput {goodput:.3f} in the trace"
    )


def _numbers(text: str, form: str) -> tuple[str, list[float]]:
    name, equals, rest = text.partition("=")
    parts = rest.split("/")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if not equals or not name or len(numbers) != form.count("/") + 1:
        raise UserError(f"{text!r}: write {form}")
    return name, numbers


def _burst(text: str) -> Any:
    from farflung.simulate.cluster import Burst

    name, (chips, days) = _numbers(text, "NAME=CHIPS/DAYS")
    if not 1 <= chips < MIB**2 or chips != int(chips):
        raise UserError(f"{text!r}: chips = {chips:g}: must be a whole number of at least 1")
    return Burst(name=name, chips=int(chips), mtbi_s=days * DAY_S)


def _outage(text: str) -> Any:
    from farflung.simulate.cluster import Outage
    from farflung.simulate.returns import Returns

    name, (domains, days, hours) = _numbers(text, "NAME=DOMAINS/DAYS/HOURS")
    if not 1 <= domains < MIB or domains != int(domains):
        raise UserError(f"{text!r}: domains = {domains:g}: must be a whole number of at least 1")
    return Outage(
        name=name, num_domains=int(domains), mtbi_s=days * DAY_S, lasts=Returns.of_mean(hours * HOUR_S)
    )
