"""Can unequal learners train together without waiting? (Decoupled DiLoCo, Table 5)"""

from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from studies.harness import OUTER_LR, SEEDS, Cell, Claim, Row, Study, base_recipe, mean, paired, where
from studies.pages import BLUE, GREEN, RED, change, label, losses, markdown, panels, percent
from studies.pages import page as write_page

NUM_LEARNERS = 8
SLOWEST_S = 1.18  # of a step; all others take 1 s
JITTER = 0.1
TAU = 2

VARIANTS: dict[str, dict[str, Any]] = {
    "K=8": {"quorum": 8, "max_lead_steps": TAU},
    "K=8, lockstep": {"quorum": 8, "pace": "lockstep"},
    "K=1": {"quorum": 1, "grace_gamma": 0.0},
    "K=1 + grace": {"quorum": 1},
    "K=1 + grace + rebase": {"quorum": 1, "adoption": "rebase"},
    "K=1 + rebase, lr/8": {
        "quorum": 1, "grace_gamma": 0.0, "adoption": "rebase", "outer_lr": OUTER_LR / NUM_LEARNERS,
    },
    "K=1 + rebase": {"quorum": 1, "grace_gamma": 0.0, "adoption": "rebase"},
}  # fmt: skip
AT_ONE_SEED: dict[str, dict[str, Any]] = {
    "K=1 + rebase, lr/2": VARIANTS["K=1 + rebase"] | {"outer_lr": OUTER_LR / 2},
    "K=1 + rebase, lr/4": VARIANTS["K=1 + rebase"] | {"outer_lr": OUTER_LR / 4},
    "K=1 + rebase, base": VARIANTS["K=1 + rebase"] | {"anchor": "base"},
}

REASONS = ["late", "superseded", "overlap"]
FAR = 1.06  # times the loss of K = 8: beyond the edge of the picture

QUESTION = """When one of eight learners is slower, what does waiting for it cost, what does not waiting
cost, and can the work of late learners be saved without waiting at all? (Decoupled DiLoCo, Table 5)"""

SETUP = """Eight learners, seven with a step of 1 s, one of 1.18 s (18 % slower), each step with 10 %
jitter; 0.02 s of latency, 0.05 s a merge. Method decoupled: P = H = 24, tau = 2, outer lr 0.7 unless said
otherwise. Scale micro, 800 steps a learner of 4 windows, inner lr 4e-3, outer momentum 0.5 (why:
`studies/harness.py`); three seeds, paired by weights and data order. All variants have one token budget and
equal step times; those with another lr or anchor run at one seed."""

MEANING = """In free pace K = 8 costs almost no goodput: a round does not ask that the slow learner has done
as many steps as the others, only that it ends one, where it answers every open round; 1.18 s fit into tau =
2 steps. The paper's 84 % appears when a round belongs to each learner's own step of that number: in
lockstep, (7 / 1.18 + 1) / 8 = 87 %. K = 1 without grace merges whoever comes first; the work of the other
seven is late or superseded. Grace gets it back at no goodput, as in the paper. Rebase saves every token
without waiting and trains the worst models: each round applies one learner's window of about eight H steps
as if it were everybody's, so works are added, not averaged. A smaller outer lr cures that, yet stays behind
even throwing the work away: a learner is heard every eighth round, which is like an eight times longer H.
Saving late work takes a broad merge, and breadth is what grace buys."""

LIMITS = """Slower links: here transfers take 2 % of a step, so bases are never old and the anchor cannot
matter (equal digests). Learners several times slower, with another quorum. Differences below about 1 % are
within those between seeds."""


def plan(rows: list[Row]) -> list[Cell]:
    """All variants at all seeds; some more at the first."""
    cells = [_cell(name, seed, policy) for seed in SEEDS for name, policy in VARIANTS.items()]
    return cells + [_cell(name, SEEDS[0], policy) for name, policy in AT_ONE_SEED.items()]


def _cell(name: str, seed: int, policy: dict[str, Any]) -> Cell:
    lab = {"step_s": [1.0] * (NUM_LEARNERS - 1) + [SLOWEST_S], "jitter": JITTER}
    policy = {"overlap_steps": TAU, **policy}
    recipe = base_recipe(seed, num_learners=NUM_LEARNERS, policy=policy, lab=lab)
    return Cell(parameters={"variant": name}, recipe=recipe)


def claims(rows: list[Row]) -> list[Claim]:
    def of(name: str) -> list[Row]:
        return where(rows, variant=name)

    def worse(name: str) -> list[float]:
        return paired(of(name), of("K=8"))

    goodput = {name: mean(of(name), "goodput") for name in VARIANTS}
    anchors = {where(rows, variant=name)[0]["digest"] for name in ("K=1 + rebase", "K=1 + rebase, base")}
    saved = {
        name: fmean(worse(name)) for name in [*VARIANTS, *AT_ONE_SEED] if name.startswith("K=1 + rebase")
    }
    best = min(saved, key=lambda name: saved[name])
    return [
        Claim(
            claim="K = 8 with max_lead_steps = tau loses goodput near the slow learner's share (84 %)",
            figure=percent(goodput["K=8"]), holds=goodput["K=8"] < 0.9,
        ),
        Claim(
            claim="K = 8 in lockstep does",
            figure=percent(goodput["K=8, lockstep"]), holds=0.8 < goodput["K=8, lockstep"] < 0.9,
        ),
        Claim(
            claim="K = 1 + grace has the goodput of K = 1 (within half a point)",
            figure=f"{percent(goodput['K=1 + grace'], 2)} against {percent(goodput['K=1'], 2)}",
            holds=abs(goodput["K=1 + grace"] - goodput["K=1"]) < 0.005,
        ),
        Claim(
            claim="K = 1 without grace trains worse models (by more than 1 %)",
            figure=change(worse("K=1")), holds=fmean(worse("K=1")) > 0.01,
        ),
        Claim(
            claim="K = 1 + grace has the loss of K = 8 (within 0.5 %)",
            figure=change(worse("K=1 + grace")), holds=fmean(worse("K=1 + grace")) < 0.005,
        ),
        Claim(
            claim="K = 1 + grace + rebase has the loss of K = 8 (within 0.5 %)",
            figure=change(worse("K=1 + grace + rebase")), holds=fmean(worse("K=1 + grace + rebase")) < 0.005,
        ),
        Claim(
            claim="without any waiting, rebase saves late work: the loss of K = 8 (within 0.5 %)",
            figure=change(worse("K=1 + rebase")), holds=fmean(worse("K=1 + rebase")) < 0.005,
        ),
        Claim(
            claim="with some smaller outer lr it does",
            figure=f"at best {change(worse(best))} ({best})", holds=saved[best] < 0.005,
        ),
        Claim(
            claim="it is at least better than K = 1 that overwrites",
            figure=f"{change(worse(best))} ({best}) against {change(worse('K=1'))}",
            holds=saved[best] < fmean(worse("K=1")),
        ),
        Claim(
            claim="anchor present or base: the same model, bit for bit, because nobody's base is old here",
            figure="equal digests" if len(anchors) == 1 else "different digests", holds=len(anchors) == 1,
        ),
    ]  # fmt: skip


def picture(rows: list[Row]) -> Figure:
    """Loss and goodput of every variant, a dot a seed."""
    figure, (left, right) = panels(2, height=3.2, sharey=True)
    names = [name for name in [*VARIANTS, *AT_ONE_SEED] if not name.endswith(", base")][::-1]
    edge = FAR * mean(where(rows, variant="K=8"), "eval_loss")
    for y, name in enumerate(names):
        colour, cells = GREEN if "rebase" in name else BLUE, where(rows, variant=name)
        losses_near = [cell["eval_loss"] for cell in cells if cell["eval_loss"] < edge]
        left.plot(losses_near, [y] * len(losses_near), "o", color=colour, markersize=5, alpha=0.8)
        if far := [cell["eval_loss"] for cell in cells if cell["eval_loss"] >= edge]:
            left.plot(edge, y, ">", color=RED, markersize=6)
            text = f"{min(far):.2f}" if len(far) == 1 else f"{min(far):.2f} to {max(far):.2f}"
            style: dict[str, Any] = {
                "textcoords": "offset points",
                "ha": "right",
                "fontsize": 8,
                "color": RED,
            }
            left.annotate(text, (edge, y), (-7, -3), **style)
        right.plot([cell["goodput"] for cell in cells], [y] * len(cells), "o", color=colour, markersize=5)
    left.set_yticks(range(len(names)), names)
    right.set_xlim(0.8, 1.01)
    right.set_xticks([0.8, 0.85, 0.9, 0.95, 1.0])
    right.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    label(left, "", "held-out loss at the end, nats")
    label(right, "", "goodput")
    return figure


def page(rows: list[Row], claims: list[Claim]) -> str:
    head = ["variant", "loss", "against K=8", "goodput", "merged", *REASONS, "breadth", "time"]
    reference = where(rows, variant="K=8")
    body = []
    for name in [*VARIANTS, *AT_ONE_SEED]:
        cells = where(rows, variant=name)
        lost = [percent(fmean(c["discarded"].get(r, 0.0) for c in cells)) for r in REASONS]
        body.append([
            name, losses(cells), change(paired(cells, reference)), percent(mean(cells, "goodput")),
            percent(mean(cells, "merged_share")), *lost, f"{mean(cells, 'round_breadth'):.2f}",
            f"{mean(cells, 'virtual_s'):.0f} s",
        ])  # fmt: skip
    return write_page(
        "heterogeneous", "Unequal learners, and who waits for whom",
        question=QUESTION, setup=SETUP, table=markdown(head, body), meaning=MEANING, limits=LIMITS, claims=claims,
    )  # fmt: skip


STUDY = Study(name="heterogeneous", plan=plan, claims=claims, picture=picture, page=page)
