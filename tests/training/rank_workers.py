"""What processes of `training.processes` run for other tests: a module that they can import."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "several_gpus" / "multi_gpu.py"


def dry_run(folder: str) -> None:
    """The script for several GPUs, on tiny shapes."""
    spec = importlib.util.spec_from_file_location("multi_gpu", SCRIPT)
    sys.path.insert(0, str(SCRIPT.parent))  # as a script has it
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    recorded = ["--record", f"{folder}/rows.csv", "--commit", "none"]
    module.main(["--dry-run", "--steps", "1", "--warm-up", "1", "--out", folder, *recorded])


def short_of_memory(folder: str, short: bool) -> tuple:
    """A run of two ranks of which the second runs out of memory twice, or not."""
    from fewbits.training.data.collator import Collator
    from fewbits.training.data.packing import SequenceDataset
    from fewbits.training.plan.parallel import Layout
    from fewbits.training.step.trainer import Trainer
    from tests.training.test_packing import make_examples
    from tests.training.test_rerun import LENGTHS, Shortage, budget_of, model_with_dropout
    from tests.training.test_trainer import arguments, losses

    rank = torch.distributed.get_rank()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    model = model_with_dropout()
    if short and rank == 1:
        Shortage(model, {3, 21})
    trainer = Trainer(
        model=model,
        args=arguments(folder),
        train_dataset=SequenceDataset(make_examples(LENGTHS)),
        data_collator=Collator(0),
        memory=budget_of(model),
        cuda_graph=True,  # hence gradients are averaged after the pass
        layout=Layout(kind="ddp", data_rank=rank, data_size=2),
    )
    trainer.train()
    return losses(trainer), [p.detach() for p in model.parameters()], trainer._rerun.count


def with_an_idle_part(folder: str) -> list:
    """All weights of a model train, of which some batches leave a part alone; one batch, on one rank only."""
    from transformers import LlamaForCausalLM

    from fewbits.training.data.collator import Collator
    from fewbits.training.data.packing import SequenceDataset
    from fewbits.training.plan.parallel import Layout
    from fewbits.training.ranks.ddp import fit_ddp
    from fewbits.training.step.trainer import Trainer
    from tests.models.tiny import tiny_config
    from tests.training.test_packing import make_examples
    from tests.training.test_trainer import arguments

    class Parts(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.part = torch.nn.Linear(config.hidden_size, config.hidden_size)

        def forward(self, input_ids=None, **kwargs):
            embeds = self.model.embed_tokens(input_ids)
            if int(input_ids.sum()) % 3 == 0:
                embeds = embeds + self.part(embeds)
            return super().forward(inputs_embeds=embeds, **kwargs)

    rank = torch.distributed.get_rank()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    torch.manual_seed(0)
    config = tiny_config("llama")
    config.model_type = "llama_of_parts"  # a family that is not known
    model, args = Parts(config), arguments(folder)
    args.max_steps = 6
    fit_ddp(args, model)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=SequenceDataset(make_examples([9, 7, 8, 12, 10, 11, 6, 9])),
        data_collator=Collator(0),
        layout=Layout(kind="ddp", data_rank=rank, data_size=2),
    )
    trainer.train()
    return [p.detach() for p in model.parameters()]
