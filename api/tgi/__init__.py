"""The protocol of Text Generation Inference: its bodies as completions of ours, and its answers."""
