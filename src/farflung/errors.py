"""Errors that people meet, and the hint that belongs to them."""

import difflib
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin, get_type_hints


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


def field_error(error: Exception, *kinds: type) -> str:
    """Retell a msgspec.ValidationError for a person; words that a field of `kinds` allows are named.

    >>> field_error(ValueError("Expected `int`, got `str` - at `$.seed`"))
    'seed: expected int, got str'
    """
    what, _, place = str(error).partition(" - at ")
    for theirs, ours in (("object", "table"), ("`", "")):  # TOML's words
        what = what.replace(theirs, ours)
    name = place.strip("`").removeprefix("$.").removeprefix("$")
    field, hints = name.rpartition(".")[2], [get_type_hints(kind) for kind in kinds]
    words = [word for hint in hints for word in _words(hint.get(field))] if "enum value" in what else []
    known = f" (known: {', '.join(words)})" if words else ""
    return f"{name}: {what[:1].lower()}{what[1:]}{known}" if name else f"{what}{known}"


def _words(annotation: Any) -> list[str]:
    """The words that an annotation with Literal in it allows."""
    if get_origin(annotation) is Literal:
        return sorted(map(str, get_args(annotation)))
    return [word for part in get_args(annotation) for word in _words(part)]
