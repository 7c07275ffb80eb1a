"""Printable text: what others have written, without the control characters that a terminal would obey."""


def printable(text: str) -> str:
    """Return a text with a blank in the place of any white space, and ``?`` in that of other control characters."""
    return "".join(each if each.isprintable() else " " if each.isspace() else "?" for each in text)
