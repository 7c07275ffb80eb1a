"""The HTTP face: routes, protocol, errors, command line."""
