"""The typed verbs of each role, and the worker classes that carry them out."""
