"""An adapter as PEFT publishes it: factors of modules, of all experts of a layer together, and of latent heads."""
