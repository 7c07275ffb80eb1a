"""HTTP server: the application, its middleware, connection limits, and the start and end of the server process."""
