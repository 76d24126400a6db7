"""Norms of shards, clipping by them, and the scale of a loss."""
