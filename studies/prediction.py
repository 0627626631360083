"""Does `farflung plan --check` tell what a real run will do? Real runs, each beside its prediction.

``python -m studies.prediction [CASE...]`` does the runs that are missing, of all cases or of these, one after the
other; each takes about a minute. Results: docs/results/prediction.json, and prediction.md, made from it alone.

Steps are paced so that two cores are not the bottleneck, links are throttled so that they are, and one learner is
killed. Each case is run `RUNS` times; a prediction knows a run's recipe, its faults as they happened and its step
times (`farflung.plan.past`), and nothing of its rounds, bytes and waits.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from farflung.plan.check import FIGURES, check
from farflung.tape import write_atomically

RESULTS = Path(__file__).parents[1] / "docs" / "results"
RUNS = 3
LEARNERS = 4
STEPS = 300
PACE_S = 0.15

Row = dict[str, Any]


def throttles(*mbps: float) -> list[dict[str, Any]]:
    """Thin lines from the first step to the end, learner by learner."""
    return [
        {"kind": "throttle", "target": f"learner-{i}", "mbps": x, "at_s": 0.0, "for_s": 3600.0}
        for i, x in enumerate(mbps)
    ]


def recipe(
    method: str, policy: dict[str, Any], mbps: tuple[float, ...], killed: int, at_progress: float = 0.4
) -> dict[str, Any]:
    """A case. A model of 35 thousand parameters, 140 kB: 0.56 s at 2 Mbit/s, 3.7 steps."""
    kill = {"kind": "kill", "target": f"learner-{killed}", "at_progress": at_progress}
    return {
        "method": method, "policy": policy | {"lease_s": 4.0}, "scale": "micro", "num_learners": LEARNERS,
        "steps": STEPS, "pace_s": PACE_S, "batch_size": 4, "lr": 0.002, "evals": 0, "eval_batches": 2,
        "faults": [*throttles(*mbps), kill],
    }  # fmt: skip


CASES: dict[str, dict[str, Any]] = {
    "decoupled": recipe("decoupled", {"num_fragments": 6, "sync_every_steps": 24}, (2.0, 2.0, 2.0, 1.0), 1),
    "decoupled, thin": recipe(
        "decoupled", {"num_fragments": 6, "sync_every_steps": 24}, (1.0, 1.0, 1.0, 0.5), 1
    ),
    "diloco": recipe("diloco", {"sync_every_steps": 20}, (2.0, 2.0, 2.0, 1.0), 2),
    "gasloc": recipe("gasloc", {"sync_every_steps": 12}, (2.0, 2.0, 2.0, 1.0), 1),
    "sparseloco": recipe("sparseloco", {"sync_every_steps": 20}, (2.0, 2.0, 2.0, 1.0), 3, at_progress=0.2),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.prediction", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all without a name")
    parser.add_argument("--keep", type=Path, help="keep run folders here; one that is here is not run again")
    parser.add_argument(
        "--only-kept", action="store_true", help="run nothing: only predict anew what was kept"
    )
    options = parser.parse_args()
    for name in options.names:
        if name not in CASES:
            parser.error(f"no case {name!r}: there are {', '.join(CASES)}")
    for seed in range(1, RUNS + 1):
        for name in options.names or CASES:
            here = (
                options.keep is not None and (folder_of(options.keep, name, seed) / "summary.json").exists()
            )
            if here if options.only_kept else not known(name, seed):
                row = do(name, seed, options.keep)
                save([*(r for r in load() if (r["case"], r["seed"]) != (name, seed)), row])
                print(f"{name}, run {seed}: {told(row)}", flush=True)
    save(load())


def known(name: str, seed: int) -> bool:
    """Whether this run was done, with the recipe as it is now."""
    return any((r["case"], r["seed"], r["recipe"]) == (name, seed, CASES[name]) for r in load())


def folder_of(keep: Path, name: str, seed: int) -> Path:
    return keep / f"{name.replace(', ', '-')}-{seed}"


def do(name: str, seed: int, keep: Path | None) -> Row:
    """One real run, and what was predicted of it."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if keep is None else keep
        folder.mkdir(parents=True, exist_ok=True)
        run_dir = folder_of(folder, name, seed)
        path = run_dir.with_suffix(".toml")
        path.write_text(toml({**CASES[name], "seed": seed}))
        done = (run_dir / "summary.json").exists()  # kept from before: only its prediction is made anew
        command = [sys.executable, "-m", "farflung.cli", "run", str(path), "--out", str(run_dir), "--json"]
        if not done:
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        figures = {f.name: [f.predicted, f.measured] for f in check(run_dir)}
    return {"case": name, "seed": seed, "figures": figures, "recipe": CASES[name]}


def toml(recipe: dict[str, Any]) -> str:
    """A recipe of plain values, tables and one list of tables."""
    lines = [f"{k} = {json.dumps(v)}" for k, v in recipe.items() if not isinstance(v, dict | list)]
    lines += ["[policy]", *(f"{k} = {json.dumps(v)}" for k, v in recipe["policy"].items())]
    for fault in recipe["faults"]:
        lines += ["[[faults]]", *(f"{k} = {json.dumps(v)}" for k, v in fault.items())]
    return "\n".join(lines) + "\n"


def told(row: Row) -> str:
    return ", ".join(f"{name} {100 * (p / m - 1):+.1f} %" for name, (p, m) in row["figures"].items() if m)


# ---- results -------------------------------------------------------------------------------------------


def load() -> list[Row]:
    path = RESULTS / "prediction.json"
    return json.loads(path.read_bytes())["runs"] if path.is_file() else []


def save(rows: list[Row]) -> None:
    """One line a run; and the page."""
    order = {name: number for number, name in enumerate(CASES)}
    rows = sorted((r for r in rows if r["case"] in order), key=lambda r: (order[r["case"]], r["seed"]))
    lines = ",\n".join(json.dumps(row) for row in rows)
    write_atomically(RESULTS / "prediction.json", f'{{"runs": [\n{lines}\n]}}\n'.encode())
    write_atomically(RESULTS / "prediction.md", page(rows).encode())


HEAD = """# Prediction against reality

**Question.** Does `farflung plan --check` tell from a run's recipe, faults and step times what it will move and
how long it takes?

**Set-up.** Real `farflung run`s, four learners on one machine with two cores, scale micro, 300 steps each of at
least 0.15 s. Links are throttled: three at 2 Mbit/s, one at 1 Mbit/s ("thin": half of that), where the model takes
0.56 s one way. One learner is killed at 40 % of the tokens (sparseloco: 20 %). Three runs a case, on cores
that had nothing else to do. From the run itself a prediction takes step times, an object's and a merge's own time,
and when a killed learner's process was back; nothing else.

Difference of the prediction, median of the runs; in brackets the least and the largest. *Spread*: (largest -
least) / median of what was measured. A promise holds if the median is off by no more than what was promised, 3 %
of bytes and 10 % of goodput and times, or than the spread.

"""


def page(rows: list[Row]) -> str:
    """Made from the rows alone."""
    names = [name for name in FIGURES if any(name in row["figures"] for row in rows)]
    lines = ["| case | runs | " + " | ".join(names) + " |", "| --- | ---: |" + " ---: |" * len(names)]
    broken: list[str] = []
    for case in CASES:
        own = [row["figures"] for row in rows if row["case"] == case]
        if own:
            cells = [cell(case, name, [f[name] for f in own if name in f], broken) for name in names]
            lines.append(f"| {case} | {len(own)} | " + " | ".join(cells) + " |")
    verdict = "Every promise holds." if not broken else "Not kept: " + "; ".join(broken) + "."
    return HEAD + "\n".join(lines) + f"\n\n**{verdict}**\n" + TAIL


def cell(case: str, name: str, pairs: list[list[float]], broken: list[str]) -> str:
    """Median difference, its range, and the spread of what was measured."""
    if not pairs:
        return ""
    offs = sorted(100 * (p / m - 1) for p, m in pairs if m)
    measured = sorted(m for _, m in pairs)
    spread = (measured[-1] - measured[0]) / median(measured) if median(measured) else 0.0
    within, middle = FIGURES[name][1], median(offs)
    if within is not None and abs(middle) > 100 * max(within, spread):
        broken.append(f"{name} of {case}, {middle:+.1f} %")
    return f"{middle:+.1f} % ({offs[0]:+.1f} to {offs[-1]:+.1f}), spread {100 * spread:.0f} %"


TAIL = """
`round_interval_s`: median from one merge to the next; gossip: from a learner's round to its next. `round_s`:
median from a round's opening to its merge; gossip has none. `merges`, `breadth` and `uptime` are not promised.
With K = 1 a few milliseconds decide who is first in a round and who comes within its grace: a prediction does
not know at which moments learners' steps end, so breadth is off by up to half a learner, and a round's length by
some milliseconds. A run may end with one round more or less (sparseloco, run 3).

An earlier series on the same machine with four to nine processes for each core, where starting a learner took up
to 50 s and an object up to 0.1 s beside its line, gave medians within 0.8 % of bytes, 2.3 % of goodput and 3.4 %
of `round_interval_s`; `round_s` was up to 26 % off there, with a spread of 89 %.

Runs: `prediction.json`. Made by `python -m studies.prediction`; do not edit.
"""


if __name__ == "__main__":
    main()
