"""What runs of all methods share: their parts, the record with which they begin, and what they leave."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console

from fewbits.training.checkpoints.folders import staged
from fewbits.training.checkpoints.manifest import Writers
from fewbits.training.config import TrainConfig
from fewbits.training.data.pictures import Sight
from fewbits.training.plan.parallel import Layout
from fewbits.training.ranks.processes import Ranks
from fewbits.training.run_folder.killed import process_facts
from fewbits.training.run_folder.layout import RunFolder, now
from fewbits.training.setup.distribute import check_shared
from fewbits.training.setup.images import save_words
from fewbits.training.setup.model_and_trainer import Built, count_weights
from fewbits.training.setup.record import device_of, recipe_of, versions
from fewbits.training.setup.signals import StopRequest


class Stages(ABC):
    """The stages of a run and what they hand on: ``prepare``, ``train``, ``finish``.

    Attributes:
        reached: the last step and that of the run's end.
        facts: hashes of what the run is begun with; the leader's.
        length: tokens of a row at most.
        sight: what reads the images of the rows; None without images.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        console: Console,
        ranks: Ranks,
        stop: StopRequest,
        *,
        resume: bool,
    ) -> None:
        self.config = config
        self.folder = folder
        self.console = console
        self.ranks = ranks
        self.stop = stop
        self.resume = resume
        self.reached = (0, 0)
        self.facts: Mapping[str, str | None] = {}
        self.length = 0
        self.sight: Sight | None = None
        self.built: Built
        self.layout: Layout

    def prepare(self) -> None:
        """Read the data, then load the model; nothing is written before both are known to be good."""
        facts = self.check()
        self.ranks.led("run folder", lambda: self.open_folder(facts))
        check_shared(self.ranks, self.folder.path)
        self._begin_record()

    @abstractmethod
    def check(self) -> Mapping[str, str | None]:
        """All of `prepare` that writes nothing; hashes of what the run is begun with."""

    @abstractmethod
    def train(self) -> None:
        """The training itself, from the newest checkpoint if there is one."""

    @abstractmethod
    def finish(self) -> None:
        """What remains of the run: the adapter or model in final/, and the merged model."""

    @abstractmethod
    def open_folder(self, facts: Mapping[str, str | None]) -> None:
        """Begin or go on in the run folder."""

    @abstractmethod
    def data_record(self) -> dict[str, Any]:
        """The rows of training and evaluation, for the record."""

    def method_record(self) -> dict[str, Any]:
        """What else a method says in the record."""
        return {}

    def tell(self, sentence: str) -> None:
        """Say something to the user, as it is."""
        self.console.print(sentence, highlight=False, markup=False)

    def _begin_record(self) -> None:
        model = self.built.model
        record = {
            "status": "running",
            "process": process_facts(),
            "error": None,
            "started": self.folder.read().get("started", now()),
            "versions": versions(),
            "device": device_of(model),
            "ranks": self.ranks.size,
            "parallel": str(self.layout),
            "model": self.config.model,
            "recipe": recipe_of(self.built),
            "lora": None if self.built.lora is None else asdict(self.built.lora),
            "receipt": self.built.receipt,
            "parameters": count_weights(model),
            "data": {"fingerprints": self.facts, "max_seq_length": self.length, **self.data_record()},
        }
        self.folder.write(**record | self.method_record())
        if self.built.receipt:
            self.tell(self.built.receipt)

    def save_final(self, model: Any) -> None:
        """The weights or adapters of ``model`` and its tokenizer, as a folder that appears whole."""
        with staged(self.folder.final, writers=Writers()) as folder:
            model.save_pretrained(str(folder))
            save_words(self.sight, self.built.tokenizer, model, folder)
