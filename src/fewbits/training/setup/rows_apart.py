"""Whether rows that lie in one sequence stay apart in a model's own layers.

fewbits' own attention keeps packed rows apart. A family whose layers run by transformers' code may not: a
convolution or a state goes on from row to row, or a mask is made without the rows' boundaries. Nothing says
so, and training would teach the model what no text holds. So one sequence of two rows is computed twice,
with another first row the second time: where the second row's logits change, they do not stay apart.
"""

from __future__ import annotations

from typing import Any

import torch

from fewbits.errors import Unsupported
from fewbits.families.registry import model_type_of, written_spec
from fewbits.nn.segments import Segments

_ROW = 12  # tokens: more than a convolution looks back
_LEAST = 1e-4  # relative; in float32 sums of other lengths differ by less


def check_rows_apart(model: Any) -> None:
    """Refuse packed rows for a model whose layers let them see each other.

    Args:
        model: on its device, in any mode; a family with fewbits' own attention is not computed.

    Raises:
        Unsupported: they do, or the model refuses packed rows itself.
    """
    spec = written_spec(model)
    if spec is not None and spec.attention is not None and not spec.attention.extras:
        return
    kind = model_type_of(model)
    try:
        change = _change_behind_another_row(model)
    except (ValueError, NotImplementedError, TypeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise Unsupported(f"packing: {kind} takes no packed rows ({reason}); set packing: false.") from error
    tolerance = max(_LEAST, 2 * torch.finfo(model.dtype).eps)
    if change > tolerance:
        raise Unsupported(
            f"packing: rows in one sequence do not stay apart in the layers of {kind} (another row in front "
            f"moved a token's logits by {change:.0%}); set packing: false."
        )


@torch.no_grad()
def _change_behind_another_row(model: Any) -> float:
    """How far the logits of a row's tokens move at most when the row before it is another; relative."""
    device = model.get_input_embeddings().weight.device
    most = model.config.get_text_config().vocab_size
    numbers = torch.arange(3 * _ROW, device=device).mul(7919).add(13).remainder(most).view(3, 1, _ROW)
    boundaries = Segments.from_lengths([_ROW, _ROW], device=device).keywords()
    positions = torch.arange(_ROW, device=device).repeat(2)[None]
    training = model.training
    model.eval()
    try:
        behind = [
            model(
                input_ids=torch.cat([first, numbers[2]], 1),
                position_ids=positions,
                use_cache=False,
                **boundaries,
            )
            .logits[0, _ROW:]
            .float()
            for first in numbers[:2]
        ]
    finally:
        model.train(training)
    moved = (behind[0] - behind[1]).norm(dim=1) / behind[0].norm(dim=1).clamp_min(1e-30)
    return float(moved.max())


__all__ = ["check_rows_apart"]
