"""What the studies on bytes share: variants of methods, each with the settings that are tried for it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from studies.harness import Cell, Row, base_recipe, key, mean, where
from studies.pages import AMBER, BLUE, GREEN, GREY, MUTED, RED, SKY

CHUNK = 4096  # elements of which k travel
MIN_ROUNDS_X_DENSITY = 5.0  # below it a codec has not been tried

COLOURS = {
    "diloco": BLUE, "diloco, Muon": SKY, "dct_momentum": RED, "dct_momentum_shared": AMBER, "sparseloco": GREEN,
    "muloco": MUTED, "random_rows": GREY, "demo": "#8a5fb0",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A method at a number of local steps, with what it sends.

    Attributes:
        method: of farflung.
        H: local steps a round.
        settings: policies that are tried, all else equal.
        codec: of the uplink; "" the method's own.
        downlink: codec of increments; "" whole values go down.
        k: elements of a chunk of `CHUNK` that travel.
        name: in tables; "" the method's.
        more: further keys of the recipe.
    """

    method: str
    H: int
    settings: Sequence[Mapping[str, Any]]
    codec: str = ""
    downlink: str = ""
    k: int = CHUNK
    name: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.name or self.method

    def rounds_x_density(self, steps: int) -> float:
        """How often an element has travelled, on average, at the end of so many steps."""
        return steps // self.H * self.k / CHUNK

    def cell(self, seed: int, num_learners: int, steps: int, number: int) -> Cell:
        """One run with the setting of this number.

        Raises:
            ValueError: it would be too short to say anything.
        """
        travelled = self.rounds_x_density(steps)
        if travelled < MIN_ROUNDS_X_DENSITY:
            raise ValueError(
                f"{self.label}: rounds x density = {travelled:.2g}, below {MIN_ROUNDS_X_DENSITY}"
            )
        policy = {"sync_every_steps": self.H, **self.settings[number]}
        policy |= {"codec": self.codec} if self.codec else {}
        policy |= {"downlink_codec": self.downlink} if self.downlink else {}
        gossips = self.method == "dct_momentum"
        policy |= {"gathers": 0} if gossips else {}
        recipe = base_recipe(
            seed, method=self.method, num_learners=num_learners, steps=steps, policy=policy,
            evals=int(gossips), **self.more,
        )  # fmt: skip
        parameters = {
            "method": self.label, "H": self.H, "M": num_learners, "k": self.k, "setting": number,
            "rounds_x_density": round(travelled, 2),
        }  # fmt: skip
        return Cell(parameters=parameters, recipe=recipe)

    def rows(self, rows: Iterable[Row], **more: Any) -> list[Row]:
        """Its rows, by seed."""
        return where(rows, method=self.label, H=self.H, k=self.k, **more)

    def best(self, rows: Iterable[Row], seed: int, num_learners: int) -> int:
        """The number of the setting with the lowest loss at a seed."""
        tried = [r for r in self.rows(rows, M=num_learners) if r["seed"] == seed]
        return int(min(tried, key=lambda r: r["eval_loss"])["parameters"]["setting"])


def outer(*settings: tuple[float, float]) -> list[dict[str, Any]]:
    """Outer lr and outer momentum."""
    return [{"outer_lr": eta, "outer_momentum": mu} for eta, mu in settings]


def buffer(*settings: tuple[float, float]) -> list[dict[str, Any]]:
    """Outer lr and decay of the buffer."""
    return [{"outer_lr": eta, "buffer_decay": beta, "outer_momentum": 0.0} for eta, beta in settings]


def every_setting(variants: Iterable[Variant], seed: int, num_learners: int, steps: int) -> list[Cell]:
    """One run with each setting of each variant."""
    return [v.cell(seed, num_learners, steps, number) for v in variants for number in range(len(v.settings))]


def all_done(cells: Iterable[Cell], rows: Iterable[Row]) -> bool:
    done = {key(row["recipe"]) for row in rows}
    return all(cell.key in done for cell in cells)


def mb(rows: Sequence[Row], direction: str = "bytes_up") -> float:
    """Megabytes of a learner in one direction, first upload and hand-in included."""
    return mean(rows, direction) / int(rows[0]["parameters"]["M"]) / 1e6


def both_ways(rows: Sequence[Row]) -> float:
    """Megabytes of a learner, up and down."""
    return mb(rows) + mb(rows, "bytes_down")
