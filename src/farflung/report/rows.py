"""The headline figures of a summary: name, how each is shown, and what it means to a newcomer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from farflung.report.history import Data
from farflung.report.wording import num_bytes, percent, seconds, short, times


@dataclass(frozen=True, kw_only=True)
class Row:
    """`show` takes the whole summary. `headline`: shown at the top; `barred`: compared by bars.

    gossip, gossip_name: what it means and is called in a gossip run, where that differs; `only`: it is shown for
    runs of this topology alone; `optional`: and for runs that have the figure;
    `above_zero`: and there only if it is not 0.
    """

    name: str
    key: str
    show: Callable[[Data], str]
    why: str
    headline: bool = True
    barred: bool = False
    gossip: str = ""
    gossip_name: str = ""
    only: Literal["", "hub", "gossip"] = ""
    optional: bool = False
    above_zero: bool = False

    def words(self, topologies: set[str]) -> tuple[str, str]:
        """Its name and meaning on a page that shows runs of these topologies."""
        if topologies == {"gossip"}:
            return self.gossip_name or self.name, self.gossip or self.why
        both = self.gossip and "gossip" in topologies
        return self.name, f"{self.why} (gossip: {self.gossip})" if both else self.why

    def value(self, summary: Data) -> str:
        """The figure, or a dash where a run of this topology has none."""
        absent = self.only not in ("", topology(summary)) or (self.optional and not self.has(summary))
        return "–" if absent else self.show(summary)

    def has(self, summary: Data) -> bool:
        return bool(summary.get(self.key)) if self.above_zero else self.key in summary


def topology(summary: Data) -> str:
    return str(summary.get("topology", "hub"))


def rows_for(summaries: Sequence[Data]) -> list[tuple[Row, str, str]]:
    """(row, name, meaning) of every figure that one of the runs has."""
    topologies = {topology(s) for s in summaries}
    return [
        (row, *row.words(topologies))
        for row in ROWS
        if (not row.only or row.only in topologies)
        and (not row.optional or any(row.has(s) for s in summaries))
    ]


def _loss(s: Data) -> str:
    start, final = s.get("eval_loss_start"), s.get("eval_loss_final")
    return "not evaluated" if start is None or final is None else f"{start:.3f} → {final:.3f}"


def _accuracy(s: Data) -> str:
    return f"{percent(s['eval_accuracy_start'])} → {percent(s['eval_accuracy_final'])}"


def _bytes(s: Data) -> str:
    return " / ".join(num_bytes(s[k]) if s.get(k) is not None else "–" for k in ("bytes_up", "bytes_down"))


def _fewer(s: Data, reference: str) -> str:
    if s["traffic"] is None:
        return "–"
    ratio = s["traffic"]["times_fewer"][reference]
    return " / ".join(times(ratio[way]) for way in ("up", "down"))


def _workers_loss(s: Data) -> str:
    loss = s.get("workers_loss")
    return f"{loss['min']:.3f} – {loss['max']:.3f}" if loss else "not evaluated"


def _meetings(s: Data) -> str:
    return f"{s['meetings']['mixed']} of {s['meetings']['total']}"


def _half_exchanges(s: Data) -> str:
    n, drift = s["half_exchanges"], s["half_exchange_drift"]
    return f"{n}, drift {drift:.3g}" if n else "0"


def _distance(s: Data) -> str:
    return "not measured" if s["consensus_distance"] is None else f"{s['consensus_distance']:.3g}"


def _wait(s: Data) -> str:
    deadline = s["longest_deadline_s"]
    return seconds(s["longest_wait_s"]) + ("" if deadline is None else f" of {seconds(deadline)}")


def _killed(s: Data) -> str:
    """Where nobody was killed by plan but learners came back, "0" would deny that something ended them."""
    return f"{s['kills'] or ('–' if s['rejoins'] else 0)} / {s['rejoins']}"


def _per_exchange(s: Data) -> str:
    return "–" if s["bytes_per_exchange"] is None else num_bytes(s["bytes_per_exchange"])


ROWS = [
    Row(
        name="evaluation loss",
        key="eval_loss_final",
        show=_loss,
        why="of the global parameters, first to last evaluation",
        gossip="of the average of all learners' parameters, first to last evaluation",
    ),
    Row(
        name="accuracy",
        key="eval_accuracy_final",
        show=_accuracy,
        why="of the global parameters on held-out data, first to last evaluation",
        gossip="of the average of all learners' parameters, first to last evaluation",
        optional=True,
    ),
    Row(
        name="workers' loss",
        key="workers_loss",
        show=_workers_loss,
        why="of each learner's own parameters at the end, least and most",
        only="gossip",
    ),
    Row(
        name="goodput",
        key="goodput",
        show=lambda s: percent(s["goodput"]),
        why="of all learners' time was spent in training steps",
    ),
    Row(
        name="uptime",
        key="uptime",
        show=lambda s: percent(s["uptime"]),
        why="of the time at least a quorum of learners trained",
        gossip="of the time at least one learner trained",
    ),
    Row(
        name="longest merge gap",
        key="largest_merge_gap_s",
        show=lambda s: seconds(s["largest_merge_gap_s"]),
        why="the longest time in which nothing was merged",
        barred=True,
        gossip_name="longest round gap",
        gossip="the longest time in which no learner ended a round",
    ),
    Row(
        name="usual merge gap",
        key="median_merge_gap_s",
        show=lambda s: seconds(s["median_merge_gap_s"]),
        why="median time from one merge to the next",
        headline=False,
        gossip_name="usual round",
        gossip="median time from the end of a learner's round to that of its next",
    ),
    Row(
        name="killed / rejoined",
        key="rejoins",
        show=_killed,
        why="kills by plan; a rejoin counts once its work is merged again",
        gossip="kills by plan; a rejoin counts once it mixed with a partner",
    ),
    Row(
        name="tokens merged",
        key="merged_share",
        show=lambda s: percent(s["merged_share"]),
        why="of the trained token-fragments are part of the model",
        gossip_name="tokens in ended rounds",
        gossip="of the trained tokens were in a round that ended",
    ),
    Row(
        name="clipped",
        key="clipped",
        show=lambda s: f"{s['clipped']:,}",
        why="contributions cut down to the median norm of their merge",
        headline=False,
        only="hub",
        optional=True,
        above_zero=True,
    ),
    Row(
        name="learners per merge",
        key="mean_merge_breadth",
        show=lambda s: f"{s['mean_merge_breadth']:.2f} of {s['num_learners']}",
        why="on average",
        only="hub",
    ),
    Row(
        name="meetings mixed",
        key="meetings",
        show=_meetings,
        why="of two partners in a round; the others were missed",
        only="gossip",
    ),
    Row(
        name="half exchanges",
        key="half_exchanges",
        show=_half_exchanges,
        why="only one side mixed, and so the mean of all drifted",
        only="gossip",
    ),
    Row(
        name="consensus distance",
        key="consensus_distance",
        show=_distance,
        why="mean squared distance of learners from their average, at the last average",
        only="gossip",
    ),
    Row(
        name="longest wait",
        key="longest_wait_s",
        show=_wait,
        why="for partners at a round's end, of the longest deadline",
        only="gossip",
    ),
    Row(
        name="bytes up / down",
        key="bytes_up",
        show=_bytes,
        why="bulk data, all learners together",
        gossip="bulk data, all learners together, parameters for averages included",
    ),
    Row(
        name="fewer bytes than DiLoCo",
        key="traffic",
        show=lambda s: _fewer(s, "diloco"),
        why="in the same rounds, whole fragments in fp32 through a hub",
    ),
    Row(
        name="than a ring all-reduce",
        key="traffic",
        show=lambda s: _fewer(s, "ring"),
        why="of the fp32 parameters, in the same rounds",
        headline=False,
    ),
    Row(
        name="than data-parallel",
        key="traffic",
        show=lambda s: _fewer(s, "data_parallel"),
        why="a ring all-reduce of fp32 gradients in every step",
        headline=False,
    ),
    Row(
        name="bytes between partners",
        key="bytes_between_partners",
        show=lambda s: num_bytes(s["bytes_between_partners"]),
        why="the part of bytes up that is vectors for partners; the rest is for averages and joiners",
        headline=False,
        only="gossip",
    ),
    Row(
        name="bytes per exchange",
        key="bytes_per_exchange",
        show=_per_exchange,
        why="what a learner sends a partner in a round, and gets from it",
        headline=False,
        only="gossip",
    ),
    Row(
        name="tokens trained",
        key="tokens_trained",
        show=lambda s: short(s["tokens_trained"]),
        why="by all learners together",
        headline=False,
    ),
    Row(
        name="steps",
        key="steps",
        show=lambda s: f"{s['steps']:,}",
        why="inner steps of all learners",
        headline=False,
    ),
    Row(
        name="merges",
        key="merges",
        show=lambda s: f"{s['merges']:,}",
        why="new versions of a fragment",
        headline=False,
        gossip_name="rounds",
        gossip="that learners ended, each counted for itself",
    ),
    Row(
        name="epochs",
        key="epochs",
        show=lambda s: f"{s['epochs']:,}",
        why="sets of members; a new one when a learner comes or goes",
        headline=False,
        only="gossip",
    ),
    Row(
        name="time",
        key="wall_s",
        show=lambda s: seconds(s.get("wall_s") or 0.0),
        why="from start to end",
        headline=False,
    ),
    Row(
        name="ledger",
        key="ledger_exact",
        show=lambda s: "exact" if s["ledger_exact"] else "does not add up",
        why="every trained token was merged, discarded with a reason, or in flight",
        headline=False,
        gossip="every trained token was in a round that ended, discarded with a reason, or in flight",
    ),
]
