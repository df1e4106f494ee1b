"""Models: loading, the built-in tiny model, chat formats, and per-token log-probabilities."""
