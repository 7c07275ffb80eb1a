"""API: the HTTP server's routes, protocols, errors and state, and the command line."""
