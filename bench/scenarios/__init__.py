"""One question per module; each module's docstring says how it is asked."""
