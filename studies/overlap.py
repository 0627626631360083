"""What does overlap of merging with training cost, and how should a result be adopted? (Streaming DiLoCo)"""

from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from studies.harness import SEEDS, Cell, Claim, Row, Study, base_recipe, mean, paired, where
from studies.pages import (
    AMBER,
    BLUE,
    GREEN,
    RED,
    change,
    label,
    legend,
    line,
    losses,
    markdown,
    panels,
    percent,
)  # fmt: skip
from studies.pages import page as write_page

NUM_LEARNERS = 2
TAUS = [0, 1, 2, 5, 10]
ADOPTIONS: dict[str, dict[str, Any]] = {
    "overwrite": {"adoption": "overwrite", "mix_alpha": 0.0},
    "mix 0.5": {"adoption": "mix", "mix_alpha": 0.5},
    "rebase": {"adoption": "rebase", "mix_alpha": 0.0},
    "rebase, lr 0.5": {"adoption": "rebase", "mix_alpha": 0.0, "outer_lr": 0.5},
}
H, P = 24, 4


QUESTION = """A result that may come tau steps after the snapshot hides transfers and merge behind training.
What does the staleness cost, and does it matter whether a learner overwrites its parameters with the
result, mixes half of it in, or rebases its later work on it? (Streaming DiLoCo: less than 0.2 % loss up to
tau = 10, mixing 0.5)"""

SETUP = """Two equal learners, method streaming in lockstep: a result is adopted exactly tau steps after its
snapshot, however fast the link. P = 4 balanced fragments, H = 24, fp32, Avg, outer lr 0.7 unless said
otherwise. Scale micro, 800 steps a learner of 4 windows, inner lr 4e-3, outer momentum 0.5 (why:
`studies/harness.py`); three seeds, paired by weights and data order. Without overlap there is no later
work, so rebase is overwrite."""

MEANING = """Overlap is cheap, as in the paper: with mix 0.5 no loss is to be seen up to tau = 10, and
without any overlap learners wait 2 % of the time even on these fast links. Overwriting throws tau / H of
the work away, exactly as the ledger says, and still loses little: what is thrown away was done from a point
that is about to be replaced. Rebase throws nothing away and is worse for it at the same outer lr, the more
the longer the overlap, because a round then carries H steps of work instead of H - tau: the outer step
grows by 70 % at tau = 10, and study `merge` shows that more than 0.7 hurts here. With an outer lr of 0.5 it
is even with overwriting: the discarded work was worth little."""

LIMITS = """More learners, larger models, and tau near H. Differences below about 1 % are within those
between seeds: three seeds cannot tell mix from overwrite at small tau. Other outer learning rates for
overwrite and mix were not tried."""


def plan(rows: list[Row]) -> list[Cell]:
    """Without overlap rebase has nothing to keep: it is overwrite."""
    pairs = [(tau, name) for tau in TAUS for name in ADOPTIONS if tau or name != "rebase"]
    return [_cell(tau, name, seed) for seed in SEEDS for tau, name in pairs]


def _cell(tau: int, adoption: str, seed: int) -> Cell:
    """Streaming's lockstep: a result is adopted exactly tau steps after the snapshot."""
    policy = {
        "overlap_steps": tau, "num_fragments": P, "sync_every_steps": H, "fragment_plan": "balanced",
        "codec": "fp32", **ADOPTIONS[adoption],
    }  # fmt: skip
    return Cell(
        parameters={"tau": tau, "adoption": adoption},
        recipe=base_recipe(seed, method="streaming", num_learners=NUM_LEARNERS, policy=policy),
    )


def of(rows: list[Row], tau: int, adoption: str) -> list[Row]:
    """Without overlap rebase is overwrite."""
    return where(rows, tau=tau, adoption=adoption if tau or adoption != "rebase" else "overwrite")


def claims(rows: list[Row]) -> list[Claim]:
    def worse(tau: int, adoption: str) -> list[float]:
        return paired(of(rows, tau, adoption), of(rows, 0, adoption))

    most = TAUS[-1]
    lost = {tau: mean(of(rows, tau, "overwrite"), "merged_share") for tau in TAUS}
    kept = [mean(of(rows, tau, name), "merged_share") for tau in TAUS for name in ("mix 0.5", "rebase")]
    return [
        Claim(
            claim="with mix 0.5, overlap up to tau = 5 costs no more than 0.5 % loss (Streaming DiLoCo: 0.2 %)",
            figure=change(worse(5, "mix 0.5")), holds=fmean(worse(5, "mix 0.5")) < 0.005,
        ),
        Claim(
            claim="and up to tau = 10",
            figure=change(worse(most, "mix 0.5")), holds=fmean(worse(most, "mix 0.5")) < 0.005,
        ),
        Claim(
            claim="overwriting discards tau / H of all work",
            figure=", ".join(f"{percent(1 - lost[tau])} at {tau}" for tau in TAUS),
            holds=all(abs(1 - lost[tau] - tau / H) < 0.02 for tau in TAUS),
        ),
        Claim(
            claim="mix and rebase discard nothing",
            figure=f"merged share at least {percent(min(kept))}", holds=min(kept) == 1.0,
        ),
        Claim(
            claim="at tau = 10 rebase is better than overwriting (by 0.5 %), at the same outer lr",
            figure=change(paired(of(rows, most, "rebase"), of(rows, most, "overwrite"))),
            holds=fmean(paired(of(rows, most, "rebase"), of(rows, most, "overwrite"))) < -0.005,
        ),
        Claim(
            claim="and with a smaller outer lr, 0.5",
            figure=change(paired(of(rows, most, "rebase, lr 0.5"), of(rows, most, "overwrite"))),
            holds=fmean(paired(of(rows, most, "rebase, lr 0.5"), of(rows, most, "overwrite"))) < -0.005,
        ),
    ]  # fmt: skip


def picture(rows: list[Row]) -> Figure:
    figure, (left, right) = panels(2)
    for name, colour in zip(ADOPTIONS, (AMBER, BLUE, RED, GREEN), strict=True):
        found = [(tau, of(rows, tau, name)) for tau in TAUS]
        line(left, name, colour, [(tau, [r["eval_loss"] for r in cells]) for tau, cells in found])
        line(right, name, colour, [(tau, [1 - r["merged_share"] for r in cells]) for tau, cells in found])
    label(left, "tau, steps", "held-out loss, nats")
    label(right, "tau, steps", "discarded share of the work")
    right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    legend(left)
    return figure


def page(rows: list[Row], claims: list[Claim]) -> str:
    columns = [f"{name}, {what}" for name in ADOPTIONS for what in ("loss", "against tau = 0")]
    head = ["tau", *columns, "discarded by overwrite"]
    body = []
    for tau in TAUS:
        cells = [of(rows, tau, name) for name in ADOPTIONS]
        pairs = [
            text
            for name, found in zip(ADOPTIONS, cells, strict=True)
            for text in (losses(found), change(paired(found, of(rows, 0, name))))
        ]
        body.append([tau, *pairs, percent(1 - mean(cells[0], "merged_share"))])
    return write_page(
        "overlap", "Overlap, and how a result is adopted",
        question=QUESTION, setup=SETUP, table=markdown(head, body), meaning=MEANING, limits=LIMITS, claims=claims,
    )  # fmt: skip


STUDY = Study(name="overlap", plan=plan, claims=claims, picture=picture, page=page)
