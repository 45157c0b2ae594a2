"""Print the reference page: ``python -m trio_gateway.config > docs/reference/settings.md``."""

import sys

from trio_gateway.config import reference_page

sys.stdout.write(reference_page())
