"""A choice: a method's policy on so many learners. `candidates` lists those worth a look."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import msgspec

from farflung.core.codecs import get_codec
from farflung.errors import UserError, did_you_mean
from farflung.methods import METHODS, make_method
from farflung.plan.setting import Setting
from farflung.protocol.policy import Policy

METHOD_NAMES = ("decoupled", "streaming", "diloco", "sparseloco", "gasloc")
"""Whose rounds the simulator knows. sparseloco and the like have diloco's rounds, with other payloads."""
WHOLE = "fp32"  # as downlink codec: no increments, a version goes down as it is
STEPS = (10, 24, 30, 100)  # H; studies in docs/results have measured 10, 24, 30 and 100
OVERLAPS = (1, 2, 5, 10)  # tau; measured there, too
CODECS = (
    ("fp32", WHOLE),
    ("bf16", WHOLE),
    ("int4", WHOLE),
    ("2bit", "int4"),
)  # of contributions, of increments
FRAGMENTS = 24  # P where fragments travel by turns, the paper's; H where that is less
PARTS = (1, 2, 4)  # learners of an island


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One choice.

    Attributes:
        learners: M.
        policy: method, K, H, P, tau, codec.
        given: it is the recipe's own.
    """

    learners: int
    policy: Policy
    given: bool = False

    def __post_init__(self) -> None:
        K = self.policy.quorum
        if K != "all" and self.learners < K:
            raise UserError(f"quorum (K) = {K}: must be at most the {self.learners} learners (M)")

    @property
    def method(self) -> str:
        return self.policy.method

    @property
    def quorum(self) -> int:
        """K as a number; gossip has none."""
        return self.learners if self.policy.quorum == "all" else self.policy.quorum

    @property
    def simulated_as(self) -> Policy:
        """The policy whose rounds these are, of a method that the simulator knows."""
        policy = self.policy
        if policy.topology == "gossip" or policy.method in ("decoupled", "streaming", "diloco"):
            return policy
        fields = {"buffer_decay": None, "reduce": None}
        return msgspec.structs.replace(policy, method="diloco", **fields)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What may be chosen; an empty field leaves it to us.

    Attributes:
        methods, learners, quorums, steps, fragments, overlaps, codecs: M, K, H, P, tau where a number is meant.
        downlink_codecs: of increments; WHOLE: none.
    """

    methods: Sequence[str] = ()
    learners: Sequence[int] = ()
    quorums: Sequence[int] = ()
    steps: Sequence[int] = ()
    fragments: Sequence[int] = ()
    overlaps: Sequence[int] = ()
    codecs: Sequence[str] = ()
    downlink_codecs: Sequence[str] = ()
    policy: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.methods:
            if name not in METHOD_NAMES:
                known = METHOD_NAMES if name not in METHODS else ()
                hint = did_you_mean(name, known) if known else f" (known: {', '.join(METHOD_NAMES)})"
                raise UserError(f"method = {name!r} cannot be planned{hint}")
        for key, names in (("codec", self.codecs), ("downlink_codec", self.downlink_codecs)):
            for name in names:
                try:
                    get_codec(name, key)
                except ValueError as error:
                    raise UserError(str(error)) from None


def candidates(setting: Setting, choices: Choices) -> Iterator[Candidate]:
    """Every combination that a method takes, each once.

    Raises:
        UserError: a value that nothing takes, with the reason why the last one did not.
    """
    seen: set[str] = set()
    problem = ""
    for learners, method in product(_learners(setting, choices), choices.methods or METHOD_NAMES):
        setting.parts(learners)
        for options in _options(method, learners, choices):
            try:
                made = make_method(method, **{**choices.policy, **options})
                candidate = Candidate(learners=learners, policy=made.policy)
                unstable = made.unstable(learners)
            except ValueError as error:
                problem = str(error)
                continue
            key = f"{learners} {msgspec.json.encode(made.policy)!r}"
            if unstable is None and key not in seen:
                seen.add(key)
                yield candidate
    if not seen:
        raise UserError(problem or "nothing is left to choose from")


def _learners(setting: Setting, choices: Choices) -> list[int]:
    if choices.learners:
        return list(choices.learners)
    return [setting.islands * parts for parts in PARTS if parts <= setting.chips]


def _options(method: str, learners: int, choices: Choices) -> Iterator[dict[str, Any]]:
    """Fields of a policy; what a method has no choice of is left out."""
    for H, codecs in product(choices.steps or STEPS, _codecs(method, choices)):
        options: dict[str, Any] = {"sync_every_steps": H, **codecs}
        if method in ("diloco", "sparseloco"):
            yield from _pinned(options, choices, "num_fragments", "overlap_steps")
        elif method == "gasloc":
            if learners > 1 and not choices.quorums:
                yield from _pinned(options, choices, "num_fragments", "overlap_steps")
        else:
            yield from _overlapped(method, learners, H, options, choices)


def _codecs(method: str, choices: Choices) -> Iterator[dict[str, str]]:
    """Of contributions and of increments: what was asked for, else the pairs of `CODECS`."""
    own = ("",) if method == "sparseloco" else dict.fromkeys(codec for codec, _ in CODECS)
    pairs: Iterable[tuple[str, str]] = CODECS
    if choices.codecs or choices.downlink_codecs or method == "sparseloco":
        pairs = product(choices.codecs or own, choices.downlink_codecs or (WHOLE,))
    for codec, downlink in pairs:
        yield ({"codec": codec} if codec else {}) | (
            {"downlink_codec": downlink} if downlink != WHOLE else {}
        )


def _pinned(options: dict[str, Any], choices: Choices, *fields: str) -> Iterator[dict[str, Any]]:
    """A method with one fragment and no overlap, where the user did not ask for others."""
    asked = {"num_fragments": choices.fragments, "overlap_steps": choices.overlaps}
    least = {"num_fragments": 1, "overlap_steps": 0}
    if all(not asked[f] or least[f] in asked[f] for f in fields):
        own = {"quorum": max(choices.quorums)} if choices.quorums else {}
        yield {**options, **own}


def _overlapped(
    method: str, learners: int, H: int, options: dict[str, Any], choices: Choices
) -> Iterator[dict[str, Any]]:
    quorums: Sequence[int] = choices.quorums
    if not quorums:
        quorums = sorted({1, -(-learners // 2), learners}) if method == "decoupled" else [learners]
    fragments = choices.fragments or [min(FRAGMENTS, H)]
    for P, tau, K in product(fragments, choices.overlaps or OVERLAPS, quorums):
        yield {**options, "num_fragments": P, "overlap_steps": tau, "quorum": K}
