"""Numbers for people: counts, bytes, time spans and fractions in few digits."""


def short(value: float, digits: int = 3) -> str:
    """A count in at most `digits` digits with its thousands letter.

    >>> short(1_724_416), short(950), short(0)
    ('1.72M', '950', '0')
    """
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.{digits}g}{letter}"
    return f"{value:.{digits}g}"


def num_bytes(value: float) -> str:
    """Bytes in decimal units.

    >>> num_bytes(19_400_000)
    '19.4 MB'
    """
    count = short(value)
    return f"{count[:-1]} {count[-1]}B" if count[-1].isalpha() else f"{count} B"


def seconds(value: float) -> str:
    """A time span.

    >>> seconds(2.513), seconds(75), seconds(7260)
    ('2.5 s', '75.0 s', '2 h 1 min')
    """
    if value < 120:
        return f"{value:.1f} s"
    if value < 3600:
        return f"{int(value // 60)} min {value % 60:.0f} s"
    if value < 172_800:
        return f"{int(value // 3600)} h {value % 3600 // 60:.0f} min"
    return f"{value / 86_400:.1f} days"


def percent(fraction: float) -> str:
    """A fraction 0..1 as a percentage.

    >>> percent(0.93095)
    '93.1 %'
    """
    return f"{100 * fraction:.1f} %"


def times(value: float | None) -> str:
    """How many times fewer, in few digits.

    >>> times(146.29), times(0.984), times(3152.4), times(None)
    ('146x', '0.98x', '3,152x', '–')
    """
    if value is None:
        return "–"
    return f"{value:,.0f}x" if value >= 100 else f"{value:.1f}x" if value >= 10 else f"{value:.2f}x"
