"""Cases for the tests of grammars."""
