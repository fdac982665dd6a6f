"""The one way back: what fewbits has put into a model comes out again, the last first.

A verb that puts something into a model leaves a part on its record; `TAKEN_OUT_BY` says for each class of
part what takes it out. Parts of other classes stay: layers that ranks share or shard, and what a user chose
to recompute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fewbits.decoder.fuse import Fusion, fusion_of, unfuse
from fewbits.errors import Unsupported
from fewbits.host.attention import UsedAttention, restore_attention
from fewbits.host.conversion import Conversion, conversion_of
from fewbits.host.packed_rows import RowsApart
from fewbits.host.receipt import Receipt
from fewbits.host.record import record_of, take_part
from fewbits.host.unwrap import unwrap
from fewbits.host.walks import lengthen_walks
from fewbits.models.packing import convert
from fewbits.models.packing.cache_choice import CacheChoice, forget_cache
from fewbits.models.stochastic import in_model as stochastic
from fewbits.models.stochastic.attention import StochasticAttentionState, restore_stochastic_attention
from fewbits.models.stochastic.sharing import SharedInputs, unshare_inputs
from fewbits.recipes.stochastic_config import StochasticConfig

TAKEN_OUT_BY: dict[type, Callable[[Any], Receipt]] = {
    Conversion: convert.restore,
    Fusion: unfuse,
    UsedAttention: restore_attention,
    StochasticConfig: stochastic.take_out,
    StochasticAttentionState: restore_stochastic_attention,
    SharedInputs: unshare_inputs,
    CacheChoice: forget_cache,
}


def undo(model: nn.Module, *, keep: tuple[type, ...] = ()) -> Receipt:
    """Take out all that fewbits has put into this model, the last first, in place.

    Layers that ranks share or shard stay so, as do adapters.

    Args:
        model: the model, through every wrapper.
        keep: classes of parts that stay.

    Returns:
        What became of the modules (`fewbits.models.packing.convert.restore` says with which weights), with
        the notes of all that was taken out.

    Raises:
        Unsupported: nothing of all that is in this model.
    """
    whole, model = model, unwrap(model)
    if conversion_of(model) is not None and Conversion not in keep:
        convert.refuse_merged(model, "restore()")  # before anything is taken out
    receipts = []
    while (
        kind := _last_part(model, keep)
    ) is not None:  # one may go with another, or bring back an earlier one
        receipts.append(TAKEN_OUT_BY[kind](model))
    if not receipts:
        raise Unsupported(
            f"fewbits has put nothing into this {type(model).__name__}; there is nothing to restore."
        )
    apart = take_part(model, RowsApart)
    if apart is not None:
        apart.handle.remove()
    if fusion_of(model) is None:
        lengthen_walks(whole)  # of what is around the model as well
    told = next(
        (receipt for receipt in receipts if receipt.changes), Receipt(f"restored {type(model).__name__}")
    )
    told.notes = [note for receipt in receipts for note in receipt.notes]
    return told


def _last_part(model: nn.Module, keep: tuple[type, ...]) -> type | None:
    """The class of the last part on this model's record that can be taken out."""
    record = record_of(model)
    kinds = (
        [] if record is None else [kind for kind in record.parts if kind in TAKEN_OUT_BY and kind not in keep]
    )
    return kinds[-1] if kinds else None
