"""What fails in one log of pytest (``-r fE --tb=line``) and not in the other, counted by its reason."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

_LINE = re.compile(r"^(FAILED|ERROR) (?P<test>\S+(?:\[.*?\])?)(?: - (?P<why>.*))?$")


def failures(log: str) -> dict[str, str]:
    """Names of tests that failed, with pytest's short reason."""
    found = {}
    for line in Path(log).read_text(encoding="utf-8", errors="replace").splitlines():
        match = _LINE.match(line)
        if match is not None:
            found[match["test"]] = match["why"] or ""
    return found


def main(alone: str, packed: str) -> int:
    """Print the net failures; the status is 1 if there are any."""
    before, after = failures(alone), failures(packed)
    net = {test: why for test, why in after.items() if test not in before}
    gone = sum(test not in after for test in before)
    print(f"{len(before)} fail alone, {len(after)} over the packed base; {len(net)} net, {gone} only alone")
    for (function, why), count in Counter(
        (test.split("::")[-1].split("[")[0], why) for test, why in net.items()
    ).most_common():
        print(f"{count:5}  {function}: {why}")
    return int(bool(net))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:3]))
