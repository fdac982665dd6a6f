"""``python -m fewbits COMMAND``: the command ``fewbits``, where its script is not on the PATH."""

import sys

from fewbits.cli import main

if __name__ == "__main__":
    sys.exit(main())
