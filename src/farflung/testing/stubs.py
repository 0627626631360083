"""A stand-in for the hub's tensors: versions, waiting contributions, and whose steps were merged already.

Like `farflung.testing.trainer_stub` it remembers more than a machine is told: a `Payload` says whose steps a
contribution holds, from when to when. So both notice what a machine does wrong.
"""

from dataclasses import dataclass

from farflung.protocol import actions as act


class Broken(AssertionError):
    """An invariant does not hold. `name` is the same however the numbers differ."""

    def __init__(self, name: str, detail: str = "") -> None:
        super().__init__(f"{name}: {detail}" if detail else name)
        self.name = name


@dataclass(frozen=True)
class Payload:
    """The truth about a contribution: steps ``since`` to ``until`` of one life of a learner, against a base."""

    life: int
    learner: str
    fragment: int
    round: int
    base: int
    since: int
    until: int
    tokens: int
    finite: bool = True


class TokenHub:
    """Versions and waiting contributions, and whose steps were merged already."""

    def __init__(self, num_fragments: int) -> None:
        self.kept: list[dict[int, str]] = [{} for _ in range(num_fragments)]  # version: digest
        self.versions = [-1] * num_fragments
        self.received: dict[str, Payload] = {}
        self.merged_names: set[str] = set()
        self.merged_until: dict[tuple[int, int], int] = {}  # (life, fragment): steps before it are merged
        self.merged_tokens = 0
        self.lineage: set[tuple[str, int]] = set()  # (learner, incarnation) with merged work

    def seed(self) -> list[str]:
        for p, kept in enumerate(self.kept):
            kept.clear()
            kept[0] = f"{p}.0"
            self.versions[p] = 0
        return [f"{p}.0" for p in range(len(self.kept))]

    def increments(self, p: int, base_version: int, version: int) -> bool:
        """Whether what leads from one version to another is here; a version that repeats another has none."""
        return all(self.kept[p].get(v) == f"{p}.{v}" for v in range(base_version + 1, version + 1))

    def begin(self, merge: act.Merge) -> list[Payload]:
        """Take hold of what a merge needs."""
        p, payloads = merge.fragment, []
        if merge.version != self.versions[p] + 1:
            raise Broken("versions do not grow by one", f"{merge}, the newest is {self.versions[p]}")
        for part in merge.parts:
            if part.object in self.merged_names:
                raise Broken("a contribution is merged twice", part.object)
            if part.base_version not in self.kept[p]:
                raise Broken("a base is not kept", f"{part}, kept: {sorted(self.kept[p])}")
            payload = self.received.pop(part.object, None)
            if payload is None:
                raise Broken("a merge names a contribution that is not here", part.object)
            payloads.append(payload)
        return payloads

    def commit(self, merge: act.Merge, payloads: list[Payload], finite: bool) -> str:
        """The new version's digest; its bits are the old ones unless the result is finite."""
        p = merge.fragment
        before = self.kept[p].get(self.versions[p], "")
        digest = f"{p}.{merge.version}" if finite and payloads else before
        self.kept[p][merge.version], self.versions[p] = digest, merge.version
        for part, payload in zip(merge.parts, payloads, strict=True):
            if finite:
                self._merged(part, payload)
        return digest

    def _merged(self, part: act.Part, payload: Payload) -> None:
        key = (payload.life, payload.fragment)
        if payload.since < self.merged_until.get(key, 0):
            detail = f"{payload}; steps before {self.merged_until[key]} are merged"
            raise Broken("work is merged twice", detail)
        self.merged_until[key] = payload.until
        self.merged_names.add(part.object)
        self.merged_tokens += payload.tokens
        self.lineage.add((payload.learner, int(part.object.split(".")[2])))
