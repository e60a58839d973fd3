"""Numbers as people read them."""


def duration(seconds: float | None) -> str:
    """`42 s`, `12 min 05 s`, `3 h 12 min`, `2 d 04 h`."""
    if seconds is None:
        return "-"
    whole = int(max(seconds, 0.0))
    for size, unit, smaller, small_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller:02d} {small_unit}"
    return f"{whole} s"


def short_time(seconds: float | None) -> str:
    """What is often much less than a second: `0.2 ms`, `35 ms`, `1.2 s`."""
    if seconds is None:
        return "-"
    if seconds >= 60:
        return duration(seconds)
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms" if seconds >= 0.01 else _ms(seconds)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def size(num_bytes: float | None) -> str:
    """`223 kB`, `4.1 GB`."""
    if num_bytes is None:
        return "-"
    value = max(num_bytes, 0.0)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError


def amount(value: float) -> str:
    """A rate or a count: `12.3`, `1,240`, `3.4 M`."""
    if value >= 9_999_500:
        return f"{value / 1e6:,.1f} M"
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


def share(value: float) -> str:
    """In percent; what is there at all is not 0%."""
    return "<1%" if 0 < value < 0.005 else f"{value:.0%}"


def counted(count: int, what: str) -> str:
    """`1 run`, `2,000 runs`."""
    return f"{count:,} {what}{'s' * (count != 1)}"
