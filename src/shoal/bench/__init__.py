"""Measuring ourselves and our peers side by side."""
