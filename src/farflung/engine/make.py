"""The island that a method wants, and the slots that it needs."""

from collections.abc import Callable

from torch import nn

from farflung.core.fragments import FragmentPlan
from farflung.engine.increments import Increments
from farflung.engine.island import Island, Slots
from farflung.engine.layout import codec_of, payload_layout, payload_layouts, value_layout
from farflung.engine.peer_island import PeerInner, PeerIsland
from farflung.engine.trainer import Inner
from farflung.methods import Method


def make_island(
    model: nn.Module, plan: FragmentPlan, method: Method, uplink: Slots, downlink: Slots, inner: Inner
) -> tuple[Island, Inner]:
    """An island, and the inner state that it donates."""
    if method.policy.topology == "gossip":
        peer = PeerIsland(model, plan, method, uplink, downlink)
        return peer, PeerInner(inner, peer)
    return Island(model, plan, method, uplink, downlink), inner


def increment_sizes(plan: FragmentPlan, method: Method) -> list[int]:
    """Bytes of an increment of each fragment; empty if whole values go down."""
    if method.downlink is None:
        return []
    return [Increments(f, method.downlink, plan.tensors).size_bytes for f in plan.fragments]


def slot_sizes(plan: FragmentPlan, method: Method) -> tuple[Callable[[int], int], Callable[[int], int]]:
    """Bytes of each uplink and of each downlink slot. With a hub there is one of each a fragment."""
    values = [value_layout(f).size_bytes for f in plan.fragments]
    if method.policy.topology == "gossip":
        largest = max(offer_sizes(plan, method))
        return lambda p: values[0] if p else largest, lambda p: largest if p else values[0]
    payloads = [payload_layout(f, codec_of(f, method.codec, plan.tensors)).size_bytes for f in plan.fragments]
    return payloads.__getitem__, values.__getitem__


def offer_sizes(plan: FragmentPlan, method: Method) -> list[int]:
    """Gossip: bytes of an offered vector in a usual round, and in a dense one (`Policy.is_dense`)."""
    sizes = [layout.size_bytes for layout in payload_layouts(plan, method)]
    return [sizes[0], sizes[-1]]
