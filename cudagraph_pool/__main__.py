"""``python -m cudagraph_pool`` is the command ``cudagraph-pool``."""

import sys

from cudagraph_pool._cli import main

if __name__ == "__main__":
    sys.exit(main())
