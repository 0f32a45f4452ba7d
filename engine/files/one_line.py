"""Messages about what others wrote."""

_LONGEST = 1000


def one_line(text: str) -> str:
    """A message on one line that any terminal takes: what cannot be printed is escaped, the tail of a long one cut."""
    cut = text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in cut)
