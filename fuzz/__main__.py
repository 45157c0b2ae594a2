"""``python -m fuzz``: see `fuzz.command`."""

import sys

from .command import main

sys.exit(main())
