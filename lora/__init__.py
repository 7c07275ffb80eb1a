"""Many LoRA adapters over one base model: PEFT folders read exactly, versions, slots, and their part in a step."""
