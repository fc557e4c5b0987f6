"""DeepSeek-V4 attention: its layers, its per-request rings, its paged compressed entries, its ops."""
