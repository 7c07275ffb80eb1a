"""Text Generation Inference: translates its bodies to completions, and builds its responses."""
