"""A hub and its learners in one process, without machines: what the engine tests share."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from farflung.core.fragments import FragmentPlan, make_plan
from farflung.core.vectors import describe
from farflung.engine.hub import HubState
from farflung.engine.island import Island
from farflung.methods import Method
from farflung.protocol.actions import Merge, Part
from farflung.protocol.mailbox import Adopt, BoundaryPassed, Load, Settle, Snapshot


def mlp(seed: int = 0, width: int = 8) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))


def plan_of(model: nn.Module, method: Method) -> FragmentPlan:
    return make_plan(describe(model), method.policy.num_fragments, method.policy.fragment_plan)


def inner_step(model: nn.Module, learner: int, step: int, lr: float = 0.05) -> None:
    """One plain gradient step on a batch that depends on learner and step."""
    gen = torch.Generator().manual_seed(1000 * learner + step)
    dtype = next(model.parameters()).dtype
    x, y = (torch.randn(4, n, generator=gen).to(dtype) for n in (5, 3))
    model.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    with torch.no_grad():
        for param in model.parameters():
            param -= lr * param.grad


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()])


def slots(sizes: Callable[[int], int]) -> Callable[[int], Tensor]:
    made: dict[int, Tensor] = {}
    return lambda i: made.setdefault(i, torch.empty(sizes(i), dtype=torch.uint8))


class World:
    """A hub, its islands, and the moves between them."""

    def __init__(self, models: list[nn.Module], method: Method, plan: FragmentPlan | None = None) -> None:
        self.method, self.models = method, models
        self.plan = plan or plan_of(models[0], method)
        self.hub = HubState(self.plan, method)
        self.up = [slots(self.hub.payload_size) for _ in models]
        self.down = [slots(self.hub.value_size) for _ in models]
        self.islands = [
            Island(model, self.plan, method, up, down)
            for model, up, down in zip(models, self.up, self.down, strict=True)
        ]
        self.round = 0

    @property
    def fragments(self) -> range:
        return range(self.plan.num_fragments)

    def birth(self) -> "World":
        self.islands[0].seed()
        for i in self.fragments:
            self.hub.seed(i, self.down[0](i))
        for m in range(len(self.islands)):
            self.install(m)
        return self

    def fetch(self, learner: int, fragment: int) -> int:
        version = self.hub.versions[fragment]
        raw = self.hub.value_bytes(fragment, version)
        self.down[learner](fragment).copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        return version

    def install(self, learner: int, step: int = 0) -> list[str]:
        versions = [self.fetch(learner, i) for i in self.fragments]
        return self.islands[learner].load(Load(versions=versions, cursor=0, step=step, state=False))

    def take(self, learner: int, fragment: int, final: bool = False) -> BoundaryPassed | None:
        """Snapshot a fragment now, and hand the payload to the hub."""
        self.islands[learner].post(Snapshot(fragment=fragment, round=self.round, final=final))
        report = self.islands[learner].idle()
        if report and report.taken:
            self.hub.receive(self.name(learner, fragment), fragment, self.up[learner](fragment))
        return report

    def name(self, learner: int, fragment: int, round: int | None = None) -> str:
        return f"{learner}.{fragment}.{self.round if round is None else round}"

    def merge(self, fragment: int, weights: dict[int, float], final: bool = False):
        bases = {m: self.islands[m].versions[fragment] for m in weights}
        parts = [
            Part(object=self.name(m, fragment), learner=str(m), base_version=bases[m], weight=w)
            for m, w in sorted(weights.items())
        ]
        version = self.hub.versions[fragment] + 1
        return self.hub.merge(Merge(fragment=fragment, version=version, parts=parts, final=final))

    def adopt(self, learner: int, fragment: int, included: int | None) -> BoundaryPassed | None:
        if included is not None:
            self.islands[learner].post(Settle(fragment=fragment, round=included, merged=True))
        version = self.fetch(learner, fragment)
        self.islands[learner].post(Adopt(fragment=fragment, version=version, included=included))
        return self.islands[learner].idle()

    def train(self, learner: int, tokens: int = 32, data: int | None = None) -> BoundaryPassed:
        step = self.islands[learner].step
        inner_step(self.models[learner], learner if data is None else data, step)
        return self.islands[learner].boundary(tokens)

    def sync(self, fragment: int) -> None:
        """One lockstep round: all snapshot, equal weights, all adopt."""
        self.round += 1
        num = len(self.islands)
        for m in range(num):
            self.take(m, fragment)
        self.merge(fragment, dict.fromkeys(range(num), 1 / num))
        for m in range(num):
            self.adopt(m, fragment, self.round)
