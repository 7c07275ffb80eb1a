"""Fakes of the engine, live servers, and wrong requests for the tests of the API."""
