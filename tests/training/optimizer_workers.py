"""Runs of many settings, one after the other, in the processes of one group; they can import it."""

from __future__ import annotations

import os
from unittest import mock

import torch


def run_all(configs: list[dict]) -> None:
    """Train as each configuration says; those of a folder that holds a run go on with it."""
    from fewbits.training.config import TrainConfig
    from fewbits.training.run import train

    if torch.distributed.is_initialized():
        rank, size = str(torch.distributed.get_rank()), str(torch.distributed.get_world_size())
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    with (
        mock.patch("torch.distributed.destroy_process_group"),  # the group stays for the next
        mock.patch("torch.compile", lambda function, **options: function),  # torchao's step: minutes
    ):
        for config in configs:
            train(TrainConfig.from_mapping(config), resume=True)
