"""gRPC: services whose calls are requests to the server's own routes, within its process."""
