"""Asynchronous engine of the API process: requests in tokens, engine clients and output processing. No torch."""
