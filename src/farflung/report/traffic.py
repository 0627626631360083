"""What a run's synchronisation cost in bytes, beside what DiLoCo, a ring all-reduce and data-parallel would have.

Bytes are those that passed the transport: bodies with frame headers, retries included. Where no driver handed
its counts over (`bytes_by`), the tape's take their place; in a run without faults the two are equal.
"""

from collections import Counter
from collections.abc import Iterable

from farflung.core import traffic
from farflung.core.traffic import NOTHING, Load, fewer, framed_bytes
from farflung.protocol.byte_table import ByteTable, Row
from farflung.protocol.meeting import MAX_PARTNERS
from farflung.report.history import Data, FragmentBytes, History

LEARNERS = (2, 4, 8, 16, 64)
"""Numbers of learners for which a round is predicted, beside the run's own."""

HUB_KINDS, GOSSIP_KINDS = ("contribution", "version", "increment"), ("offer",)


def rows_of(history: History) -> list[Row]:
    """Bytes by learner, kind and fragment as the tape has them."""
    table = ByteTable()
    for x in history.transfers:
        kind = "version" if x.kind == "install" else x.kind
        table.add(x.learner, kind, x.fragment, x.up, x.down)
    return table.rows()


def traffic_summary(history: History, rows: Iterable[Row]) -> Data | None:
    """What summary.json says under "traffic"; None where the tape does not tell the model's size.

    rounds: bytes up and down of rounds alone, all learners; the rest of bytes_up and bytes_down is for births,
    joiners and averages. references: what others would have moved, see `references`. times_fewer: each over
    rounds, up, down and in total; None where either is nothing. fragments: see `_fragment`.
    by_num_learners: see `predicted`.
    """
    if not history.sizes:
        return None
    rows = list(rows)
    rounds = rounds_load(history, rows)
    others = references(history)
    return {
        "rounds": rounds._asdict(),
        "references": {name: load._asdict() for name, load in others.items()},
        "times_fewer": {name: _times_fewer(load, rounds) for name, load in others.items()},
        "fragments": [_fragment(history, rows, p) for p in range(len(history.sizes))],
        "by_num_learners": predicted(history, rows),
    }


def rounds_load(history: History, rows: Iterable[Row]) -> Load:
    """Bytes of rounds, all learners: contributions and versions, or partners' vectors; no installations."""
    kinds = HUB_KINDS if history.gossip is None else GOSSIP_KINDS
    counted = [row for row in rows if row["kind"] in kinds]
    installed = sum(x.down for x in history.transfers if x.kind == "install" and history.gossip is None)
    return Load(sum(row["up"] for row in counted), sum(row["down"] for row in counted) - installed)


# ---- others --------------------------------------------------------------------------------------------


def references(history: History) -> dict[str, Load]:
    """What other ways would have moved, all learners together.

    diloco: the same contributions and versions through the same hub, each a whole fragment in fp32 with its
    buffers, frame headers included. Gossip: one such contribution and version for each round of a learner.
    ring: every merge as a ring all-reduce of the fp32 parameters among its contributors, buffers and headers
    left out; gossip: each round of a learner as its share of one among all learners.
    data_parallel: every inner step of every learner as its share of a ring all-reduce of fp32 gradients among
    all learners.
    """
    M, dense = history.num_learners, sum(size.dense for size in history.sizes)
    steps = sum(len(own) for own in history.steps.values())
    return {
        "diloco": _diloco(history),
        "ring": _ring(history),
        "data_parallel": traffic.data_parallel(dense, max(1, M), steps),
    }


def _diloco(history: History) -> Load:
    values = [framed_bytes(size.value) for size in history.sizes]
    if history.gossip is not None:
        return traffic.hub(values[0], values[0]).times(len(history.merges))
    sent, fetched = _contributions(history), _downloads(history)
    return Load(sum(n * values[p] for p, n in sent.items()), sum(n * values[p] for p, n in fetched.items()))


def _ring(history: History) -> Load:
    sizes, load = history.sizes, NOTHING
    if history.gossip is not None:
        return traffic.ring(sizes[0].dense, max(1, history.num_learners)).times(len(history.merges))
    for merge in history.merges:
        if merge.breadth and merge.fragment < len(sizes):
            each = traffic.ring(sizes[merge.fragment].dense, merge.breadth)
            load = load.plus(each.times(merge.breadth))
    return load


def _times_fewer(reference: Load, own: Load) -> Data:
    return {
        "up": fewer(reference.up, own.up),
        "down": fewer(reference.down, own.down),
        "total": fewer(reference.total, own.total),
    }


# ---- fragments -----------------------------------------------------------------------------------------


def _fragment(history: History, rows: list[Row], p: int) -> Data:
    """dense_bytes, value_bytes, payload_bytes: without frame headers; payload None if nothing was sent.

    contributions: sent by learners; versions: fetched by learners that trained. up, down: all bytes of it that
    were counted, births and installations included.
    """
    size = history.sizes[p]
    own = [row for row in rows if row["fragment"] == p and row["kind"] not in ("state", "other")]
    return {
        "fragment": p,
        "dense_bytes": size.dense,
        "value_bytes": size.value,
        "payload_bytes": history.payload_bytes.get(p),
        "contributions": _contributions(history)[p],
        "versions": _downloads(history)[p],
        "up": sum(row["up"] for row in own),
        "down": sum(row["down"] for row in own),
    }


def _contributions(history: History) -> Counter[int]:
    """How many contributions were sent, by fragment; in gossip those to averages."""
    return Counter(x.fragment for x in history.transfers if x.kind == "contribution")


def _downloads(history: History) -> Counter[int]:
    """How many times a version was adopted by a learner that trained, by fragment."""
    return Counter(x.fragment for x in history.transfers if x.kind in ("version", "increment"))


# ---- other numbers of learners -------------------------------------------------------------------------


def predicted(history: History, rows: list[Row]) -> list[Data]:
    """A learner's bytes of one round of the whole model, by number of learners; empty if none was sent.

    up, down: of this method, from the sizes of its payloads, frame headers included. ring: of a ring all-reduce
    of the dense parameters, each way. all: of all links together. times_fewer: over up; ring: than that;
    data_parallel: than a ring in each of the H steps between two rounds.
    """
    if set(history.payload_bytes) != set(range(len(history.sizes))):
        return []
    dense, H = sum(size.dense for size in history.sizes), int(history.policy.get("sync_every_steps", 1))
    payload = sum(framed_bytes(num) for num in history.payload_bytes.values())
    down = _usual_download(history, rows)
    found = []
    for M in sorted({*LEARNERS, max(1, history.num_learners)}):
        own, ring = _round(history, payload, down, M), traffic.ring(dense, M)
        found.append(
            {
                "num_learners": M,
                "up": own.up,
                "down": own.down,
                "ring": ring.up,
                "all": own.times(M).up if history.gossip is not None else own.times(M).total,
                "times_fewer": {
                    "ring": fewer(ring.up, own.up),
                    "data_parallel": fewer(ring.times(H).up, own.up),
                },
            }
        )
    return found


def _round(history: History, payload: float, down: float, num_learners: int) -> Load:
    if history.gossip is None:
        return traffic.hub(payload, down)
    matching = str(history.policy.get("matching", "random"))
    return traffic.partners(payload, traffic.mean_partners(matching, num_learners, MAX_PARTNERS))


def _usual_download(history: History, rows: list[Row]) -> float:
    """Bytes that bring a learner one version of every fragment: as counted where that is increments."""
    if history.gossip is not None:
        return 0.0
    return sum(_version_bytes(history, rows, p, size) for p, size in enumerate(history.sizes))


def _version_bytes(history: History, rows: list[Row], p: int, size: FragmentBytes) -> float:
    fetched = _downloads(history)[p]
    if size.increment is None or not fetched:
        return framed_bytes(size.value)
    kinds = ("version", "increment")
    down = sum(row["down"] for row in rows if row["fragment"] == p and row["kind"] in kinds)
    installed = sum(x.down for x in history.transfers if x.kind == "install" and x.fragment == p)
    return float(down - installed) / fetched
