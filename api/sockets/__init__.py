"""WebSockets: many requests over one connection, each answered by the route that answers it over HTTP."""
