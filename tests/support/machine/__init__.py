"""Command lines of other servers, for the tests of the command line."""
