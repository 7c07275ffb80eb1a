"""Published adapters, as PEFT saves them: factors of modules, of a layer's stacked experts, and of MLA's heads."""
