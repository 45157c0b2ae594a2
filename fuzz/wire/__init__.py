"""Targets of the sans-IO parts."""
