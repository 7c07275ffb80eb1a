"""Sampling: masks, penalties, top-k / top-p / min-p, logprobs, draft verification."""
