"""The HTTP server: application, middleware, connection limits, and the life of the process."""
