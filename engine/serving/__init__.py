"""The asynchronous engine of the API process: requests, the client of the engine process, outputs. No torch."""
