"""Sampling: masks, penalties, top-k / top-p / min-p, logprobs, verification of drafts."""
