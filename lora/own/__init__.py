"""Own weights: an adapter's weights that replace the base model's, created from PEFT's tensors and used in a step."""
