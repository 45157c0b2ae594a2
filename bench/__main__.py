"""``python -m bench``: see `bench.command`."""

import sys

from .command import main

sys.exit(main())
