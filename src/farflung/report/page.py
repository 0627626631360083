"""report.html: one self-contained page for one run, or for several next to each other."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from farflung.errors import UserError
from farflung.protocol.policy import BUFFER_FIELDS, GOSSIP_FIELDS
from farflung.report import gossip_page, overlay, partners, pictures, spans, traffic_page
from farflung.report.folder import Folder, read_folder
from farflung.report.history import Data, History
from farflung.report.markup import Html, bar, details, document, figure, section, table, tag, tile
from farflung.report.pictures import Frame
from farflung.report.rows import rows_for
from farflung.report.story import story
from farflung.report.summary import summary_of
from farflung.report.wording import num_bytes, percent, seconds, short


@dataclass(frozen=True)
class Shown:
    """A run as the page shows it. `label` is unique on the page."""

    label: str
    folder: Folder
    summary: Data

    @property
    def history(self) -> History:
        return self.folder.history

    @property
    def gossip(self) -> bool:
        return self.history.gossip is not None


def render(run_dirs: Path | Sequence[Path]) -> str:
    """The page as text. Without summary.json (interrupted run) the figures are taken from the tape.

    Raises:
        UserError: no folder, not a run folder, or a damaged one.
    """
    paths = [run_dirs] if isinstance(run_dirs, Path) else list(run_dirs)
    if not paths:
        raise UserError("report: name at least one run folder")
    runs = _label([read_folder(path) for path in paths])
    return _one(runs[0]) if len(runs) == 1 else _several(runs)


def _label(folders: list[Folder]) -> list[Shown]:
    summaries = [summary_of(f) | f.summary for f in folders]
    methods = [str(s["method"]) for s in summaries]
    labels = methods if len(set(methods)) == len(methods) else [f.name for f in folders]
    if len(set(labels)) < len(labels):
        labels = [f"{label} {i}" for i, label in enumerate(labels, 1)]
    return [Shown(*each) for each in zip(labels, folders, summaries, strict=True)]


# ---- one run -------------------------------------------------------------------------------------------


def _one(run: Shown) -> str:
    frame = Frame.around([run.history])
    h, name = run.history, run.label
    return document(
        f"farflung: {run.label}",
        tag("h1", f"{run.label}: {_outcome(run)}"),
        tag("p", _lead(run), cls="lead"),
        tag("div", *_tiles(run), cls="tiles"),
        section("What happened", _story(h)),
        section(
            "Who was alive",
            figure(pictures.timeline(h, frame, name), gossip_page.TIMELINE if run.gossip else TIMELINE),
        ),
        section(
            "Loss",
            tag(
                "div",
                figure(pictures.loss_by_tokens(h, frame, name), LOSS_TOKENS),
                figure(pictures.loss_by_time(h, frame, name), LOSS_TIME),
                cls="pair",
            ),
        ),
        _meetings(run, frame),
        section("Traffic", *traffic_page.section_of(run.summary)),
        section("Where the tokens went", *_ledger(run)),
        section("Learners", _learners(run)),
        section("Waits and refusals", *_reasons(h)),
        section("Method and recipe", *_recipe(run)),
    )


def _meetings(run: Shown, frame: Frame) -> Html:
    """Where learners' work came together."""
    h, name = run.history, run.label
    if run.gossip:
        return section("Partners and bytes", gossip_page.pictures(h, frame, name))
    drawn = [
        figure(pictures.breadth(h, frame, name), BREADTH),
        figure(pictures.traffic(h, frame, name), TRAFFIC),
    ]
    return section("Merges and bytes", tag("div", *drawn, cls="pair"))


TIMELINE = (
    "Time in which a learner trained is solid. Below: one mark for every merge of the global parameters."
)
LOSS_TOKENS = "Against tokens of all learners together: what the data bought."
LOSS_TIME = "Against time: what the machines bought."
LOSS_BYTES = "Against bulk bytes up and down, all learners together: what the links bought."
AVERAGES = " Of gossip runs, parameters for averages are included."
BREADTH = "How many learners' work each merge contains. Under the grey line: somebody live was left out."
TRAFFIC = "Contributions go up, new versions come down: bytes so far, as written on the tape."


def _outcome(run: Shown) -> str:
    return str(run.summary.get("outcome") or "interrupted")


def _lead(run: Shown) -> str:
    s, config = run.summary, run.folder.config
    budget = run.history.budget_tokens
    of = f" of {short(budget)}" if budget else ""
    task = f" on {config['task']}" if config.get("task") else ""
    what = f"rounds ended, {s['meetings']['total']} meetings" if run.gossip else "merges"
    return (
        f"{s['num_learners']} learners{task}, {short(s['tokens_trained'])}{of} tokens "
        f"in {seconds(s['wall_s'] or 0)}, {s['steps']} inner steps, {s['merges']} {what}."
    )


def _tiles(run: Shown) -> list[Html]:
    rows = rows_for([run.summary])
    return [tile(name, row.value(run.summary), why) for row, name, why in rows if row.headline]


def _story(history: History) -> Html:
    items = [
        tag("li", tag("time", seconds(line.t)), tag("span", line.text), cls=line.tone)
        for line in story(history)
    ]
    return tag("ol", *items, cls="story")


def _ledger(run: Shown) -> list[object]:
    fates = run.summary["token_fragments"]
    known = fates["merged"] + sum(fates["discarded"].values()) + fates["in_flight"]
    if run.summary["ledger_exact"]:
        verdict = tag("span", "The ledger is exact", cls="ok")
        why = f": {fates['trained']:,} token-fragments trained = merged + discarded + in flight."
    else:
        verdict = tag("span", "The ledger does not add up", cls="wrong")
        why = f": {fates['trained']:,} token-fragments trained, {known:,} accounted for."
    trained = fates["trained"] or 1
    merged = "in a round that ended" if run.gossip else "part of a merge"
    rows = [("merged", fates["merged"], merged)]
    rows += [(k.replace("_", " "), n, REASONS.get(k, "")) for k, n in fates["discarded"].items()]
    rows += [("in flight", fates["in_flight"], "trained, fate not decided when the tape ended")]
    if fates.get("unaccounted"):
        rows += [("unaccounted", fates["unaccounted"], "the run ended before its ledger was written")]
    shown = [(w, f"{n:,}", percent(n / trained), why) for w, n, why in rows]
    return [
        figure(pictures.ledger(fates, run.label), gossip_page.LEDGER if run.gossip else LEDGER),
        tag("p", verdict, why),
        details("Every fate", table(["fate", "token-fragments", "share", "meaning"], shown)),
    ]


LEDGER = "A token trains all fragments and each fragment merges on its own: the unit is tokens x fragments."
REASONS = {
    "overlap": "trained between a merged snapshot and the adoption that overwrote it",
    "superseded": "overwritten by a newer version before it was contributed",
    "late": "arrived after its round closed",
    "stale_base": "started from a version too old to be kept",
    "rejected": "refused: malformed, not finite, or unknown base",
    "learner_lost": "its learner was gone before it was merged",
    "cancelled": "its round was cancelled",
}


def _learners(run: Shown) -> Html:
    if run.gossip:
        return gossip_page.learners(run.history)
    head = [
        "learner",
        "steps",
        "tokens",
        "training",
        "merged",
        "lost",
        "incarnation",
        "last loss",
        "up",
        "down",
    ]
    return table(head, [_learner(run.history, name) for name in run.history.learners])


def _learner(h: History, name: str) -> list[object]:
    steps = h.steps.get(name, [])
    duration = h.end_s - h.start_s
    busy = sum(b - a for a, b in spans.step_intervals(h, name))
    joined = [n.data.get("incarnation") for n in h.of_kind("joined") if n.learner == name]
    loss = next((s.loss for s in reversed(steps) if s.loss is not None), None)
    return [
        name,
        len(steps),
        short(sum(s.tokens for s in steps)),
        percent(busy / duration) if duration else "–",
        f"{sum(name in m.learners for m in h.merges)} of {len(h.merges)}",
        sum(n.learner == name for n in h.of_kind("lost")),
        joined[-1] if joined else "–",
        "–" if loss is None else f"{loss:.3f}",
        num_bytes(sum(x.up for x in h.transfers if x.learner == name)),
        num_bytes(sum(x.down for x in h.transfers if x.learner == name)),
    ]


TURNED = {"refused": "refused", "late": "late contribution", "upload_failed": "upload failed"}


def _reasons(h: History) -> list[object]:
    waits = Counter(str(n.data.get("reason", "?")) for n in h.of_kind("waiting"))
    turned = [(n.kind, n.learner, str(n.data.get("reason", "")), n) for n in h.notes if n.kind in TURNED]
    refused = Counter(key[:3] for key in turned)
    detail = {key[:3]: str(key[3].data.get("detail", "")) for key in turned}
    out: list[object] = []
    if h.gossip is not None:
        out.append(tag("p", "Nobody waits for the hub; waits for partners are told above.", cls="muted"))
    elif waits:
        out.append(table(["the syncer waited for", "times"], waits.most_common()))
    else:
        out.append(tag("p", "The syncer never had to wait.", cls="muted"))
    if refused:
        rows = [(TURNED[key[0]], *key[1:], detail[key], n) for key, n in refused.most_common()]
        out.append(table(["refused", "from", "reason", "last detail", "times"], rows, cls="words"))
    else:
        out.append(tag("p", "Nothing was refused.", cls="muted"))
    return out


HUB_FIELDS = (
    "pace", "quorum", "grace_gamma", "max_lead_steps", "throttle", "weighting", "merge", "merge_embedding",
    "anchor", "adoption", "mix_alpha", "outer", "final",
)  # fmt: skip
"""Of a policy, and without effect in gossip."""


def _recipe(run: Shown) -> list[object]:
    policy = run.history.policy or run.folder.config.get("policy") or {}
    unread = HUB_FIELDS if run.gossip else ("topology", *GOSSIP_FIELDS)
    absent = [field for field in BUFFER_FIELDS if policy.get(field) is None]
    policy = {field: value for field, value in policy.items() if field not in (*unread, *absent)}
    recipe = {k: v for k, v in run.folder.config.items() if k != "policy"}
    digest = run.summary.get("digest")
    out: list[object] = [
        details("Method policy", table(["field", "value"], policy.items(), cls="words")),
        details(
            "Recipe", table(["field", "value"], [(k, _plain(v)) for k, v in recipe.items()], cls="words")
        ),
    ]
    return [*out, tag("p", "Final parameters: ", tag("code", digest), cls="note")] if digest else out


def _plain(value: object) -> str:
    return ", ".join(f"{k} = {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


# ---- several runs --------------------------------------------------------------------------------------


def _several(runs: list[Shown]) -> str:
    frame = Frame.around([r.history for r in runs])
    pairs = []
    for caption, draw, shown in _kinds(runs):
        pairs.append(tag("p", caption, cls="note"))
        pairs.append(
            tag("div", *(figure(draw(r.history, frame, r.label), r.label) for r in shown), cls="runs")
        )
    names = " and ".join(r.label for r in runs) if len(runs) == 2 else ", ".join(r.label for r in runs)
    return document(
        f"farflung: {names}",
        tag("h1", names),
        tag("p", _gap_sentence(runs), cls="lead"),
        section("Side by side", _compare(runs)),
        section("Evaluation loss", *_together(runs)),
        section("Pictures", *pairs),
        *(section(f"{r.label}: what happened", _story(r.history)) for r in runs),
        *(section(f"{r.label}: traffic", *traffic_page.section_of(r.summary)) for r in runs),
        *(section(f"{r.label}: where the tokens went", *_ledger(r)) for r in runs),
        *(
            section(
                f"{r.label}: learners, waits, recipe",
                _learners(r),
                *_missed(r),
                *_reasons(r.history),
                *_recipe(r),
            )
            for r in runs
        ),
    )


Draw = Callable[[History, Frame, str], str]


def _kinds(runs: list[Shown]) -> list[tuple[str, Draw, list[Shown]]]:
    """(caption, picture, runs that have it), in the page's order."""
    hub, gossip = [r for r in runs if not r.gossip], [r for r in runs if r.gossip]
    kinds: list[tuple[str, Draw, list[Shown]]] = [
        (_both(TIMELINE, gossip_page.TIMELINE, runs), pictures.timeline_narrow, runs),
        (LOSS_TOKENS, pictures.loss_by_tokens, runs),
        (LOSS_TIME, pictures.loss_by_time, runs),
        (BREADTH, pictures.breadth, hub),
        (gossip_page.CONSENSUS, partners.consensus, gossip),
        (gossip_page.WHO_MET, partners.who_met, gossip),
        (_both(TRAFFIC, gossip_page.TRAFFIC, runs), _traffic, runs),
    ]
    return [kind for kind in kinds if kind[2]]


def _both(hub: str, gossip: str, runs: list[Shown]) -> str:
    """The captions that a picture of these runs needs."""
    if not any(r.gossip for r in runs):
        return hub
    return gossip if all(r.gossip for r in runs) else f"{hub} Gossip: {gossip[0].lower()}{gossip[1:]}"


def _traffic(history: History, frame: Frame, name: str) -> str:
    draw = pictures.traffic if history.gossip is None else partners.traffic
    return draw(history, frame, name)


def _together(runs: list[Shown]) -> list[Html]:
    named = [(r.label, r.history) for r in runs]
    return [
        figure(overlay.loss_by_tokens(named), LOSS_TOKENS),
        figure(overlay.loss_by_time(named), LOSS_TIME),
        figure(overlay.loss_by_bytes(named), LOSS_BYTES + (AVERAGES if any(r.gossip for r in runs) else "")),
    ]


def _gap_sentence(runs: list[Shown]) -> str:
    ordered = sorted(runs, key=lambda r: float(r.summary["largest_merge_gap_s"]))
    parts = [f"{r.label} {seconds(r.summary['largest_merge_gap_s'])}" for r in ordered]
    gossip = " (gossip: no learner ended a round)" if any(r.gossip for r in runs) else ""
    return f"Longest time in which nothing was merged{gossip}: {', '.join(parts)}. Axes are shared."


def _missed(run: Shown) -> list[object]:
    return gossip_page.missed(run.history) if run.gossip else []


def _compare(runs: list[Shown]) -> Html:
    rows = []
    for row, name, why in rows_for([r.summary for r in runs]):
        cells: list[object] = [row.value(r.summary) for r in runs]
        if row.barred:
            most = max(float(r.summary[row.key] or 0) for r in runs) or 1.0
            values = [float(r.summary[row.key] or 0) for r in runs]
            cells = [
                bar(v / most, str(cell), "bad" if v == most and len(set(values)) > 1 else "")
                for v, cell in zip(values, cells, strict=True)
            ]
        rows.append([Html(f"{name}<small>{why}</small>"), *cells])
    return table(["", *(r.label for r in runs)], rows, cls="compare")
