"""What fails in one record and not in another, each failure with its reason; the status says if all have one.

``python -m peer_suites.compare ALONE PACKED [UNROUNDED [DECODED]]``: records of the plugin's ``--record``.
The last two are of the second's failures, run again with ``--failed-in PACKED``: with ``--unrounded-merges``,
and by the peer alone with ``--base nf4-decoded`` or ``int8-decoded``. A failure's reason is

* a refusal: one of this library's own errors, whose sentence is printed;
* rounding of a merge: it passes once merged weights are not rounded again, and that was to the nearest value;
* the numbers: the peer alone fails over plain linears of the same rounded weights;
* a name: the test reads the name of a class, and ours have their own;
* another method than LoRA, with LoRA in its name, which takes plain linears only;
* FSDP1: torch's flat parameters hold one floating dtype, and packed weights are integers;
* a trained copy of a packed layer, which torch refuses over bitsandbytes' layers in the same words.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from typing import Any

from peer_suites.record import read

_NEAREST = 1.001  # half steps; float32 arithmetic on top of one
_KNOWN = (
    (
        "FSDP1's flat parameters hold one floating dtype (torch)",
        r"Must flatten tensors with uniform dtype|Cannot flatten integer dtype tensors",
    ),
    (
        "modules_to_save of a packed layer: torch refuses it, over bitsandbytes too",
        r"only Tensors of floating point dtype can require gradients",
    ),
    (
        "the test reads the name of a class",
        r"startswith[\s\S]*'lora\.LoRALinear|targeted layer of type QuantizedLinear has no bias",
    ),
    (
        "the test reads the address of a weight, which a packed one does not have",
        r"access the data pointer on an invalid python storage",
    ),
    ("GLoRA, another method, takes plain linears only (PEFT)", r"GLoRA does not support this layer type"),
)
UNEXPLAINED = "unexplained"


def reason(
    row: dict[str, Any], unrounded: dict[str, Any] | None = None, decoded: dict[str, Any] | None = None
) -> str:
    """Why a test failed, or `UNEXPLAINED`."""
    why = row["why"]
    refused = re.match(r"fewbits\.errors\.\w+: (?P<sentence>.*)", why)
    if refused:
        return "refused: " + re.sub(r"\b(?!lm_head)\w+(\.\w+)+\b", "LAYER", refused["sentence"])
    for name, pattern in _KNOWN:
        if re.search(pattern, why):
            return name
    if unrounded is not None and unrounded["outcome"] == "passed" and "rounding" in unrounded:
        return "rounding of a merge" if unrounded["rounding"] <= _NEAREST else UNEXPLAINED
    if unrounded is not None and _comes_further(row, unrounded) and unrounded["rounding"] <= _NEAREST:
        return "rounding of a merge; unrounded it passes there and fails further down"
    if decoded is not None and decoded["outcome"] == "failed" and decoded["places"][-1] == row["places"][-1]:
        return "the peer alone fails over the same rounded weights"
    return UNEXPLAINED


def is_open(row: dict[str, Any]) -> bool:
    """Whether a failed test's own line does not say why it failed."""
    return reason(row) == UNEXPLAINED


def _comes_further(row: dict[str, Any], unrounded: dict[str, Any]) -> bool:
    if unrounded["outcome"] != "failed" or "rounding" not in unrounded:
        return False
    (file, _, first), (same, _, second) = (r["places"][-1].rpartition(":") for r in (row, unrounded))
    return bool(file == same and int(second) > int(first))


def main(alone: str, packed: str, unrounded: str | None = None, decoded: str | None = None) -> int:
    """Print the net failures by reason, and the unexplained ones by name; 1 if there are any of those."""
    before, after = read(alone), read(packed)
    again = read(unrounded) if unrounded else {}
    peers = read(decoded) if decoded else {}
    for title, rows in (("alone", before), ("packed", after)):
        counts = Counter(row["outcome"] for row in rows.values())
        print(f"{title}: {len(rows)} run; " + ", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    net = {
        test: row
        for test, row in after.items()
        if row["outcome"] == "failed" and before.get(test, {}).get("outcome") == "passed"
    }
    reasons = {test: reason(row, again.get(test), peers.get(test)) for test, row in net.items()}
    print(f"net failures: {len(net)}")
    for why, count in Counter(reasons.values()).most_common():
        largest = max(
            (again[t].get("rounding", 0) for t, w in reasons.items() if w == why and t in again), default=0
        )
        print(f"{count:5}  {why}" + (f" (at most {largest:.3f} half steps)" if "rounding" in why else ""))
    unknown = [test for test, why in reasons.items() if why == UNEXPLAINED]
    for test in unknown:
        print(f"       {test}\n         {net[test]['why'][:300]}\n         {net[test]['places'][-1:]}")
    print(f"unexplained: {len(unknown)}")
    return int(bool(unknown))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:5]))
