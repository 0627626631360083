"""A recipe's links as the lab's network wants them."""

from farflung.lab.network import LinkSpec, SharedUplink
from farflung.lab.step_times import per_learner
from farflung.recipe import Recipe


def link_specs(recipe: Recipe) -> dict[str, LinkSpec]:
    """Each learner's link."""
    columns = zip(
        recipe.learners(), per_learner(recipe, "latency_s"), per_learner(recipe, "up_mbps"),
        per_learner(recipe, "down_mbps"), strict=True,
    )  # fmt: skip
    free = float("inf")
    return {
        name: LinkSpec(
            latency_s=latency_s,
            up_bps=free if up is None else up * 1e6,
            down_bps=free if down is None else down * 1e6,
        )
        for name, latency_s, up, down in columns
    }


def shared_uplinks(recipe: Recipe) -> list[SharedUplink]:
    """The lines that several learners share."""
    return [SharedUplink(learners=s.learners, bps=s.mbps * 1e6) for s in recipe.lab.shared_uplinks]
