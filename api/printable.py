"""Printable text: removes control characters, which a terminal would obey, from text that others have written."""


def printable(text: str) -> str:
    """Return a text in which any white space is replaced by a blank, and other control characters by ``?``."""
    return "".join(each if each.isprintable() else " " if each.isspace() else "?" for each in text)
