"""How tenants share what a process has: bounds, slots and turns. Imports nothing of ours, so every layer may use it."""
