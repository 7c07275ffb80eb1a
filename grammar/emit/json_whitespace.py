"""The white space between the parts of a JSON text."""

MAX_WHITESPACE = 80
# The same expression must stand in every part of a grammar, or the lexer keeps the parts apart.
WHITESPACE = rf"[ \t\r\n]{{1,{MAX_WHITESPACE}}}"
