"""Loading weights: readers, tensor names, dequantisation, weight forms."""
