"""What folding into a model's weights is worth under stochastic computing, on stories3m.

    python benchmarks/stochastic/sc_folded_stories3m.py --model FOLDER --text tinystories_val.txt

Perplexity with all linears and both attention products at one stream length (halved streams, bitrev): as the
weights are, with rotated values, with a rotated residual stream, and with both, for three draws of signs.
Then the attention weights' divergence on held-out text with scales between queries and keys, chosen on three
other parts of the text.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from fewbits.formats.stochastic import STOCHASTIC
from fewbits.inference.evaluate import perplexity, text_windows
from fewbits.models.loading.in_memory import apply_stochastic
from fewbits.models.stochastic.query_key_scales import fold_query_key_scales
from fewbits.models.stochastic.rotations import rotate_residual, rotate_values
from fewbits.recipes.stochastic_config import AttentionSetting, LinearSetting, StochasticConfig
from fewbits.training.calibration.query_key_scales import choose_query_key_scales

_HELD_OUT = 500_000  # a character behind all that scales are chosen on
_PARTS = (100_000, 220_000, 340_000)


def under(length: int, *, linears: bool = True) -> StochasticConfig:
    """All products at one length, or QK^T alone."""
    exact = () if linears else (("*", LinearSetting(runs="exact")),)
    attention = AttentionSetting(scores=length, values=length if linears else None)
    return StochasticConfig(
        options=STOCHASTIC.with_length(length), linears=exact, attention=(("*", attention),)
    )


def windows(model: Any, tokenizer: Any, text: str, tokens: int) -> list[Tensor]:
    """Token ids (1, 256)."""
    cut = text_windows(model, tokenizer, text, window=256, max_tokens=tokens)
    lead = [] if cut.bos is None else [cut.bos]
    rows = [torch.tensor([*lead, *cut.ids[w.begin : w.end].tolist()])[None] for w in cut.windows]
    return [row for row in rows if row.shape == rows[0].shape]


def measured(model: Any, tokenizer: Any, text: str, config: StochasticConfig | None, tokens: int) -> float:
    """Perplexity of a copy of the model."""
    model = copy.deepcopy(model)
    if config is not None:
        apply_stochastic(model, config)
    return perplexity(model, tokenizer, text, window=512, max_tokens=tokens).perplexity


def rotations(model: Any, tokenizer: Any, text: str, lengths: Sequence[int | None], tokens: int) -> None:
    """The table of rotations; None is the exact model."""
    for length in lengths:
        config = None if length is None else under(length)
        turned = copy.deepcopy(model)
        rotate_values(turned)
        cells = [measured(m, tokenizer, text, config, tokens) for m in (model, turned)]
        for seed in range(3):
            turned = copy.deepcopy(model)
            rotate_residual(turned, seed=seed)
            cells.append(measured(turned, tokenizer, text, config, tokens))
            rotate_values(turned)
            cells.append(measured(turned, tokenizer, text, config, tokens))
        print("exact" if length is None else f"{length} cycles", *(f"{x:.3f}" for x in cells), flush=True)


def query_key(model: Any, tokenizer: Any, text: str, length: int, tokens: int) -> None:
    """Divergence on held-out text, and perplexity with QK^T alone in streams, before and after."""
    options, config = STOCHASTIC.with_length(length), under(length, linears=False)
    held_out = windows(model, tokenizer, text[_HELD_OUT:], 1024)
    before = choose_query_key_scales(model, held_out, options)
    print(
        f"{length} cycles, as it is: {fmean(c.before for c in before.values()):.4f}",
        f"{measured(model, tokenizer, text, config, tokens):.3f}",
    )
    for start in _PARTS:
        folded = copy.deepcopy(model)
        part = windows(folded, tokenizer, text[start : start + 30_000], 1024)
        choices = choose_query_key_scales(folded, part, options)
        fold_query_key_scales(folded, {name: choice.scales for name, choice in choices.items()})
        after = choose_query_key_scales(folded, held_out, options)
        print(
            f"{length} cycles, scales from {start}: {fmean(c.before for c in after.values()):.4f}",
            f"{measured(folded, tokenizer, text, config, tokens):.3f}",
            flush=True,
        )


def main() -> None:
    """Parse and measure."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--tokens", type=int, default=4088)
    parser.add_argument("--lengths", default="32,64")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    text = Path(args.text).read_text(encoding="utf-8")
    lengths = [int(length) for length in args.lengths.split(",")]
    print("as it is, values, then (residual, both) for three draws of signs")
    rotations(model, tokenizer, text, [None, *lengths], args.tokens)
    for length in lengths:
        query_key(model, tokenizer, text, length, args.tokens)


if __name__ == "__main__":
    main()
