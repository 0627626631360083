"""The hub's tensors: what a syncer serves, receives and merges, as its machine says. No I/O."""

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from farflung.core.fragments import FragmentPlan
from farflung.core.vectors import scatter_
from farflung.engine.buffers import digest
from farflung.engine.consensus import ConsensusFragment, Shown
from farflung.engine.hub_fragment import HubFragment, Merged, Received
from farflung.engine.layout import Raw
from farflung.methods import Method
from farflung.protocol.actions import Merge

__all__ = ["HubState", "Merged", "Received"]


class HubState:
    """Theta, outer state and waiting contributions of every fragment.

    Call it from one thread; only what `begin` returns may run in others, for several fragments at once.
    Nothing here checks lineage: the machine decided which contributions are merged, in which order and with
    which weights.

    Args:
        plan: the run's fragment plan.
        method: the run's method.

    >>> from farflung.core.fragments import TensorSpec, make_plan
    >>> from farflung.methods import diloco
    >>> plan = make_plan([TensorSpec(name="w", shape=(2,), dtype="float32", kind="param")], 1)
    >>> hub = HubState(plan, diloco())
    >>> hub.seed(0, torch.tensor([3.0, 4.0]).view(torch.uint8))
    Received(finite=True, norm=5.0)
    >>> hub.model_tensors()
    {'w': tensor([3., 4.])}
    """

    def __init__(self, plan: FragmentPlan, method: Method) -> None:
        self.plan = plan
        self.method = method
        kind = ConsensusFragment if method.policy.topology == "gossip" else HubFragment
        self._fragments = [kind(fragment, method, plan.tensors) for fragment in plan.fragments]
        self._owner: dict[str, HubFragment] = {}  # of each contribution received

    @property
    def versions(self) -> list[int]:
        """Newest version of each fragment; -1 before the seed."""
        return [fragment.newest for fragment in self._fragments]

    def shown(self) -> dict[str, dict[str, Tensor]]:
        """Gossip: each learner's parameters in the newest average, by name of the learner and of the tensor."""
        return {
            learner: self._tensors([value])
            for fragment in self._fragments
            if isinstance(fragment, ConsensusFragment)
            for learner, value in sorted(fragment.shown.items())
        }

    def kept(self, fragment: int) -> list[int]:
        """Versions of a fragment that are still held, oldest first."""
        return sorted(self._fragments[fragment].versions)

    def value_size(self, fragment: int) -> int:
        """Bytes of a fragment's value (see `farflung.engine.layout`)."""
        return self._fragments[fragment].value_layout.size_bytes

    def payload_size(self, fragment: int) -> int:
        """Bytes of a contribution to a fragment."""
        return self._fragments[fragment].payload_layout.size_bytes

    def seed(self, fragment: int, payload: Raw) -> Received:
        """Install an uploaded value as version 0 of a fragment, in place of anything held.

        Raises:
            ValueError: the wrong number of bytes.
        """
        return self._fragments[fragment].seed(payload)

    def value_bytes(self, fragment: int, version: int) -> memoryview:
        """A version's bytes, uncopied and read-only; they keep while this view or a slice of it lives.

        Raises:
            KeyError: the version is not held (any more).
        """
        return self._fragments[fragment].versions[version].buffer.lend().data.toreadonly()

    def increment_bytes(self, fragment: int, base_version: int, version: int) -> memoryview:
        """What leads from one version to another, to be served as `value_bytes` is.

        Raises:
            KeyError: the run has no increments, one of these is not kept, or the whole value is no larger.
        """
        log = self._fragments[fragment].increments
        if log is None or (version - base_version) * self.increment_size(fragment) >= self.value_size(
            fragment
        ):
            raise KeyError(version)
        return log.read(base_version, version)

    def increment_size(self, fragment: int) -> int:
        """Bytes of an increment; 0 if the run has none."""
        log = self._fragments[fragment].increments
        return 0 if log is None else log.size_bytes

    def digest(self, fragment: int, version: int) -> str:
        """xxh3-128 (hex) of a version's parameters, buffers and counters left out.

        Raises:
            KeyError: the version is not held (any more).
        """
        return digest(self._fragments[fragment].versions[version].params)

    def receive(self, object_name: str, fragment: int, payload: Raw) -> Received:
        """Decode a contribution and keep it until it is merged or discarded; the payload is not kept.

        Raises:
            ValueError: the wrong number of bytes.
        """
        owner = self._fragments[fragment]
        try:
            received = owner.receive(object_name, payload)
        except ValueError as error:
            raise ValueError(f"{object_name}: {error}") from error
        self._owner[object_name] = owner
        return received

    def discard(self, object_name: str) -> None:
        """Free a contribution that will not be merged; unknown names are fine."""
        owner = self._owner.pop(object_name, None)
        if owner is not None:
            owner.discard(object_name)

    def merge(self, action: Merge) -> Merged:
        """Make the next version: ``Delta = Merge(deltas, weights)``, ``Theta <- Outer(Theta, Delta)``.

        Deltas are cut down by their part's scale, then anchored (``anchor = "present"``: plus
        ``Theta_present - Theta_base``). Every tensor is merged by its own rule; buffers get the weighted mean,
        counters the maximum. A final merge under ``final = "average"`` is a plain weighted average that leaves
        the outer state alone. Without parts, or with a result that is not finite, the new version repeats the
        present value and the outer state stays.
        The contributions are freed.

        Raises:
            KeyError: a contribution or a base version that is not held.
        """
        return self.begin(action)()

    def begin(self, action: Merge) -> Callable[[], Merged]:
        """The first half of `merge`: take hold of everything. The function returned works and commits.

        Call it where actions are performed, in their order, and the function in a worker thread. What happens
        between the two, `retire` of a base among it, does not disturb the merge. The next merge of the same
        fragment begins after this one has ended.

        Raises:
            KeyError: as `merge`.
        """
        merge = self._fragments[action.fragment].begin(action)
        for part in action.parts:
            self._owner.pop(part.object, None)
        return merge

    def retire(self, fragment: int, version: int) -> None:
        """Forget a version; unknown ones are fine."""
        self._fragments[fragment].retire(version)

    # ---- checkpoint ------------------------------------------------------------------------------------

    def save(self) -> dict[str, Tensor]:
        """All versions held and the outer state, uncopied: they stay as they are while the tensors live.

        Names are ``FRAGMENT.version.V.params | buffers | counters``, ``FRAGMENT.outer.NAME`` and
        ``FRAGMENT.downlink.unsent``. Call it while no merge runs; write the result whenever and in whatever
        thread you like.
        """
        tensors: dict[str, Tensor] = {}
        for index, fragment in enumerate(self._fragments):
            for version, value in fragment.versions.items():
                sections = fragment.value_layout.split(torch.from_numpy(value.buffer.lend()))
                tensors[f"{index}.version.{version}.params"] = sections.params.view(torch.float32)
                tensors[f"{index}.version.{version}.buffers"] = sections.buffers.view(torch.float32)
                tensors[f"{index}.version.{version}.counters"] = sections.counters.view(torch.int64)
            for name, buffer in fragment.outer_state.items():
                tensors[f"{index}.outer.{name}"] = torch.from_numpy(buffer.lend()).view(torch.float32)
            if fragment.increments is not None and fragment.increments.unsent is not None:
                tensors[f"{index}.downlink.unsent"] = fragment.increments.unsent
        return tensors

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `save` gave (copied); waiting contributions are dropped.

        Raises:
            ValueError: a name that `save` does not write, or a fragment without a version.
        """
        for name in list(self._owner):
            self.discard(name)
        for index, fragment in enumerate(self._fragments):
            versions, outer, unsent = _of_fragment(tensors, index)
            if not versions:
                raise ValueError(f"checkpoint: no version of fragment {index}")
            fragment.restore(versions, outer, unsent)

    def model_digest(self) -> str:
        """One digest (hex) of the newest parameters of all fragments: equal digests, equal models."""
        digests = "".join(self.digest(p, version) for p, version in enumerate(self.versions))
        return hashlib.sha256(digests.encode()).hexdigest()

    def model_tensors(self) -> dict[str, Tensor]:
        """The newest parameters and buffers by name, in the shapes and dtypes of the model."""
        newest = [state.versions[state.newest] for state in self._fragments]
        return self._tensors([(value.params, value.buffers, value.counters) for value in newest])

    def _tensors(self, values: list[Shown]) -> dict[str, Tensor]:
        """Parameters, buffers and counters of every fragment, by name."""
        tensors = {
            spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in self.plan.tensors
        }
        for fragment, (params, buffers, counters) in zip(self.plan.fragments, values, strict=True):
            scatter_(params, tensors, fragment.pieces)
            scatter_(buffers, tensors, fragment.buffers)
            scatter_(counters, tensors, fragment.counters)
        return tensors


_NAME = re.compile(r"(\d+)\.(?:version\.(\d+)\.(params|buffers|counters)|outer\.(\w+)|(downlink)\.unsent)")


def _of_fragment(
    tensors: dict[str, Tensor], index: int
) -> tuple[dict[int, dict[str, Tensor]], dict[str, Tensor], Tensor | None]:
    versions: dict[int, dict[str, Tensor]] = defaultdict(dict)
    outer: dict[str, Tensor] = {}
    unsent: Tensor | None = None
    for name, values in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"checkpoint: tensor {name!r} is not the hub's")
        if int(match[1]) == index and match[4]:
            outer[match[4]] = values
        elif int(match[1]) == index and match[5]:
            unsent = values
        elif int(match[1]) == index:
            versions[int(match[2])][match[3]] = values
    return dict(versions), outer, unsent
