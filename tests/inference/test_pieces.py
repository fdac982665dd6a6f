"""A computation recorded in pieces gives what it gave: on a CPU with two places that are dtypes, on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fewbits.inference.decode import Decoding
from fewbits.inference.pieces import Recorder
from fewbits.models.loading.in_memory import convert
from fewbits.models.stochastic.sharing import share_inputs
from fewbits.recipes import get_recipe
from tests.models.tiny import tiny, tokens

FIRST, SECOND = torch.float32, torch.float64


class Again:
    """Operations that are run again, into the memory that they filled."""

    def __init__(self, place: object) -> None:
        self.place = place
        self.done: list[tuple[Any, Any, Any, Any]] = []

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        self.done.append((func, args, kwargs, out))
        return out

    def end(self) -> Callable[[], object]:
        return self.replay

    def replay(self) -> None:
        for func, args, kwargs, out in self.done:
            for now, then in zip(*(tree_leaves(x) for x in (func(*args, **kwargs), out)), strict=True):
                if now.data_ptr() != then.data_ptr():
                    then.copy_(now)


class Dtypes:
    """Places for a machine without a GPU: what is float64 is elsewhere."""

    def __init__(self) -> None:
        self.begun: list[object] = []

    def of(self, tensor: Tensor) -> object:
        return SECOND if tensor.dtype == SECOND else FIRST

    def target(self, kwargs: dict[str, Any]) -> object:
        dtype = kwargs.get("dtype")
        return None if dtype is None else SECOND if dtype == SECOND else FIRST

    def begin(self, place: object) -> Again:
        self.begun.append(place)
        return Again(place)


def recorded(function: Callable[[], object]) -> tuple[Any, list[object]]:
    places = Dtypes()
    with Recorder(places) as recorder:
        function()
    return recorder.finish(), places.begun


@pytest.mark.parametrize("inference", [False, True])
def test_pieces_give_what_launches_give(inference: bool) -> None:
    weights = [torch.randn(8, 8, dtype=dtype) for dtype in (FIRST, SECOND, SECOND, FIRST)]
    x, turn = torch.randn(3, 8), torch.randn(3, 8)

    def step() -> None:
        h, angle = x, turn.cos()
        for weight in weights:
            h, own = h.to(weight.dtype), angle.to(weight.dtype)  # the angle moves once, not for each layer
            h = torch.tanh(h @ weight.t()) * own + own.view(-1).view(3, 8)
        x.copy_(h)
        turn.add_(0.5)

    with torch.inference_mode(inference):
        before = [y.clone() for y in (x, turn)]
        made = []
        for _ in range(3):
            step()
            made.append((x.clone(), turn.clone()))
        pieces, begun = recorded(step)
        assert begun == [FIRST, SECOND, FIRST]
        assert pieces.graphs == 3 and len(pieces.items) == 3 + 3  # h there and back, the angle there
        for y, start in zip((x, turn), before, strict=True):
            y.copy_(start)
        for expected in made:
            pieces.replay()
            assert all(torch.equal(a, b) for a, b in zip((x, turn), expected, strict=True))


def test_what_was_written_moves_again() -> None:
    x, out = torch.zeros(4), torch.zeros(2, 4, dtype=SECOND)

    def step() -> None:
        out[0] = x.to(SECOND) * 2
        x[1:].add_(1)  # through a view
        out[1].copy_(x)

    pieces, begun = recorded(step)
    assert begun == [SECOND, FIRST]  # the last is a copy from place to place, and no piece
    x.zero_(), out.fill_(torch.nan)
    for i in range(3):
        pieces.replay()
        assert out[0].tolist() == [0.0, *[2.0 * i] * 3] and out[1].tolist() == [0.0, *[i + 1.0] * 3]


def test_a_second_graph_of_a_place_sees_the_first() -> None:
    a, b = torch.ones(2), torch.ones(2, dtype=SECOND)

    def step() -> None:
        kept = a * 3
        b.add_(kept.to(SECOND))
        a.add_(kept)

    pieces, begun = recorded(step)
    assert begun == [FIRST, SECOND, FIRST]
    a.fill_(1.0), b.fill_(1.0)
    pieces.replay()
    assert a.tolist() == [4.0, 4.0] and b.tolist() == [4.0, 4.0]


def test_a_step_of_a_model_in_pieces() -> None:
    """Its second layer is elsewhere, as hooks of accelerate would have it."""
    model = tiny("llama", dtype=FIRST)
    model.set_attn_implementation("sdpa")
    model.model.layers[1].double()

    def move(dtype: torch.dtype) -> Callable[..., Any]:
        def hook(module: Any, args: Any, kwargs: Any) -> Any:
            moved = lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x  # noqa: E731
            pair = tuple(moved(x) for x in kwargs["position_embeddings"])
            return tuple(moved(x) for x in args), {**kwargs, "position_embeddings": pair}

        return hook

    for layer, dtype in zip(model.model.layers, (FIRST, SECOND), strict=True):
        layer.register_forward_pre_hook(move(dtype), with_kwargs=True)
    model.model.norm.register_forward_pre_hook(lambda module, args: tuple(x.to(FIRST) for x in args))
    decoding = Decoding(model, batch_size=2, max_tokens=28)
    decoding.prefill(tokens(2, 20))
    expected = decoding.decode(8)
    decoding.prefill(tokens(2, 20))
    with torch.inference_mode():
        kept = [decoding.tokens, decoding._position, *(x.cumulative_length for x in decoding.cache.layers)]
        before = [x.clone() for x in kept]
        pieces, begun = recorded(decoding._advance)
        assert pieces.graphs == len(begun) and begun.count(SECOND) >= 1
        for x, start in zip(kept, before, strict=True):
            x.copy_(start)
        made = []
        for _ in range(8):
            made.append(decoding.tokens.clone())
            pieces.replay()
    assert torch.equal(torch.cat(made, 1), expected)


@pytest.mark.multi
@pytest.mark.parametrize("rotary", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize("recipe", ["plain", "qlora_nf4", "stochastic"])
def test_multi_graphs_on_two_gpus_give_the_same_tokens(recipe: str, rotary: str) -> None:
    """Over both GPUs, in graphs and launched one by one, and on the first alone."""
    made = []
    for second, graph in (("cuda:1", True), ("cuda:1", False), ("cuda:0", True)):
        model = tiny("llama", dtype=torch.bfloat16)
        model.set_attn_implementation("sdpa")
        if recipe != "plain":
            convert(model, get_recipe(recipe))
        places = {"model.embed_tokens": "cuda:0", "model.rotary_emb": rotary, "model.layers.0": "cuda:0"}
        places |= dict.fromkeys(("model.layers.1", "model.norm", "lm_head"), second)
        if second == "cuda:0":
            places["model.rotary_emb"] = "cuda:0"
        model = dispatch_model(model, device_map=places, skip_keys="past_key_values", force_hooks=True)
        share_inputs(model)
        decoding = Decoding(model, batch_size=3, max_tokens=48, cuda_graph=graph)
        assert bool(decoding.without_graph) != graph
        before = torch.cuda.current_device()
        for prompt in (tokens(3, 20), tokens(3, 20).flip(1)):  # what was recorded serves both
            decoding.prefill(prompt)
            made.append(decoding.decode(24))
        assert torch.cuda.current_device() == before
    assert torch.equal(made[0], made[2]) and torch.equal(made[0], made[4])
    assert torch.equal(made[1], made[3]) and torch.equal(made[1], made[5])
    assert not torch.equal(made[0], made[1])
