"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# A loaded machine is no reason to fail: how long an example takes is the bench's question.
settings.register_profile("house", deadline=None)
settings.load_profile("house")
