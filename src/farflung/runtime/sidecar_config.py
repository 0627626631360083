"""What a trainer tells its sidecar: one JSON line."""

import ssl

import msgspec

from farflung.protocol.policy import Policy
from farflung.runtime.listen import Listen
from farflung.runtime.security import client_context


class SidecarConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer tells its sidecar. Descriptors are inherited."""

    url: str
    token: str
    learner: str
    policy: Policy
    channel_fd: int
    uplink_fd: int
    uplink_sizes: list[int]
    downlink_fd: int
    downlink_sizes: list[int]
    increment_sizes: list[int] = []  # of a fragment, if the run's downlink has increments
    offer_sizes: list[int] = []  # gossip: of a vector, in a usual and in a dense round
    state_path: str
    connect_within_s: float | None = None  # for the first connection; None: dial until somebody answers
    run: str | None = None
    tape_path: str | None = None
    started_s: float = 0.0  # of the run, on this machine's monotonic clock
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    listen: Listen | None = None  # gossip: for partners

    def ssl(self) -> ssl.SSLContext | None:
        return client_context(self.ca, self.cert, self.key) if self.url.startswith("https") else None
