"""Errors that people meet, and the hint that belongs to them."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input from outside (recipe, file, address, option): one line says what, where and what to do.

    The command line prints the line and exits with code 2; everything else that escapes is a bug.
    """


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the closest known word, else the list of what is known.

    >>> did_you_mean("methd", ["method", "seed"])
    " (did you mean 'method'?)"
    >>> did_you_mean("zzz", ["method", "seed"])
    ' (known: method, seed)'
    """
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else f" (known: {', '.join(known)})"
