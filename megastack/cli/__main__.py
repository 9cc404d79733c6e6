"""``python -m megastack.cli``."""

import sys

from megastack.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
