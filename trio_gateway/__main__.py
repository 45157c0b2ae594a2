"""``python -m trio_gateway`` is the command line."""

from .cli import main

main()
