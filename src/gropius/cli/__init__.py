"""The command line: one file a verb. Nothing heavy is imported before a verb runs."""
