"""Regular expressions: ECMA-262 patterns parsed, matched and spelled anew; formats; numbers as patterns."""
