"""Gossip learners' sidecars without their processes: real machines and sockets; trainer and hub are played."""

import asyncio
import time

from farflung.core import mixing
from farflung.methods import gasloc
from farflung.protocol import actions as act
from farflung.protocol import events as ev
from farflung.protocol import mailbox as box
from farflung.protocol import messages as msg
from farflung.protocol import objects
from farflung.protocol.learner import LearnerMachine
from farflung.protocol.meeting import MAX_PARTNERS
from farflung.runtime.client import HubClient
from farflung.runtime.listen import Listen
from farflung.runtime.offers import Offers
from farflung.runtime.sidecar_config import SidecarConfig

TOKEN, RUN = "open-sesame", "run-1"
HUB = "http://127.0.0.1:9"  # nobody answers there
SEED = 11
SIZE = 1000  # bytes of a vector
LOOPBACK = Listen(host="127.0.0.1", port=0, dial_host="127.0.0.1", dial_port=0, tls=False)
DEADLOCK_S = 20.0


class Party:
    """One learner: machine and offers are real.

    Args:
        name: its name.
        hub: client for the hub, in bad weather or not.
        size: bytes of its vectors.
        config: more of a sidecar's configuration.
        policy: of gasloc.
    """

    def __init__(
        self, name: str, hub: HubClient | None = None, size: int = SIZE, policy=None, **config
    ) -> None:
        self.name, self.size = name, size
        self.policy = gasloc(sync_every_steps=2, lease_s=10.0, **policy or {}).policy
        self.config = SidecarConfig(
            token=TOKEN, learner=name, policy=self.policy, channel_fd=-1, uplink_fd=-1, uplink_sizes=[],
            downlink_fd=-1, downlink_sizes=[], state_path="", **{"url": HUB, "listen": LOOPBACK, **config},
        )  # fmt: skip
        self.hub = hub or HubClient(HUB, TOKEN)
        self.memory = [bytearray(size) for _ in range(1 + 2 * MAX_PARTNERS)]
        self.events: list[ev.LearnerEvent] = []
        self.actions: list[act.LearnerAction] = []
        self.offers = Offers(
            self.config, self.hub, lambda n: memoryview(self.memory[n]), lambda name: size, self.feed
        )
        self.machine = LearnerMachine(self.policy, learner=name, address=self.offers.address)
        self.sequence = 0

    async def __aenter__(self) -> "Party":
        await self.offers.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.offers.close()
        await self.hub.close()

    @property
    def address(self) -> str:
        assert self.offers.address is not None
        return self.offers.address

    def feed(self, event: ev.LearnerEvent) -> None:
        self.events.append(event)
        for action in self.machine.handle(event, time.monotonic()):
            self.actions.append(action)
            match action:
                case act.Admit():
                    self.offers.admit(action)
                case act.Unexpect():
                    self.offers.unexpect(action.object)
        self.machine.validate()

    def hear(self, message: msg.SyncerMessage) -> None:
        self.feed(ev.Received(message=message))

    def train(self, *others: "Party", epoch: int = 1, round: int = 0) -> None:
        """Become a member of an epoch that begins at a round, and begin it."""
        ready = box.Ready(learner=self.name, fingerprint="f", layout="l", method="m")
        self.feed(ev.Reported(report=ready))
        self.feed(ev.LinkUp())
        self.hear(msg.Welcome(run=RUN, incarnation=1, index=0, tokens=0, budget_tokens=10**9))
        self.offers.begun(RUN)
        self.hear(msg.Install(versions=[0], cursor=0, step=0, syncer_step=0, state=None, reason="birth"))
        self.feed(ev.Fetched(fragment=0, version=0))
        loaded = box.Loaded(versions=[0], digests=["d"], inner_digest=None, lr=None, cursor=0, step=0)
        self.feed(ev.Reported(report=loaded))
        self.assemble(*others, epoch=epoch, round=round)

    def assemble(self, *others: "Party", epoch: int, round: int) -> None:
        """Hear of an epoch."""
        members = sorted([self, *others], key=lambda p: p.name)
        peers = [msg.Peer(name=p.name, address=p.offers.address) for p in members]
        self.hear(msg.Epoch(number=epoch, round=round, seed=SEED, members=peers))

    def boundary(self, step: int, **done) -> None:
        self.feed(ev.Reported(report=box.BoundaryPassed(step=step, **done)))

    def offer(self, round: int, step: int) -> None:
        """The trainer wrote its vector into the uplink slot, and stands at the end of the round."""
        taken = box.Taken(fragment=0, round=round, base_version=0, steps=step, tokens=8, num_bytes=self.size)
        self.boundary(step, tokens=8, taken=[taken])

    def of(self, kind: type) -> list:
        return [a for a in self.actions if type(a) is kind]

    def heard(self, kind: type) -> list:
        return [e for e in self.events if type(e) is kind]

    async def until(self, kind: type) -> ev.LearnerEvent:
        """Wait for an event of a kind; returns the last one."""
        async with asyncio.timeout(DEADLOCK_S):
            while not self.heard(kind):
                await asyncio.sleep(0.005)
        return self.heard(kind)[-1]

    @property
    def slots(self) -> dict[int, bytes]:
        """Those that hold something."""
        return {n: bytes(slot) for n, slot in enumerate(self.memory) if any(slot)}


def partner_of(name: str, names: str, round: int) -> str | None:
    """Whom a learner meets in a round."""
    members = mixing.Members(names=tuple(sorted(names)), mbps=(None,) * len(names))
    found = mixing.partners("random", SEED, round, members, sorted(names).index(name))
    return sorted(names)[found[0][0]] if found else None


def name_of(sender: str, receiver: str, epoch: int = 1, round: int = 0) -> str:
    return objects.offer(epoch, round, sender, receiver)
