"""Checkpoints in the release's layout: from a name to sizes, statistics and weights (model.md section 2)."""
