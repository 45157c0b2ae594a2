"""Targets of the public door."""
