"""``python -m cudagraph_pool`` is the command ``cudagraph-pool``."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
