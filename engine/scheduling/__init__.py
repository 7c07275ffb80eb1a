"""The scheduler: waiting queue, admission, step plans, draft budgets, mask jobs, session pins. No torch."""
