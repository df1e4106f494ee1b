"""Logs of other trainers, one file each: which files are theirs, and how their rows read in our words. No torch."""
