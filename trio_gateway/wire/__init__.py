"""Bytes to meaning and back. Sans-IO: no Trio, no clock, no socket."""
