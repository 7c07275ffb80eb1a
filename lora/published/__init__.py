"""An adapter as PEFT publishes it: factors of modules, and of all experts of a layer together."""
