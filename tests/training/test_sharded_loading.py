"""Models read by slices are the models read whole, and no rank ever holds one."""

from __future__ import annotations

import json

import pytest
import torch
from torch import distributed
from transformers import LlamaConfig

from fewbits import convert
from fewbits.decoder.fuse import fuse
from fewbits.errors import BadInput
from fewbits.formats import INT8
from fewbits.models.adapting.adapters import get_peft_model
from fewbits.models.packing.convert import convert as convert_modules
from fewbits.recipes.recipe import LoRA, Recipe, Rule
from fewbits.training.ranks.sharded_loading import load_sharded_model
from fewbits.training.ranks.tensor_loading import load_tensor_parallel_model
from tests.models.tiny import tiny
from tests.training.fsdp_workers import FORMATS, train
from tests.training.processes import run_ranks
from tests.training.sharded_workers import RECIPES, SEEDS, load, peak


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An unquantised model, its files small, with tied embeddings; and the same packed."""
    path = tmp_path_factory.mktemp("models")
    model = tiny("qwen2")
    model.save_pretrained(path / "plain", max_shard_size="60KB")
    convert(model, Recipe(name="nf4_dq", linear=Rule(weight=FORMATS["nf4_dq"])))
    model.save_pretrained(path / "packed")
    return path


@pytest.fixture(scope="module")
def loaded(folder):
    return run_ranks(load, 2, str(folder), 2)[0]


@pytest.mark.parametrize("kind", [*RECIPES, "packed", "full"])
def test_slices_are_those_of_the_whole_model(loaded, kind) -> None:
    model, found = tiny("qwen2"), loaded[kind]
    if kind != "full":
        format = RECIPES.get(kind, FORMATS["nf4_dq"])
        convert_modules(model, Recipe(name=kind, linear=Rule(weight=format)))
        model.requires_grad_(False)
        model = get_peft_model(model, LoRA(r=4), seed=SEEDS.get(kind, 0))
    own = dict(model.named_parameters())
    assert own.keys() == found["parameters"].keys()
    for name, parameter in own.items():  # adapters too
        assert torch.equal(parameter.detach(), found["parameters"][name]), name
    fuse(model)
    losses, _ = train(model.train(), 2)
    assert found["losses"] == pytest.approx(losses, rel=1e-6)
    assert (found["share"] < 0.505 and "loaded by slices" in found["receipt"]) or kind != "full"


@pytest.fixture
def mesh():
    """Of this process alone."""
    distributed.init_process_group(backend="gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.slow  # both, though the file has its second variants run nightly
@pytest.mark.parametrize(
    ("load_slices", "mesh_of"), [(load_sharded_model, "mesh"), (load_tensor_parallel_model, "tensor")]
)
def test_a_folder_that_was_packed_with_a_slip_is_read_and_a_slip_of_a_call_refused(
    load_slices, mesh_of, mesh, tmp_path
) -> None:
    model = tiny("llama")
    model.save_pretrained(tmp_path / "plain")
    convert(model, Recipe(name="mine", linear=Rule(weight=INT8)))
    model.save_pretrained(tmp_path / "packed")
    file = tmp_path / "packed" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["recipe"]["skip"] = ["*.down_prj"]
    file.write_text(json.dumps(config))
    _, receipt = load_slices(tmp_path / "packed", **{mesh_of: mesh}, lora=LoRA(r=2))
    assert "no linear of this model is named '*.down_prj'" in str(receipt)
    slip = Recipe(name="mine", linear=Rule(weight=INT8), skip=("*.down_prj",))
    with pytest.raises(BadInput, match=r"the nearest is '\*\.down_proj'"):
        load_slices(tmp_path / "plain", **{mesh_of: mesh}, recipe=slip, lora=LoRA(r=2))


def test_no_rank_holds_the_whole_model() -> None:
    """34 MB of bfloat16 in NF4: at no time more than its half, the largest weight and what packs it."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8
    )
    packing = 6 * 256 * 2048 * 4  # float32 copies of 256 rows, whatever the weight's size
    for found in run_ranks(peak, 2, config):
        assert found["held"] < 0.18 * found["dense"]
        assert found["held"] < found["most"] < found["held"] + 2 * found["largest"] + packing, found
        assert found["most"] < 0.5 * found["dense"], found
