"""Environments: single-use partners of one episode. They know `gropius.types` and nothing of models or training."""
