"""The decoder that every family shares: its configuration, layers, positions and matrix products."""
