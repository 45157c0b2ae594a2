"""Coverage-guided fuzzing of all that reads what strangers send. See README.md.

Modules in the order of reading::

    target      what a target is, and the words that targets share
    wire/       one target for each sans-IO part
    edge/       a whole client connection
    smuggling   requests that two readers may see differently: seeds here, a test in tests/edge
    engine      one target under atheris: the only module that imports it
    endurance   one target's corpus again and again: does memory grow
    command     what `make fuzz` runs
"""
