"""What a preference run adds to TRL's trainers: checkpoints with a manifest, and an end on a signal."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from fewbits.training.checkpoints.folders import PREFIX, Progress
from fewbits.training.checkpoints.manifest import Writers, write_manifest
from fewbits.training.ranks.processes import Ranks
from fewbits.training.setup.signals import StopRequest

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


class WholeCheckpoints(TrainerCallback):
    """Writes counters and manifest into each checkpoint of the host, and one when the run ends or must.

    Of several ranks each has one: all stop behind one step, and none goes on before a checkpoint is whole.
    """

    def __init__(self, progress: Progress, stop: StopRequest, ranks: Ranks) -> None:
        self.progress = progress
        self.stop = stop
        self.ranks = ranks

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A signal ends the run behind this step; the last step is saved in any case."""
        if any(self.ranks.exchange("stop", self.stop())):
            control.should_training_stop = True
        if control.should_training_stop:
            control.should_save = control.should_log = True

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Without a manifest a checkpoint counts as half written."""
        folder = Path(args.output_dir) / f"{PREFIX}{state.global_step}"
        if self.ranks.leads:
            self.progress.save(folder)
        gather = partial(self.ranks.exchange, "manifest")
        write_manifest(folder, Writers(self.ranks.rank, self.ranks.size, gather))
        self.ranks.barrier()
