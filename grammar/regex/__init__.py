"""Regular expressions: ECMA-262 patterns parsed, matched and translated; formats; numbers as patterns."""
