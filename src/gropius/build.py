"""The composition root: the only file that turns names into objects."""
