"""Fake devices, oracles and faults for the tests of the engine."""
