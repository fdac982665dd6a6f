"""The short walks answer what torch's and transformers' own do, whatever happens to the model between."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from fewbits import convert, fuse, get_peft_model, restore, unfuse
from fewbits.host.walks import Remembered, all_parameters, train_all
from tests.models.tiny import tiny

pytest.importorskip("peft")


def adapted(**options):
    model = tiny("llama")
    fuse(model)
    return get_peft_model(model, r=2, target_modules="all-linear", **options)


def test_parameters_are_torchs_in_torchs_order_at_each_call():
    model = adapted()
    base = model.get_base_model()
    for change in (
        lambda: None,
        lambda: model.add_module("more", nn.Linear(2, 2)),
        lambda: model.add_module("again", model.more),
        lambda: setattr(model.more, "bias", None),
        lambda: setattr(model.more, "weight", base.lm_head.weight),
        lambda: model.delete_adapter("default"),
    ):
        change()
        for owner in (model, base):
            ours, theirs = list(owner.parameters()), list(type(owner).parameters(owner))
            assert [id(p) for p in ours] == [id(p) for p in theirs]
            assert list(owner.parameters(recurse=False)) == []


def test_a_step_of_a_trainer_walks_once_for_each_question(monkeypatch):
    model = adapted()
    visits = []

    def counted(method):
        def visit(self, *args, **options):
            visits.append(self)
            return method(self, *args, **options)

        return visit

    for name in ("train", "named_modules"):
        monkeypatch.setattr(nn.Module, name, counted(getattr(nn.Module, name)))
    model.train()
    list(model.parameters())
    model.zero_grad()
    assert len(visits) < 20 < sum(1 for _ in model.modules())
    model.num_parameters(exclude_embeddings=True)
    visits.clear()
    model.num_parameters(exclude_embeddings=True)
    assert not visits


def test_the_mode_reaches_every_module_and_those_with_a_train_of_their_own_are_asked():
    model = adapted(use_dora=True)  # PEFT's DoRA keeps norms in evaluation and lets go of them in training
    dora = [m for m in model.modules() if type(m).__name__ == "DoraLinearLayer"]
    assert dora
    for mode in (False, True, False):
        for layer in dora:
            layer._cache_store("weight-norm", 1)
        assert model.train(mode) is model
        assert {m.training for m in model.modules()} == {mode}
        assert [bool(layer._dora_cache) for layer in dora] == [not mode] * len(dora)


def test_the_first_parameter_is_there_without_a_walk():
    """``model.device`` asks for it, in each token of a generation."""
    model = adapted()
    first = next(type(model).parameters(model))
    model.base_model.model.model.layers._modules["0"] = "no module"
    assert next(model.parameters()) is first
    assert next(model.base_model.model.parameters()) is first


def test_gradients_go_with_zero_grad():
    model = adapted()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    model.zero_grad()
    assert all(p.grad is None for p in type(model).parameters(model))


def test_the_number_of_parameters_follows_every_change():
    model = adapted()
    base = model.get_base_model()
    for change in (lambda: None, lambda: model.add_adapter("b", copy.copy(model.peft_config["default"]))):
        change()
        for asked in ((), (True,), (False, True), (True, True)):
            for _ in range(2):
                assert base.num_parameters(*asked) == type(base).num_parameters(base, *asked)


def test_a_copy_walks_itself_and_pickle_takes_the_methods_along():
    model = adapted().eval()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not {id(p) for p in other.parameters()} & {id(p) for p in model.parameters()}
        other.train()
        assert all(m.training for m in other.modules())
        assert not any(m.training for m in model.modules())


@pytest.mark.parametrize("take_out", [unfuse, restore])
def test_what_is_taken_out_leaves_no_method_behind(take_out):
    base = tiny("llama")
    convert(base, "qlora_nf4")
    model = get_peft_model(base, r=2, target_modules="all-linear")
    fuse(model)
    names = {"train", "parameters", "num_parameters"}
    assert sum(len(names & vars(m).keys()) for m in model.modules()) == 4
    take_out(model)
    assert not any(names & vars(m).keys() for m in model.modules())


def test_a_class_that_names_its_modules_its_own_way_is_asked():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(1, 1), nn.Linear(1, 1)

        def named_modules(self, *args, **options):
            return iter([("", self), ("a", self.a)])

    whole = nn.Sequential(Own())
    assert [id(p) for p in all_parameters(whole)] == [id(p) for p in whole.parameters()]
    assert len(list(all_parameters(whole))) == 2
    assert train_all(whole, False) is whole
    assert not whole[0].b.training


def test_what_a_walk_remembers_keeps_nothing_alive():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(2, 2))
    of_parameters, of_modes = Remembered(), Remembered()
    list(all_parameters(model, remembered=of_parameters))
    train_all(model, remembered=of_modes)
    gone, parameter = weakref.ref(model[0]), weakref.ref(model[0].weight)
    del model[0]
    gc.collect()
    assert gone() is None and parameter() is None
    left = list(all_parameters(model, remembered=of_parameters))
    assert [id(p) for p in left] == [id(p) for p in model.parameters()]
    train_all(model, False, remembered=of_modes)
    assert not any(m.training for m in model.modules())


def test_modules_that_change_places_are_walked_anew():
    """The remembered walk compares what each module holds: the same children elsewhere are another walk."""
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.Linear(2, 2)), nn.Sequential(nn.Linear(3, 3)))
    remembered = Remembered()
    for change in (
        lambda: None,
        lambda: setattr(model[1], "late", model[0]._modules.pop("1")),
        lambda: model._modules.update(reversed([(k, model._modules.pop(k)) for k in list(model._modules)])),
        lambda: setattr(model[0][0], "weight", nn.Parameter(torch.zeros(1, 1))),
        lambda: setattr(model[0][0], "bias", model[0][0].weight),
        lambda: model[0][0].register_parameter("third", None),
    ):
        change()
        for _ in range(2):
            ours = list(all_parameters(model, remembered=remembered))
            assert [id(p) for p in ours] == [id(p) for p in model.parameters()]


def test_a_layer_that_is_frozen_or_thawed_after_a_walk_is_walked_anew():
    """What lies below a module with a ``train`` of its own is its matter from that moment on."""
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1)).eval()
    frozen, remembered = model[0], Remembered()
    for change, expected in (
        (lambda: None, True),
        (lambda: setattr(frozen.eval(), "train", lambda mode=True: frozen), False),
        (lambda: delattr(frozen, "train"), True),
        (lambda: setattr(frozen.eval(), "__class__", Frozen), False),
        (lambda: setattr(frozen, "__class__", nn.Sequential), True),
    ):
        change()
        train_all(model, remembered=remembered)
        assert {m.training for m in frozen.modules()} == {expected}
        assert model.training and model[1].training


class Frozen(nn.Sequential):
    def train(self, mode=True):
        return self
