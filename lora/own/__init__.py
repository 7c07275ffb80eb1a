"""An adapter's own weights in place of the base model's: how they are made of what PEFT saved, and used in a step."""
