"""Multi-LoRA over one base model: PEFT adapters, versions, host cache, device slots, and the LoRA part of a step."""
