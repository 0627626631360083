"""The ledger: every token trained is merged, discarded with a reason, or in flight (P9).

The unit is the token-fragment: a token trains all P fragments and each fragment merges its own window, so
`trained = tokens_trained * P = merged + sum(discarded) + in_flight`, exactly and at any time.

A window is the tokens a learner trained on one fragment since its parameters were last replaced there.
A snapshot gives the window so far to one contribution; what follows is `open`. Tokens are lost when an
adoption overwrites the parameters that hold them, not before: until then a refused contribution's tokens
go back into the open window.
"""

from dataclasses import dataclass, field
from typing import Any

from farflung.protocol.messages import Fate


@dataclass
class Sent:
    """The contribution taken from the present base; `fate` is None while unknown."""

    round: int
    tokens: int
    fate: Fate | None = None


@dataclass
class Orphan:
    """A contribution of unknown fate whose base was overwritten, and the open tokens lost with it."""

    tokens: int
    after: int


@dataclass
class Window:
    open: int = 0
    sent: Sent | None = None
    orphans: dict[int, Orphan] = field(default_factory=dict)

    @property
    def in_flight(self) -> int:
        held = self.sent.tokens if self.sent and self.sent.fate != "merged" else 0
        return self.open + held + sum(o.tokens + o.after for o in self.orphans.values())


class Ledger:
    """Windows of every (learner, fragment). All counts are integers of token-fragments."""

    def __init__(self, num_fragments: int, carries_tokens: bool):
        self.num_fragments, self.carries_tokens = num_fragments, carries_tokens
        self.tokens_trained = 0
        self.merged = 0
        self.discarded: dict[str, int] = {}
        self.windows: dict[str, list[Window]] = {}

    def trained(self, learner: str, tokens: int) -> None:
        self.tokens_trained += tokens
        for window in self._of(learner):
            window.open += tokens

    def snapshotted(self, learner: str, fragment: int, round: int) -> None:
        window = self._of(learner)[fragment]
        if window.sent is not None:
            self._leave(window, round)
        window.sent, window.open = Sent(round, window.open), 0

    def settled(self, learner: str, fragment: int, round: int, fate: Fate) -> None:
        """The fate of a contribution is known. Repeats and unknown rounds change nothing."""
        window = self._of(learner)[fragment]
        if (orphan := window.orphans.pop(round, None)) is not None:
            self._close(fate, orphan.tokens)
            self._drop("overlap" if fate == "merged" else "superseded", orphan.after)
        elif window.sent is not None and window.sent.round == round and window.sent.fate is None:
            window.sent.fate = fate
            if fate == "merged":
                self.merged += window.sent.tokens

    def adopted(self, learner: str, fragment: int) -> None:
        """The learner installed a newer version."""
        window = self._of(learner)[fragment]
        sent = window.sent
        if self.carries_tokens:
            if sent is not None and sent.fate is not None:
                window.open += 0 if sent.fate == "merged" else sent.tokens
                window.sent = None
            return
        if sent is None:
            self._drop("superseded", window.open)
        elif sent.fate is None:
            window.orphans[sent.round] = Orphan(sent.tokens, window.open)
        else:
            if sent.fate != "merged":
                self._drop(sent.fate, sent.tokens)
            self._drop("overlap" if sent.fate == "merged" else "superseded", window.open)
        window.open, window.sent = 0, None

    def lost(self, learner: str, arrived: set[tuple[int, int]], reason: str = "learner_lost") -> None:
        """The learner's process is gone. `arrived`: (fragment, round) already received, still to be merged."""
        for fragment, window in enumerate(self._of(learner)):
            self._drop(reason, window.open)
            if (sent := window.sent) is not None:
                if sent.fate is None:
                    window.orphans[sent.round] = Orphan(sent.tokens, 0)
                elif sent.fate != "merged":
                    self._drop(sent.fate, sent.tokens)
            window.open, window.sent = 0, None
            for round in [r for r in window.orphans if (fragment, r) not in arrived]:
                self.settled(learner, fragment, round, "learner_lost")

    def unsettled(self, learner: str, fragment: int) -> list[int]:
        """Rounds of contributions whose fate is not known yet."""
        window = self._of(learner)[fragment]
        sent = [window.sent.round] if window.sent and window.sent.fate is None else []
        return sorted([*window.orphans, *sent])

    @property
    def in_flight(self) -> int:
        return sum(w.in_flight for windows in self.windows.values() for w in windows)

    @property
    def trained_token_fragments(self) -> int:
        return self.tokens_trained * self.num_fragments

    def summary(self) -> dict[str, Any]:
        return {
            "tokens_trained": self.tokens_trained,
            "token_fragments": {
                "trained": self.trained_token_fragments,
                "merged": self.merged,
                "discarded": dict(sorted(self.discarded.items())),
                "in_flight": self.in_flight,
            },
        }

    def validate(self) -> None:
        """Raise AssertionError unless every token has a fate."""
        known = self.merged + sum(self.discarded.values()) + self.in_flight
        assert known == self.trained_token_fragments, f"ledger: {self.summary()} does not add up"

    def _of(self, learner: str) -> list[Window]:
        if learner not in self.windows:
            self.windows[learner] = [Window() for _ in range(self.num_fragments)]
        return self.windows[learner]

    def _leave(self, window: Window, round: int) -> None:
        """A new snapshot covers the tokens of the previous, unmerged one (same base, so same work)."""
        sent = window.sent
        assert sent is not None and sent.fate is not None, f"round {round}: {sent} is not settled"
        window.open += sent.tokens if sent.fate != "merged" else 0

    def _close(self, fate: Fate, tokens: int) -> None:
        if fate == "merged":
            self.merged += tokens
        else:
            self._drop(fate, tokens)

    def _drop(self, reason: str, tokens: int) -> None:
        if tokens:
            self.discarded[reason] = self.discarded.get(reason, 0) + tokens
