"""An adapter's own weights in place of the base model's: made from the tensors that PEFT saved, and used in a step."""
