"""Scheduling: the waiting queue, admission, step plans, draft budgets, mask jobs and session pins. Imports no torch."""
