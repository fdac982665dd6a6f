"""``python -m fewbits.cli``."""

import sys

from fewbits.cli import main

if __name__ == "__main__":
    sys.exit(main())
