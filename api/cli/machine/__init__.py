"""Commands about this machine: cached models, running servers, shell completion, doctor."""
