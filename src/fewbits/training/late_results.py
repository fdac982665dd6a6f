"""What a run that has ended is asked for afterwards: a resume with ``merge`` or ``report`` switched on."""

from __future__ import annotations

from collections.abc import Callable

from fewbits.models.folders.checkpoint import is_adapter_folder
from fewbits.training.config import TrainConfig
from fewbits.training.run_folder.layout import RunFolder
from fewbits.training.setup.model_and_trainer import dtype_of, uses_gpu


def add_results(folder: RunFolder, config: TrainConfig, tell: Callable[[str], None]) -> None:
    """Write the merged model and the report where they are asked for and not there; nothing is trained.

    Raises:
        BadInput, BadCheckpoint: what is in ``final/`` is damaged, or its base is gone.
    """
    if config.merge and is_adapter_folder(folder.final) and not folder.merged.is_dir():
        from fewbits.models.fast import FastLanguageModel

        model, tokenizer = FastLanguageModel.from_pretrained(
            folder.final,
            load_in_4bit=False,
            dtype=dtype_of(config, uses_gpu(config), trains_all=False),
            device_map="cpu",
        )
        model.save_pretrained_merged(folder.merged, tokenizer)
        tell(f"the run in {folder.path} had ended; its model is merged now.")
    if config.report and not (folder.path / "report.html").is_file():
        from fewbits.training.report.page import write_report

        folder.write(report=str(write_report(folder.path)))
