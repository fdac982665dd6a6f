"""The one way back: what fewbits has put into a model comes out again, the last first."""

from __future__ import annotations

from torch import nn

from fewbits.decoder.fuse import fusion_of, unfuse
from fewbits.host.attention import restore_attention, used_attention
from fewbits.host.conversion import conversion_of
from fewbits.host.receipt import Receipt
from fewbits.host.unwrap import unwrap
from fewbits.models import convert, stochastic
from fewbits.models.stochastic_attention import restore_stochastic_attention, stochastic_attention_of


def undo(model: nn.Module) -> Receipt:
    """Take out the fused decoder, the attention, the stochastic products and the conversion, in place.

    Layers that ranks share or shard stay so, as do adapters.

    Returns:
        What became of the modules (`fewbits.models.convert.restore` says with which weights).

    Raises:
        Unsupported: nothing of all that is in this model.
    """
    model = unwrap(model)
    notes = []
    if fusion_of(model) is not None:
        unfuse(model)
        notes.append("decoder layers: their own forwards again")
    if stochastic.stochastic_config_of(model) is not None:
        receipt = stochastic.take_out(model)
    elif conversion_of(model) is not None:
        receipt = convert.restore(model)
    else:
        if stochastic_attention_of(model) is not None:
            notes.append(restore_stochastic_attention(model))
        if used_attention(model) is not None:
            notes.append(restore_attention(model))
        if not notes:
            return convert.restore(model)  # which refuses
        receipt = Receipt(f"restored {type(model).__name__}")
    receipt.notes[:0] = notes
    return receipt
