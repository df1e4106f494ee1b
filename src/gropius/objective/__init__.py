"""The formula: spec, presets, per-group arithmetic (NumPy float64) and per-token arithmetic (torch)."""
