"""The page's section on traffic: what was sent, by whom and for what, beside what other ways would have sent."""

from farflung.report.history import Data, natural
from farflung.report.markup import Html, details, table, tag
from farflung.report.wording import num_bytes, short, times

KINDS = {
    "contribution": "contributions",
    "version": "versions",
    "increment": "increments",
    "offer": "partners' vectors",
    "seed": "first parameters",
    "state": "inner state for joiners",
    "gradient": "gradients",
    "other": "other",
}
GOSSIP_KINDS = {"contribution": "parameters for averages", "version": "parameters for joiners"}
REFERENCES = {
    "diloco": ("DiLoCo", "the same contributions and versions through a hub, whole and in fp32"),
    "ring": ("ring all-reduce", "fp32 parameters once a round: 2 (M - 1) / M of them from each learner"),
    "data_parallel": ("data-parallel", "a ring all-reduce of fp32 gradients in every inner step"),
}


def section_of(summary: Data) -> list[object]:
    """Everything of the section, from a summary."""
    rows, figures = summary.get("bytes_by") or [], summary.get("traffic")
    topology = str(summary.get("topology", "hub"))
    out: list[object] = [tag("p", _lead(summary))]
    if figures:
        out.append(_against(figures))
        out.append(tag("p", FEWER, cls="note"))
    if rows:
        out += [
            tag("h3", "By learner"),
            _by_learner(rows, KINDS if topology == "hub" else KINDS | GOSSIP_KINDS),
        ]
    if figures and topology == "hub":
        out += [tag("h3", "By fragment"), _by_fragment(figures["fragments"])]
    if len({row["fragment"] for row in rows}) > 1:
        out.append(details("Every learner and fragment", _every(rows)))
    if figures:
        out += _prediction(figures["by_num_learners"], topology)
    return out


FEWER = (
    "Of rounds alone: births, installations and averages are left out. Bytes are bodies with frame headers, "
    "as they passed the transport."
)
PREDICTED = (
    "One round of the whole model, from the sizes of this method's payloads, for other numbers of learners. "
)
GROWS = {
    "hub": "A learner's own bytes do not depend on how many there are; the hub's link carries them all.",
    "gossip": "Where all meet all, a learner's bytes grow with their number, an all-reduce's do not: "
    "2 dense / (M payload) times fewer.",
}


def _lead(summary: Data) -> str:
    up, down = (num_bytes(summary.get(key) or 0) for key in ("bytes_up", "bytes_down"))
    lead = f"Learners sent {up} and received {down}."
    figures = summary.get("traffic")
    if not figures:
        return lead
    known = [f for f in figures["fragments"] if f["payload_bytes"]]
    payload, dense = sum(f["payload_bytes"] for f in known), sum(f["dense_bytes"] for f in known)
    rounds = figures["rounds"]
    lead += f" Rounds took {num_bytes(rounds['up'])} up and {num_bytes(rounds['down'])} down."
    if payload:
        lead += (
            f" A payload of the whole model is {num_bytes(payload)}, {num_bytes(dense)} in fp32: "
            f"{times(dense / payload)} smaller."
        )
    return lead


def _against(figures: Data) -> Html:
    rounds = figures["rounds"]
    rows: list[list[object]] = [["this run", num_bytes(rounds["up"]), num_bytes(rounds["down"]), "", "", ""]]
    for key, (name, why) in REFERENCES.items():
        load, ratio = figures["references"][key], figures["times_fewer"][key]
        named = Html(f"{name}<small>{why}</small>")
        ratios = [times(ratio[way]) for way in ("up", "down", "total")]
        rows.append([named, num_bytes(load["up"]), num_bytes(load["down"]), *ratios])
    head = ["rounds of", "up", "down", "this run: fewer up", "fewer down", "fewer in all"]
    return table(head, rows, cls="against")


def _by_learner(rows: list[Data], names: dict[str, str]) -> Html:
    """A column for each kind that passed, in each direction that it passed."""
    ways = [
        (kind, way) for kind in KINDS for way in ("up", "down") if any(r["kind"] == kind and r[way] for r in rows)
    ]  # fmt: skip
    learners = list(dict.fromkeys(row["learner"] for row in rows))
    body = [_learner(rows, name, ways) for name in sorted(learners, key=natural)]
    if len(body) > 1:
        body.append(_learner(rows, None, ways))
    head = ["learner", *(f"{names[kind]} {way}" for kind, way in ways), "all up", "all down"]
    return table(head, body)


def _learner(rows: list[Data], name: str | None, ways: list[tuple[str, str]]) -> list[object]:
    """`name` None: all learners together."""
    own = [row for row in rows if name is None or row["learner"] == name]
    cells = [_shown(sum(row[way] for row in own if row["kind"] == kind)) for kind, way in ways]
    return [name or "all", *cells, *(_shown(sum(row[way] for row in own)) for way in ("up", "down"))]


def _by_fragment(fragments: list[Data]) -> Html:
    head = [
        "fragment",
        "fp32",
        "payload",
        "smaller",
        "contributions",
        "versions fetched",
        "all up",
        "all down",
    ]
    rows = [
        [
            f["fragment"],
            num_bytes(f["dense_bytes"]),
            _shown(f["payload_bytes"] or 0),
            times(f["dense_bytes"] / f["payload_bytes"] if f["payload_bytes"] else None),
            f["contributions"],
            f["versions"],
            num_bytes(f["up"]),
            num_bytes(f["down"]),
        ]
        for f in fragments
    ]
    return table(head, rows)


def _every(rows: list[Data]) -> Html:
    body = [
        [r["learner"], KINDS.get(r["kind"], r["kind"]), r["fragment"], _shown(r["up"]), _shown(r["down"])]
        for r in rows
    ]
    return table(["learner", "what", "fragment", "up", "down"], body)


def _prediction(found: list[Data], topology: str) -> list[object]:
    if not found:
        return []
    everybody = "hub's link, both ways" if topology == "hub" else "all links"
    head = ["learners", "a learner sends", "receives", "all-reduce, each way", "fewer up than all-reduce",
            "than data-parallel", everybody]  # fmt: skip
    rows = [
        [
            short(f["num_learners"]),
            *(num_bytes(f[key]) for key in ("up", "down", "ring")),
            times(f["times_fewer"]["ring"]),
            times(f["times_fewer"]["data_parallel"]),
            num_bytes(f["all"]),
        ]
        for f in found
    ]
    caption = tag("p", PREDICTED + GROWS[topology], cls="note")
    return [tag("h3", "With other numbers of learners"), table(head, rows), caption]


def _shown(value: float) -> str:
    return num_bytes(value) if value else "–"
