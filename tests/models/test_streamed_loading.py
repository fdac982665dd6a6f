"""Streamed weights are those of the files, in any order; models loaded so are the same to the bit."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import dot_natural_key

from fewbits.errors import BadCheckpoint
from fewbits.models.folders.checkpoint import read_header, read_headers
from fewbits.models.loading import streamed_weights
from fewbits.models.loading.hf_quantizer import FewbitsConfig
from fewbits.models.loading.placing import one_gpu
from fewbits.models.loading.streamed_loading import StreamedLoader, loader_for
from fewbits.models.loading.streamed_weights import StreamedTensor, StreamedWeights, asking_order
from fewbits.nn.linear import QuantizedLinear
from tests.models.loading import save_tiny
from tests.models.mixtures import save_mixture
from tests.models.tiny import FAMILIES
from tests.models.unwritten import save_unwritten

CPU = torch.device("cpu")


def written(folder: Path, **sizes: int) -> dict[str, torch.Tensor]:
    """Two files of tensors of several dtypes; what is in them."""
    torch.manual_seed(0)
    many = {f"layers.{n}.small": torch.randn(n + 1) for n in range(12)}
    first = {"codes": torch.randint(0, 255, (301, 77), dtype=torch.uint8), "empty": torch.empty(0, 4)}
    first |= {
        "half": torch.randn(33, 65).half(),
        "scalar": torch.tensor(7.5),
        "flags": torch.tensor([True, False]),
    }
    second = {"wide": torch.randn(129, 130, dtype=torch.bfloat16), "long": torch.arange(9)} | many
    save_file(first, folder / "a.safetensors")
    save_file(second, folder / "b.safetensors")
    return first | second


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at which a few kilobytes take many readings and do not fit at once."""
    monkeypatch.setattr(streamed_weights, "PIECE", 1000)
    monkeypatch.setattr(streamed_weights, "AHEAD", 3000)
    monkeypatch.setattr(streamed_weights, "_SMALL", 100)


@pytest.mark.usefixtures("small_pieces")
def test_tensors_are_those_of_the_files_in_any_order(tmp_path: Path) -> None:
    tensors = written(tmp_path)
    entries = read_headers(tuple(sorted(tmp_path.glob("*.safetensors"))))
    names = sorted(tensors, key=dot_natural_key)
    orders = (names, names[::-1], names[5:] + names[:5], names[::2])  # the last leaves some out
    for asked, order in itertools.product(orders, (names, None)):
        with StreamedWeights(entries, CPU, order=order) as weights:
            for name in asked:
                assert same(weights.take(name), tensors[name])
            assert same(weights.take(asked[0]), tensors[asked[0]])  # once more
            slices = weights.slices()
        assert slices["wide"].get_shape() == [129, 130] and slices["wide"].get_dtype() == "BF16"


@pytest.mark.usefixtures("small_pieces")
def test_several_threads_may_ask(tmp_path: Path) -> None:
    tensors = written(tmp_path)
    entries = read_headers(tuple(sorted(tmp_path.glob("*.safetensors"))))
    found: dict[str, torch.Tensor] = {}
    with StreamedWeights(entries, CPU, order=sorted(tensors)) as weights:

        def take(names: list[str]) -> None:
            found.update((name, weights.slices()[name][...]) for name in names)

        threads = [threading.Thread(target=take, args=(list(tensors)[start::4],)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(same(found[name], tensors[name]) for name in tensors)


@pytest.mark.usefixtures("small_pieces")
def test_only_so_much_is_read_ahead(tmp_path: Path) -> None:
    tensors = {f"t{n}": torch.full((500,), n, dtype=torch.uint8) for n in range(40)}
    save_file(tensors, tmp_path / "a.safetensors")
    with StreamedWeights(read_header(tmp_path / "a.safetensors"), CPU, order=list(tensors)) as weights:
        wait_until(lambda: weights._ahead >= streamed_weights.AHEAD)
        time.sleep(0.02)
        assert streamed_weights.AHEAD <= weights._ahead <= streamed_weights.AHEAD + 500
        assert all(same(weights.take(name), tensors[name]) for name in tensors)
        assert weights._ahead == 0


@pytest.mark.usefixtures("small_pieces")
def test_what_all_stays_is_read_in_whole_pieces_once_it_is_asked_for(tmp_path: Path) -> None:
    tensors = {f"t{n}": torch.full((300 + n,), n, dtype=torch.uint8) for n in range(40)}
    save_file(tensors, tmp_path / "a.safetensors")
    with StreamedWeights(read_header(tmp_path / "a.safetensors"), CPU, order=None) as weights:
        lengths = [reading.end - reading.begin for reading in weights._waiting]
        assert set(lengths[:-1]) == {streamed_weights.PIECE}
        wait_until(lambda: weights._ahead >= streamed_weights.AHEAD)
        time.sleep(0.02)
        most = streamed_weights.AHEAD + streamed_weights.PIECE + 340
        assert weights._ahead <= most  # until transformers has set the GPU's memory aside
        assert same(weights.take("t39"), tensors["t39"])
        wait_until(lambda: not weights._waiting)
        assert all(same(weights.take(name), tensors[name]) for name in tensors)


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 5
    while not is_so() and time.monotonic() < until:
        time.sleep(0.001)
    assert is_so()


def test_odd_offsets_and_a_file_that_ends_early(tmp_path: Path) -> None:
    """A header of no round length puts tensors where no dtype could lie."""
    values = torch.arange(300, dtype=torch.float32)
    header = json.dumps(
        {
            "x": {"dtype": "F32", "shape": [300], "data_offsets": [3, 1203]},
            "y": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        }
    ).encode()
    header += b" " * ((1 - len(header)) % 2)
    file = tmp_path / "odd.safetensors"
    body = bytes([1, 2, 3]) + values.numpy().tobytes()
    file.write_bytes(len(header).to_bytes(8, "little") + header + body)
    entries = read_header(file)
    assert entries["x"].begin % 4
    with StreamedWeights(entries, CPU) as weights:
        assert same(weights.take("x"), values) and weights.take("y").tolist() == [1, 2, 3]
    file.write_bytes(file.read_bytes()[:-1])
    with StreamedWeights(entries, CPU) as weights, pytest.raises(BadCheckpoint, match="ends at byte"):
        weights.take("x")


def save(folder: Path, family: str) -> None:
    """A tiny model in several shards."""
    if family in FAMILIES:
        save_tiny(folder, family, shard="60KB")
    elif family == "gpt2":
        save_unwritten(folder, family)
    else:
        save_mixture(folder, family)


def load(folder: Path, *, streamed: bool, recipe: str | None) -> Any:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": {"": "cpu"}}
    if recipe is not None:
        options["quantization_config"] = FewbitsConfig(recipe)
    plain = AutoModelForCausalLM.from_pretrained(folder, **options)
    return StreamedLoader(type(plain), CPU).from_pretrained(folder, **options) if streamed else plain


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("llama", "qlora_nf4"),
        ("qwen3", "int8"),
        ("gpt2", "qlora_nf4"),
        ("qwen3_moe", "qlora_nf4"),
        ("gemma3_text", None),
    ],
)
def test_a_streamed_model_is_the_same_to_the_bit(
    tmp_path: Path, family: str, recipe: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "plain", family)
    usual, streamed = (load(tmp_path / "plain", streamed=s, recipe=recipe) for s in (False, True))
    expected, found = usual.state_dict(), streamed.state_dict()
    assert type(streamed) is type(usual) and list(found) == list(expected)
    assert all(same(found[name], expected[name]) for name in expected)
    tied = {n for n, p in usual.named_parameters(remove_duplicate=False)} - {
        n for n, _ in usual.named_parameters()
    }
    assert tied == {n for n, p in streamed.named_parameters(remove_duplicate=False)} - {
        n for n, _ in streamed.named_parameters()
    }
    assert streamed.generation_config.to_dict() == usual.generation_config.to_dict()
    assert streamed.name_or_path == usual.name_or_path
    if recipe is not None:
        streamed.save_pretrained(tmp_path / "packed")
        looped: list[str] = []
        take = StreamedTensor.__getitem__
        monkeypatch.setattr(
            StreamedTensor, "__getitem__", lambda self, index: looped.append(self._name) or take(self, index)
        )
        again, told = StreamedLoader(type(usual), CPU).from_pretrained(
            tmp_path / "packed", dtype=torch.bfloat16, output_loading_info=True
        )
        assert all(same(again.state_dict()[name], expected[name]) for name in expected)
        assert not told["missing_keys"] and not told["unexpected_keys"]
        packed = {n: m for n, m in again.named_modules() if isinstance(m, QuantizedLinear)}
        parts = {
            f"{name}.{part}": p for name, module in packed.items() for part, p in module.stored().items()
        }
        files = tuple((tmp_path / "packed").glob("*.safetensors"))
        assert set(looped) == read_headers(files).keys() - parts.keys()  # transformers' loop has the rest
        assert not any(part.requires_grad for part in parts.values())


def test_experts_are_asked_for_as_they_are_merged() -> None:
    names = [
        f"model.layers.{n}.mlp.experts.{e}.{p}.weight"
        for n in (10, 2)
        for e in (1, 0)
        for p in ("up", "down")
    ]
    asked = asking_order(names, merged=True)
    assert [name.split(".")[2] + name.split(".")[5] + name.split(".")[6] for name in asked] == [
        f"{n}{e}{p}" for n in (2, 10) for p in ("down", "up") for e in (0, 1)
    ]
    assert asking_order(names, merged=False) == sorted(names, key=dot_natural_key)


def test_only_what_lies_on_one_gpu_is_streamed() -> None:
    assert one_gpu({"": "cpu"}) is None and one_gpu("auto") is None and one_gpu({"a": 0, "b": 1}) is None
    assert loader_for(AutoModelForCausalLM, None, {"": "cpu"}) is AutoModelForCausalLM
