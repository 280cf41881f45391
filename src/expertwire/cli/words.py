"""Words that reports share."""


def number(count: int, noun: str) -> str:
    """A count with its noun.

    >>> number(1, "row"), number(1200, "state")
    ('1 row', '1,200 states')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
