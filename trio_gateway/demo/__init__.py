"""The demo: a real model, the gateway before it, and a client, on this machine alone.

Modules in the order of reading::

    _demo        what happens, from top to bottom
    _ending      the one scope that everything stands in, and why it ended
    _fleet       simulated workers beside the engine, one of which is killed
    _processes   engine, gateway and workers as child processes
    _question    what a client does: ask with the OpenAI SDK, look up the record
    _screen      what is shown
"""

from ._demo import run_demo as run_demo
