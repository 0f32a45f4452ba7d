"""Checkpoints in the release's layout: from a name or a directory to sizes, statistics and weights (spec section 2)."""
