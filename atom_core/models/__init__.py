"""Models: loading them with transformers, and binding their layers to plugins."""
