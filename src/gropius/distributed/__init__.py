"""Several processes, one run: how they find each other, what they say, and who starts them again."""
