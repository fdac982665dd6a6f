"""A run of a preference method: TRL's trainer between our data, our models and our run folder."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fewbits.errors import BadInput
from fewbits.training.checkpoints.folders import Progress, checkpoints, step_of
from fewbits.training.checkpoints.manifest import FILE as MANIFEST
from fewbits.training.config import REWARDED, TrainConfig
from fewbits.training.preferences.rows import preference_rows
from fewbits.training.preferences.trainers import (
    check_method,
    classes_of,
    load_for,
    method_arguments,
    reward_functions,
    rows_left_out,
    rows_of_a_pass,
)
from fewbits.training.run_folder.layout import now
from fewbits.training.run_folder.resume import check_unchanged, resumable, weights_of
from fewbits.training.setup.distribute import check_loaded, layout_for
from fewbits.training.setup.model_and_trainer import (
    max_positions,
    sequence_length,
    sequences_per_step,
    total_steps,
    training_arguments,
)
from fewbits.training.setup.record import versions
from fewbits.training.setup.stages import Stages


def stages(config: TrainConfig, of_sft: Any) -> Any:
    """The class of a run's stages: ``of_sft``, or this file's for the other methods."""
    return of_sft if config.method == "sft" else PreferenceRun


class PreferenceRun(Stages):
    """The stages of a run with one of TRL's trainers."""

    def check(self) -> Mapping[str, str | None]:
        """All of `prepare` that writes nothing; hashes of what the run is begun with."""
        from transformers import set_seed

        config = self.config
        check_method(config, self.ranks.size)
        self.trainer_class, self.arguments_class = classes_of(config.method)
        self.rewards = reward_functions(config)
        self._read_data()
        set_seed(config.seed)
        self.built = load_for(config)
        shapes = self.built.model.config
        self._check_template()
        self.length = sequence_length(config, max_positions(shapes))
        whole = replace(config, parallel="ddp") if self.ranks.size > 1 else config  # each has all weights
        self.layout = layout_for(whole, self.ranks, shapes, (config.batch_size, self.length))
        if self.ranks.size > 1:
            self.tell(str(self.layout))
        facts = {
            "train_data": _hash_of(self.train_data),
            "eval_data": None if self.eval is None else _hash_of(self.eval),
        }
        check_loaded(self.layout, {**facts, "max_seq_length": self.length}, self.built.model)
        return {**facts, "weights": weights_of(config.model)}

    def open_folder(self, facts: Mapping[str, str | None]) -> None:
        """Begin or go on in the run folder."""
        self.facts = facts
        self.folder.open(self.config, resume=self.resume)
        check_unchanged(self.folder, self.config, facts)

    def _read_data(self) -> None:
        from datasets import Dataset

        config = self.config
        self.train_data = Dataset.from_list(preference_rows(config, config.train_data))
        self.eval: Any = None
        if config.eval_data is not None:
            splits = ("validation", "test", "eval", "train")
            self.eval = Dataset.from_list(preference_rows(config, config.eval_data, splits))
        elif config.eval_fraction:
            if len(self.train_data) < 2:
                raise BadInput(
                    f"{config.train_data} has one row, of which none can be held out; give more rows, or"
                    " leave out"
                    " eval_fraction."
                )
            parts = self.train_data.train_test_split(test_size=config.eval_fraction, seed=config.seed)
            self.train_data, self.eval = parts["train"], parts["test"]
        if self.eval is not None and config.keep_best:
            self.tell(f"method {config.method} ends with its newest weights (keep_best is for sft).")

    def _check_template(self) -> None:
        first = self.train_data[0]
        chats = any(isinstance(first.get(name), list) for name in ("prompt", "chosen"))
        if chats and not self.built.tokenizer.chat_template:
            raise BadInput(
                f"the tokenizer of {self.config.model} has no chat template, which rows of messages need; set"
                " chat_template, as in chat_template: chatml."
            )

    def data_record(self) -> dict[str, Any]:
        """See `Stages.data_record`."""
        return {
            "train": {"path": self.config.train_data, "rows": len(self.train_data)},
            "eval": None if self.eval is None else {"rows": len(self.eval)},
        }

    def method_record(self) -> dict[str, Any]:
        """See `Stages.method_record`."""
        return {"method": self.config.method, "versions": {**versions(), "trl": version("trl")}}

    def train(self) -> None:
        """The training itself, from the newest checkpoint if there is one."""
        from fewbits.training.preferences.callbacks import WholeCheckpoints
        from fewbits.training.ranks.ddp import fit_ddp
        from fewbits.training.setup.callbacks import MetricsFile, ProgressBar, StillOurs

        config = self.config
        earlier = self._checkpoints() if self.resume else []
        progress = Progress.load(earlier[-1]) if earlier else Progress()
        steps = total_steps(config, self.sequences())
        args = self.arguments(steps, resumed=bool(earlier))
        if self.layout.kind == "ddp":
            fit_ddp(args, self.built.model)
        bar = ProgressBar(self.console, progress)
        metrics = MetricsFile(self.folder.metrics, progress, all_figures=True)
        of_leader = [StillOurs(self.folder.lock), metrics, bar] if self.ranks.leads else []
        trainer = self.trainer_class(
            model=self.built.model,
            args=args,
            train_dataset=self.train_data,
            eval_dataset=self.eval,
            processing_class=self.built.tokenizer,
            callbacks=[*of_leader, WholeCheckpoints(progress, self.stop, self.ranks)],
            **({"reward_funcs": self.rewards} if config.method in REWARDED else {}),
        )
        left_out = "" if config.method in REWARDED else rows_left_out(trainer, self.train_data, self.length)
        if left_out:
            self.tell(left_out)
            self.folder.write(rows_left_out=left_out)
        begun = time.perf_counter()
        try:
            if not earlier or step_of(earlier[-1]) < steps:
                with self.stop.noted():
                    trainer.train(resume_from_checkpoint=str(earlier[-1]) if earlier else None)
            else:
                trainer._load_from_checkpoint(str(earlier[-1]))
        finally:
            bar.close()
        step = max(trainer.state.global_step, step_of(earlier[-1]) if earlier else 0)
        self.reached = step, steps
        if self.stop.answer is None:
            self.folder.write(
                steps=step,
                tokens=progress.tokens,
                seconds=round(progress.seconds or time.perf_counter() - begun, 3),
                best_metric=None,
                best_step=None,
                stopped_early=False,
            )

    def arguments(self, steps: int, *, resumed: bool = False) -> Any:
        """The arguments of TRL's trainer for so many steps."""
        return training_arguments(
            self.config,
            self.folder.checkpoints,
            steps,
            evaluates=self.eval is not None,
            resumed=resumed,
            layout=self.layout,
            kind=self.arguments_class,
            more={
                **method_arguments(self.config, self.length),
                "per_device_train_batch_size": rows_of_a_pass(self.config, self.layout.data_size),
            },
        )

    def sequences(self) -> int:
        """Rows of an epoch; of grpo and rloo each prompt stands there once for each of its completions."""
        each = (self.config.num_generations or 8) if self.config.method in REWARDED else 1
        return max(len(self.train_data) * each, sequences_per_step(self.config))

    def _checkpoints(self) -> list[Path]:
        """The whole ones; what a kill has left half written goes."""
        self.ranks.led("half checkpoints", self._remove_half)
        return resumable(self.folder, self.ranks, self.tell)

    def _remove_half(self) -> None:
        for path in checkpoints(self.folder.checkpoints):
            if not (path / MANIFEST).is_file():
                self.tell(f"{path} was not written to its end and is removed.")
                shutil.rmtree(path)

    def finish(self) -> None:
        """The adapter or model in final/, and the merged model; by the leader."""
        if not self.ranks.leads:
            return
        model = self.built.model
        model.config.use_cache = True
        if "ref" in getattr(model, "peft_config", {}):  # TRL's copy of the beginning, to compare with
            model.delete_adapter("ref")
        self.save_final(model)
        if self.config.merge and hasattr(model, "save_pretrained_merged"):
            model.save_pretrained_merged(self.folder.merged, self.built.tokenizer, overwrite=True)
        self.folder.write(status="finished", ended=now(), error=None)


def _hash_of(data: Any) -> str:
    import hashlib
    import json

    digest = hashlib.blake2b(digest_size=16)
    for row in data:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return digest.hexdigest()
