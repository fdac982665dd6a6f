"""One record on a model: found through every wrapper, copied with the model, told and undone as a whole."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import distributed, nn

import fewbits
from fewbits import explain
from fewbits.decoder.fuse import Fusion, fusion_of
from fewbits.errors import BadInput, Unsupported
from fewbits.formats.stochastic import STOCHASTIC
from fewbits.host.attention import UsedAttention, use_attention, used_attention
from fewbits.host.conversion import Conversion, conversion_of
from fewbits.host.receipt import Receipt
from fewbits.host.record import NOTES, RECORD, add_notes, notes_of, part_of, put_part, record_of, take_part
from fewbits.host.unwrap import unwrap
from fewbits.models.loading.plain_again import make_plain
from fewbits.models.packing.cache_choice import chosen_cache
from fewbits.models.stochastic.attention import use_stochastic_attention
from fewbits.models.stochastic.sharing import share_inputs
from fewbits.models.undo import TAKEN_OUT_BY
from fewbits.nn.stochastic.attention import AttentionProducts
from fewbits.recipes.stochastic_config import StochasticConfig
from tests.models.tiny import tiny, tokens


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    file = tmp_path_factory.mktemp("rank") / "meeting"
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def prepared(model: Any) -> Any:
    AcceleratorState._reset_state(True)  # another test's trainer may have left one of another precision
    return Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "compile": torch.compile,
    "DDP": nn.parallel.DistributedDataParallel,
    "DataParallel": nn.DataParallel,
    "accelerate": prepared,
    "compiled DDP": lambda model: torch.compile(nn.parallel.DistributedDataParallel(model)),
    "DDP of compiled": lambda model: nn.parallel.DistributedDataParallel(torch.compile(model)),
}


@pytest.mark.parametrize("with_adapters", [False, True])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.usefixtures("one_rank")
def test_what_is_on_a_model_is_found_through_every_wrapper(wrapper: str, with_adapters: bool) -> None:
    base = model = tiny("llama")
    fewbits.convert(model, "qlora_nf4")
    if with_adapters:
        model = fewbits.get_peft_model(model, r=2)
    fewbits.fuse(model)
    add_notes(model, ["a note"])
    wrapped = WRAPPERS[wrapper](model)
    assert unwrap(wrapped) is base
    for find in (conversion_of, fusion_of, used_attention, record_of):
        assert find(wrapped) is find(base) is not None
    assert notes_of(wrapped) == base.fewbits_notes == ["a note"]
    assert "fused decoder" in str(explain(wrapped)) and "recipe qlora_nf4" in str(explain(wrapped))


def test_a_model_has_one_attribute_of_ours_and_its_notes() -> None:
    model = tiny("llama")
    fewbits.convert(model, "int8")
    fewbits.fuse(model)
    add_notes(model, ["a note"])
    ours = [key for module in model.modules() for key in vars(module) if "fewbits" in key]
    assert ours == [RECORD, NOTES]
    assert [type(part) for part in record_of(model).parts.values()] == [Conversion, UsedAttention, Fusion]


def travelled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("travel", [copy.deepcopy, travelled])
def test_a_copy_has_a_record_of_its_own(travel: Callable[[Any], Any]) -> None:
    model = fewbits.get_peft_model(_converted(), r=2)
    fewbits.fuse(model)
    add_notes(model, ["a note"])
    other = travel(model)
    assert record_of(other) is not record_of(model)
    assert fusion_of(other).layers[0].layer is unwrap(other).model.layers[0]
    add_notes(other, ["its own"])
    assert unwrap(other).fewbits_notes == ["a note", "its own"] and notes_of(model) == ["a note"]
    fewbits.unfuse(other)
    assert fusion_of(other) is None and fusion_of(model) is not None
    assert take_part(other, Conversion) is not None and conversion_of(model) is not None


def _converted() -> Any:
    model = tiny("llama")
    fewbits.convert(model, "int8", keep_original=True)
    return model


def test_one_call_takes_out_everything() -> None:
    model = tiny("llama").eval()
    classes = [type(module) for module in model.modules()]
    expected = model(tokens()).logits
    fewbits.convert(model, "int8", keep_original=True)
    fewbits.fuse(model)
    receipt = fewbits.restore(model)
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(model(tokens()).logits, expected)
    assert "decoder layers: their own forwards again" in receipt.notes
    assert not record_of(model).parts
    with pytest.raises(Unsupported, match="nothing to restore"):
        fewbits.restore(model)


def test_what_is_fused_or_attends_alone_comes_out_too() -> None:
    model = tiny("llama")
    fewbits.fuse(model)
    assert "their own forwards again" in str(fewbits.restore(model))
    assert fusion_of(model) is None and used_attention(model) is None
    use_attention(model)
    assert "again" in str(fewbits.restore(model)) and used_attention(model) is None


def test_every_verb_gives_a_receipt_and_one_call_undoes_them_all() -> None:
    """Also in another order than that in which they came, and each alone."""
    model = tiny("llama").eval()
    before, expected = [*model.modules()], model(tokens()).logits
    mixed = StochasticConfig(options=replace(STOCHASTIC, chunk_d=16, stoc_len=32))
    verbs: list[Callable[[Any], Any]] = [
        lambda m: fewbits.choose_cache(m, "int8"),
        lambda m: fewbits.convert(m, mixed, keep_original=True, fuse_norms=False),
        share_inputs,
    ]
    for verb in verbs:
        told = verb(model)
        assert isinstance(told, Receipt) and all(note in str(explain(model)) for note in told.notes)
    kinds = {type(part) for part in record_of(model).parts.values()}
    assert kinds <= TAKEN_OUT_BY.keys()
    assert not torch.equal(model(tokens()).logits, expected)
    receipt = fewbits.restore(model)
    assert receipt.changes and "keys and values" in str(receipt) and not record_of(model).parts
    assert [*model.modules()] == before and torch.equal(model(tokens()).logits, expected)
    for verb in (verbs[0], use_attention, fewbits.fuse):
        assert isinstance(verb(model), Receipt)
        assert isinstance(fewbits.restore(model), Receipt) and not record_of(model).parts
    with pytest.raises(BadInput, match="strict"):
        fewbits.convert(model, mixed, strict=True)


def test_what_a_part_brings_back_is_taken_out_too() -> None:
    """Stochastic attention gives our own attention back, and that is no end of a restore."""
    model = tiny("llama").eval()
    expected = model(tokens()).logits
    use_attention(model)
    use_stochastic_attention(model, AttentionProducts(STOCHASTIC, STOCHASTIC))
    fewbits.restore(model)
    assert used_attention(model) is None and not record_of(model).parts
    assert torch.equal(model(tokens()).logits, expected)


def test_decoded_weights_leave_the_choice_of_a_cache() -> None:
    model = tiny("llama")
    fewbits.convert(model, "int8")
    fewbits.choose_cache(model, "int8")
    make_plain(model)
    assert chosen_cache(model, None).name == "int8" and conversion_of(model) is None
    fewbits.restore(model)
    assert chosen_cache(model, None) is None


def test_one_receipt_tells_everything_in_order() -> None:
    model = tiny("llama")
    converted = fewbits.convert(model, "int8")
    assert explain(model) is converted
    fused = fewbits.fuse(model)
    both = explain(model)
    assert str(both) == f"{converted}\n{fused}" and both.changes == converted.changes
    assert not converted.further
    fewbits.unfuse(model)
    assert explain(model) is converted


def test_a_part_is_there_once_and_anything_may_be_asked() -> None:
    model = tiny("llama")
    assert record_of(model) is None and notes_of(model) == [] and take_part(model, int) is None
    put_part(model, 1)
    put_part(model, 2)
    assert part_of(model, int) == 2 and part_of(model, str) is None
    assert take_part(model, int) == 2 and part_of(model, int) is None
    assert part_of(object(), int) is None


@pytest.mark.parametrize("undo", [fewbits.restore, fewbits.unfuse])
@pytest.mark.parametrize("wrapper", [torch.compile, nn.DataParallel])
def test_what_was_put_in_comes_out_through_wrappers(wrapper: Callable[[Any], Any], undo: Any) -> None:
    model = tiny("llama").eval()
    classes = [type(module) for module in model.modules()]
    expected = model(tokens()).logits
    fewbits.convert(model, "int8", keep_original=True)
    fewbits.fuse(model)
    undo(wrapper(model))
    assert fusion_of(model) is None and used_attention(model) is None
    if undo is fewbits.restore:
        assert [type(module) for module in model.modules()] == classes
        assert torch.equal(model(tokens()).logits, expected)


@pytest.mark.parametrize("modules_to_save", [None, ["norm"]])
def test_kept_originals_and_norms_come_back_under_adapters(modules_to_save: list[str] | None) -> None:
    model = tiny("llama").eval()
    expected = model(tokens()).logits
    fewbits.convert(model, "int8", keep_original=True)
    adapted = fewbits.get_peft_model(model, r=2, modules_to_save=modules_to_save)
    receipt = fewbits.restore(adapted)
    assert "dequantised" not in str(receipt) and "(the original)" in str(receipt)
    assert torch.equal(adapted.eval()(tokens()).logits, expected)  # new adapters change nothing
    names = {type(module).__name__ for module in adapted.modules()}
    assert "LlamaRMSNorm" in names and not names & {"RMSNorm", "QuantizedLinear"}
    if modules_to_save:
        copies = adapted.base_model.model.model.norm
        assert copies.original_module is not copies.modules_to_save["default"]
        assert copies.original_module.weight is not copies.modules_to_save["default"].weight
