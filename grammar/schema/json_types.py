"""Bits of the JSON types, with separate bits for integers and other numbers, and of the constants true and false."""

NULL, TRUE, FALSE, INTEGER, FRACTION, STRING, ARRAY, OBJECT = (1 << bit for bit in range(8))
BOOLEAN = TRUE | FALSE
NUMBER = INTEGER | FRACTION
ALL_TYPES = (1 << 8) - 1
TYPE_BITS = {
    "null": NULL, "boolean": BOOLEAN, "integer": INTEGER, "number": NUMBER, "string": STRING, "array": ARRAY,
    "object": OBJECT,
}  # fmt: skip
WORDS = ((NULL, "null"), (TRUE, "true"), (FALSE, "false"))
