"""Loading: from a name to weights on the device."""
