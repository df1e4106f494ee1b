"""Training: from scored groups to an optimiser step; packs, the step, the optimiser, checkpoints, the loop."""
