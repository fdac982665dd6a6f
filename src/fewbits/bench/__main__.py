"""``python -m fewbits.bench kernels``, for a machine where fewbits is not installed."""

from __future__ import annotations

import sys

from fewbits.bench.run import main
from fewbits.errors import FewbitsError

try:
    sys.exit(main())
except FewbitsError as error:
    sys.exit(str(error))
