"""What a gossip run's hub holds: averages of what its learners show. No learner trains from them."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from farflung.core.codecs import get_codec
from farflung.core.fragments import Fragment, TensorSpec
from farflung.core.merge import MergeResult
from farflung.core.norms import l2_norm
from farflung.engine.buffers import Buffer
from farflung.engine.hub_fragment import HubFragment, Value
from farflung.methods import Method
from farflung.protocol.actions import Merge

Shown = tuple[Tensor, Tensor, Tensor]
"""Parameters fp32 ``[N]``, buffers fp32 and counters int64 of one learner."""


class ConsensusFragment(HubFragment):
    """Its versions are consensus averages. Learners show fp32 values, whatever codec they use among themselves.

    Attributes:
        shown: parameters, buffers and counters of each learner in the newest average.
    """

    def __init__(self, fragment: Fragment, method: Method, tensors: Sequence[TensorSpec]) -> None:
        super().__init__(fragment, replace(method, codec=get_codec("fp32")), tensors)
        self.shown: dict[str, Shown] = {}

    def _merge_into(
        self,
        new: Value,
        spare: dict[str, Buffer],
        action: Merge,
        present: Value,
        work: list[tuple[Value, Value]],
        plain: bool,
    ) -> MergeResult:
        """The mean; the result's norm is the consensus distance."""
        result = super()._merge_into(new, spare, action, present, work, plain)
        self.shown = {
            part.learner: (value.params.clone(), value.buffers.clone(), value.counters.clone())
            for part, (value, _) in zip(action.parts, work, strict=True)
        }
        params = [value[0] for value in self.shown.values()]
        return replace(result, norm=consensus_distance(params, new.params))


def consensus_distance(vectors: list[Tensor], mean: Tensor) -> float:
    """``(1/n) sum_i ||theta_i - mean||^2`` (GASLoC, arXiv 2606.11081): 0 when all agree.

    >>> import torch
    >>> consensus_distance([torch.tensor([1.0]), torch.tensor([3.0])], torch.tensor([2.0]))
    1.0
    """
    return sum(l2_norm(vector - mean) ** 2 for vector in vectors) / len(vectors)
