"""What both ends of the wire share: header names, byte counters, and how a transfer can fail."""

from dataclasses import dataclass

RUN_HEADER = "X-Farflung-Run"  # the run a client believes it talks to
LEARNER_HEADER = "X-Farflung-Learner"  # whose bytes these are, for the counters
ARRIVED_HEADER = "X-Farflung-Arrived"  # chunks that arrived, as ranges: 0-3,7
REASON_HEADER = "X-Farflung-Reason"  # of every refusal, beside its JSON line: upgrades and HEAD lose bodies
DETAIL_HEADER = "X-Farflung-Detail"


@dataclass(slots=True)
class Traffic:
    """Bytes of one party, or of all. Up is learner to hub.

    Data counts bodies with our frame header as they pass, so a chunk that was sent twice counts twice.
    Control counts the payloads of WebSocket frames, both ways.
    """

    bytes_up: int = 0
    bytes_down: int = 0
    bytes_control: int = 0


class TransportError(Exception):
    """One line for a person; never a stack trace."""


class Refused(TransportError):
    """The other side does not want this: a name for programs, one line for people."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"refused ({reason}): {detail}")
        self.reason = reason
        self.detail = detail


class Gone(TransportError):
    """The hub no longer has the object, or never had it."""


class TransferFailed(TransportError):
    """A transfer was tried as often as allowed."""


class Unreachable(TransportError):
    """No control connection could be made."""


def one_line(error: BaseException) -> str:
    """An exception as one line, with its type when it says nothing else."""
    return " ".join(str(error).split()) or type(error).__name__


def ranges(indices: set[int]) -> str:
    """A set of chunk indices, compactly.

    >>> ranges({0, 1, 2, 7})
    '0-2,7'
    """
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(f"{a}-{b}" if a != b else f"{a}" for a, b in runs)


def unranges(text: str) -> set[int]:
    """The set that `ranges` wrote.

    >>> sorted(unranges("0-2,7")), unranges("")
    ([0, 1, 2, 7], set())
    """
    pairs = [part.partition("-") for part in text.split(",") if part]
    return {index for a, _, b in pairs for index in range(int(a), int(b or a) + 1)}
