"""DoRA, other ranks and other beginnings by one key each, beside what PEFT makes of the same adapter."""

from __future__ import annotations

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from fewbits.errors import BadInput
from fewbits.training.config import TrainConfig
from fewbits.training.run import train
from tests.training.conftest import make_tiny_folder, write_tiny_data


def config_of(tmp_path, **changes):
    settings = {"model": str(tmp_path / "m"), "train_data": str(tmp_path / "rows.jsonl"), "device": "cpu"}
    settings |= {"output_dir": str(tmp_path / "run"), "max_steps": 2, "lora_r": 4, "learning_rate": 0.01}
    return TrainConfig.from_mapping(
        {**settings, "load_in_4bit": False, "report": False, "samples": 0, **changes}
    )


@pytest.mark.parametrize(
    "keys",
    [{"lora_dora": True}, {"lora_ranks": {"q_proj": 8, "down_proj": 2}}, {"lora_init": "pissa"}],
    ids=["dora", "ranks", "init"],
)
@pytest.mark.filterwarnings("ignore")
def test_peft_alone_computes_what_was_trained(tmp_path, keys):
    make_tiny_folder(tmp_path / "m")
    write_tiny_data(tmp_path / "rows.jsonl")
    result = train(config_of(tmp_path, merge=True, **keys))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        before = base.eval()(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, result.final).eval()
        after = adapted(ids).logits
    own = adapted.peft_config["default"]
    assert own.use_dora == keys.get("lora_dora", False)
    assert own.rank_pattern == keys.get("lora_ranks", {})
    inner = {n.split(".lora_A.")[0]: p for n, p in adapted.named_parameters() if ".lora_A." in n}
    ranks = {name.split(".")[-1]: p.shape[0] for name, p in inner.items()}
    assert ranks["q_proj"] == keys.get("lora_ranks", {}).get("q_proj", 4) and ranks["v_proj"] == 4
    assert (after - before).abs().max() > 1e-4
    merged = AutoModelForCausalLM.from_pretrained(result.merged, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, after, atol=2e-2, rtol=2e-2)


def test_the_command_line_writes_them_with_a_dot(tmp_path):
    config = config_of(tmp_path, **{"lora_ranks.q_proj": "32", "fields.prompt": "q"})
    assert config.lora_ranks == {"q_proj": 32} and config.fields == {"prompt": "q"}
    for wrong in ({"lora_ranks.q_proj": "many"}, {"lora_ranks": {"q_proj": 0}}, {"lora_init": "eva"}):
        with pytest.raises(BadInput, match="lora_"):
            config_of(tmp_path, **wrong)
