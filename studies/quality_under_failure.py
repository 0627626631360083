"""What do a million chips' failures cost a training in quality? (Decoupled DiLoCo, Tables 2 and 3)"""

from functools import cache
from typing import Any

from matplotlib.figure import Figure

from farflung.chaos.plan import Fault
from farflung.simulate.presets import TABLE1_FIT
from farflung.simulate.trace import Reading, faults_of
from studies.harness import INNER_LR, SEEDS, Cell, Claim, Row, Study, base_recipe, mean, paired, where
from studies.pages import BLUE, GREEN, GREY, RED, change, label, losses, markdown, panels, percent
from studies.pages import page as write_page

CHIPS = 1_200_000
NUM_LEARNERS = 8
STEPS = 320  # a learner, of a second each, without failures
BEFORE_S = 300.0  # of the trace, in which nobody trains yet: as many chips are away as ever after
TRACE_S = 1200.0
TOLERANCE = 0.01  # two runs that differ by a rounding error end about so far apart (studies/harness.py)

CALM_DP, CALM = "data-parallel, no failures", "decoupled, no failures"
JOB, EIGHTHS, FREE = "data-parallel, elastic", "data-parallel, elastic by eighths", "decoupled"
LRS = {CALM_DP: (INNER_LR, 2 * INNER_LR, 4 * INNER_LR), CALM: (INNER_LR, 2 * INNER_LR)}
"""Inner lrs that were tried without failures, at the first seed."""
VARIANTS: dict[str, Reading | None] = {
    CALM_DP: None, JOB: "job", EIGHTHS: "chips", CALM: None, FREE: "islands",
}  # fmt: skip
"""Variant -> how it reads the trace."""

QUESTION = """1.2 million chips fail so often that one synchronous job stands half of the time. What does
training through such a trace lose, for the same tokens and in the same time? (Decoupled DiLoCo, Tables 2 and
3: text 70.1 without failures, 69.7 elastic data-parallel, 69.8 decoupled)"""

SETUP = """Failures of 1.2M chips, each once a year, from `farflung simulate` (its fit of Table 1), as a fault
plan, another for every seed; a step takes 1 s, so no time is scaled. "elastic": all chips are one job, which
stands 15 s to leave a failed chip, and to take it back. "by eighths": a learner is the least that the job can
leave. Decoupled: eight islands, each standing for its own failures; P = H = 24, tau = 2, K = 1 with grace.
Data-parallel has free links; each method has the best inner lr of those tried. Scale micro, 320 steps a
learner of 4 windows; "equal time": the tokens of 320 s. Three seeds, paired; by eighths one. For equal tokens
the elastic job was not run: its model is that without failures, bit for bit (a test); its time is reckoned."""

MEANING = """Failures do to decoupled what the paper says: it takes nine tenths of its steps, and what it
trains for the same tokens is as good as without failures, to about what a rounding error moves a run here. In
equal time they cost it a small part of what they cost the elastic job. The comparison across methods does not
carry over: without any failure decoupled is far behind data-parallel for the same tokens. The likely cause:
13 rounds of so small a model reward one large batch with a large lr, which learners that see four windows
each cannot use (a larger inner lr made it worse; H = 8 gained little, in one run). So in equal time they are
about level: goodput gives decoupled nearly twice the tokens, and the early lag takes them back."""

LIMITS = """Scores of a 5B model, or whether the methods meet in longer runs. The best inner lr lies at the
edge of what was tried. Lost work: the job keeps its state in memory and loses time, no steps."""


def plan(rows: list[Row]) -> list[Cell]:
    """Both methods without failures at a grid of learning rates; then everything at the best of each."""
    cells = [_cell(variant, SEEDS[0], lr) for variant, lrs in LRS.items() for lr in lrs]
    slow, free = best_lr(rows, CALM_DP), best_lr(rows, CALM)
    if slow is None or free is None:
        return cells
    for seed in SEEDS:
        cells += [_cell(FREE, seed, free), _cell(FREE, seed, free, "time"), _cell(JOB, seed, slow, "time")]
        if seed != SEEDS[0]:
            cells += [_cell(CALM_DP, seed, slow), _cell(CALM, seed, free)]
    return [*cells, _cell(EIGHTHS, SEEDS[0], slow)]


def best_lr(rows: list[Row], calm: str) -> float | None:
    """The inner lr at which a method does best without failures at the first seed, once all were tried."""
    tried = [
        r for r in where(rows, variant=calm) if r["seed"] == SEEDS[0] and r["parameters"]["lr"] in LRS[calm]
    ]
    if len(tried) < len(LRS[calm]):
        return None
    return float(min(tried, key=lambda row: float(row["eval_loss"]))["parameters"]["lr"])


def _cell(variant: str, seed: int, lr: float, at: str = "tokens") -> Cell:
    """One run: the whole token budget, or what the trace leaves of it in the time without failures."""
    reading = VARIANTS[variant]
    steps, options = STEPS, {}
    if reading is not None:
        goodputs, faults = _trace(seed, reading)
        steps = round(STEPS * goodputs) if at == "time" else STEPS
        options = {"faults": faults}
    recipe = base_recipe(seed, num_learners=NUM_LEARNERS, steps=steps, lr=lr, **options)
    if variant in (CALM_DP, JOB, EIGHTHS):
        elastic = {"elastic": True, "reconfigure_s": TABLE1_FIT.reconfigure_s}
        recipe |= {"method": "data_parallel", "policy": elastic if variant == EIGHTHS else {}}
        recipe["lab"] |= {"latency_s": 0.0}
    return Cell(parameters={"variant": variant, "at": at, "lr": lr}, recipe=recipe)


@cache
def _trace(seed: int, reading: Reading) -> tuple[float, list[dict[str, Any]]]:
    """Share of the time without failures in which islands run, and the faults, as a recipe has them."""
    lives, faults = faults_of(TABLE1_FIT.cluster(CHIPS), NUM_LEARNERS, BEFORE_S + TRACE_S, seed, reading)
    until_s = BEFORE_S + STEPS
    stood_s = sum(
        max(0.0, min(end, until_s) - max(start, BEFORE_S)) for life in lives for start, end in life.downs()
    )
    return 1 - stood_s / len(lives) / STEPS, [later for fault in faults for later in _later(fault)]


def _later(fault: Fault) -> list[dict[str, Any]]:
    """A freeze `BEFORE_S` earlier, as far as it is not over by then."""
    start_s = (fault.at_s or 0.0) - BEFORE_S
    end_s = round(start_s + (fault.for_s or 0.0), 6)
    at_s = round(max(0.0, start_s), 6)
    told = {"kind": fault.kind, "target": fault.target, "at_s": at_s, "for_s": round(end_s - at_s, 6)}
    return [told] if end_s > at_s else []


def of(rows: list[Row], variant: str, at: str = "tokens") -> list[Row]:
    """A variant's rows at the best inner lr of its method."""
    lr = best_lr(rows, CALM if variant in (CALM, FREE) else CALM_DP)
    return where(rows, variant=variant, at=at, lr=lr)


def claims(rows: list[Row]) -> list[Claim]:
    calm_dp, calm, free = of(rows, CALM_DP), of(rows, CALM), of(rows, FREE)
    against_dp, against_calm = paired(free, calm_dp), paired(free, calm)
    by_eighths = paired(of(rows, EIGHTHS), calm_dp)
    early, late = of(rows, FREE, "time"), of(rows, JOB, "time")
    own, theirs = paired(early, calm), paired(late, calm_dp)
    off = [abs(row["goodput"] - _trace(row["seed"], "islands")[0]) for row in early]
    return [
        Claim(
            claim="the lab under the plan has the goodput of the trace (within 2 points)",
            figure=f"off by {percent(max(off))} at most; what is off is the hand-in", holds=max(off) < 0.02,
        ),
        Claim(
            claim="equal tokens: failures cost decoupled nothing (within 1 %)",
            figure=change(against_calm), holds=sum(against_calm) / len(against_calm) < TOLERANCE,
        ),
        Claim(
            claim="equal tokens: decoupled under failures has the loss of data-parallel without (within 1 %)",
            figure=change(against_dp), holds=sum(against_dp) / len(against_dp) < TOLERANCE,
        ),
        Claim(
            claim="equal time: decoupled is better than elastic data-parallel, at every seed",
            figure=change(paired(early, late)), holds=max(paired(early, late)) < 0,
        ),
        Claim(
            claim="equal time: failures cost decoupled less than elastic data-parallel, each against itself "
            "without failures",
            figure=f"{change(own)} against {change(theirs)}", holds=max(own) < min(theirs),
        ),
        Claim(
            claim="equal tokens by eighths: a smaller batch costs elastic data-parallel nothing (within 1 %)",
            figure=f"{change(by_eighths)}, in {mean(of(rows, EIGHTHS), 'virtual_s') / STEPS:.1f} times the time",
            holds=sum(by_eighths) / len(by_eighths) < TOLERANCE,
        ),
    ]  # fmt: skip


COLOURS = {CALM_DP: GREY, JOB: RED, EIGHTHS: RED, CALM: GREEN, FREE: BLUE}


def picture(rows: list[Row]) -> Figure:
    """Loss of every variant at equal tokens, and at equal time; a dot a seed."""
    figure, axes = panels(2, height=2.6, sharex=True, sharey=True)
    names = [*VARIANTS][::-1]
    for ax, at, title in zip(axes, ("tokens", "time"), ("equal tokens", "equal time"), strict=True):
        for y, name in enumerate(names):
            cells = _shown(rows, name, at)
            ax.plot([c["eval_loss"] for c in cells], [y] * len(cells), "o", color=COLOURS[name], markersize=5)
        ax.set_yticks(range(len(names)), names)
        label(ax, "", f"held-out loss at {title}, nats")
    return figure


def _shown(rows: list[Row], variant: str, at: str) -> list[Row]:
    """Rows of a variant; without failures equal tokens are equal time; elastic ends as without failures."""
    if VARIANTS[variant] is None:
        return of(rows, variant)
    return of(rows, CALM_DP) if (variant, at) == (JOB, "tokens") else of(rows, variant, at)


def page(rows: list[Row], claims: list[Claim]) -> str:
    head = ["variant", "inner lr", "loss at equal tokens", "against data-parallel", "goodput", "time", "merged",
            "loss at equal time", "against data-parallel "]  # fmt: skip
    reference, body = of(rows, CALM_DP), []
    for name in VARIANTS:
        cells, timed = _shown(rows, name, "tokens"), _shown(rows, name, "time")
        own = of(rows, name) or timed
        goodput = mean(own, "goodput")
        time_s = STEPS / goodput if name == JOB else mean(own, "virtual_s")
        body.append([
            name, f"{own[0]['parameters']['lr']:g}", losses(cells), change(paired(cells, reference)),
            percent(goodput), f"{time_s:.0f} s", percent(mean(own, "merged_share")),
            losses(timed) if timed else "–", change(paired(timed, reference)) if timed else "–",
        ])  # fmt: skip
    return write_page(
        "quality_under_failure", "Quality under the failures of 1.2M chips",
        question=QUESTION, setup=SETUP, table=markdown(head, body), meaning=MEANING, limits=LIMITS, claims=claims,
    )  # fmt: skip


STUDY = Study(name="quality_under_failure", plan=plan, claims=claims, picture=picture, page=page)
