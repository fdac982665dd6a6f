"""``python -m fewjobs``."""

import sys

from fewjobs.command_line import main

if __name__ == "__main__":
    sys.exit(main())
