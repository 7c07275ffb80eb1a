"""gRPC services: their calls are converted to requests to the server's own routes, within its process."""
