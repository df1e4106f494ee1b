"""What the comparison with TRL shares: clocks, the recorded batch, and one worker for each side."""
