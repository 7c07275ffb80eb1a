"""Generation: builds engine requests from parsed bodies, and converts deltas to response bodies and event streams."""
