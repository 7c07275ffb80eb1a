"""The HTTP server: the app, what stands around every request, the life of the process."""
