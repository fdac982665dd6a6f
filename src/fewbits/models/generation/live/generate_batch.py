"""transformers' ``generate_batch``, which TRL's trainers call for rollouts, over a batch that lives.

The name, the arguments and the results are transformers' own; its continuous batching needs paged attention
and takes tens of seconds a call on a CPU. What it can do and this cannot goes to it.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

from fewbits.models.generation.live.answers import answers
from fewbits.models.generation.live.rows import Row

_OF_TRANSFORMERS = ("record_timestamps", "persistent_manager")


def generate_batch(
    model: Any,
    inputs: list[list[int]],
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    progress_bar: bool = False,
    **keywords: Any,
) -> dict[str, Any]:
    """Texts of many prompts, with the arguments and the results of transformers' ``generate_batch``.

    Args:
        model: the model that it is bound to.
        inputs: token ids of each prompt.
        generation_config: how tokens are chosen; None: the model's own.
        continuous_batching_config: transformers'; log-probabilities that it asks for are transformers' work,
            its sizes of blocks and memory are of no consequence here.
        progress_bar: show transformers' bar, and let transformers do it.
        keywords: ``max_new_tokens``; others that transformers has.

    Returns:
        For each text, by transformers' names of them ("req_0", then "req_0__child#0" of several answers), a
        ``GenerationOutput``; in the prompts' order.

    Raises:
        BadInput: a prompt without tokens or as long as the model's context, or memory that does not do.
        NotFinite: logits are NaN or infinite.
    """
    others = progress_bar or any(keywords.get(name) for name in _OF_TRANSFORMERS)
    if others or getattr(continuous_batching_config, "return_logprobs", False):
        defaults = {"continuous_batching_config": continuous_batching_config, "progress_bar": progress_bar}
        return type(model).generate_batch(  # type: ignore[no-any-return]
            model, inputs, generation_config, **defaults, **keywords
        )
    from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

    config = deepcopy(model.generation_config if generation_config is None else generation_config)
    each = config.num_return_sequences or 1
    # A paged cache is what transformers' own takes this call for.
    config.num_return_sequences, config.cache_implementation = None, None
    words = {"generation_config": config}
    if keywords.get("max_new_tokens") is not None:
        words["max_new_tokens"] = keywords["max_new_tokens"]
    seed = int(torch.randint(2**62, (1,)))
    rows = [Row(i, tuple(inputs[i // each]), seed + i) for i in range(each * len(inputs))]
    by_row = {text.row.index: text for text in answers(model, rows, words)}
    outputs: dict[str, Any] = {}
    for row in rows:
        name = f"req_{row.index // each}"
        child = row.index % each
        name += f"__child#{child - 1}" if child else ""
        outputs[name] = GenerationOutput(
            request_id=name,
            prompt_ids=list(row.ids),
            generated_tokens=by_row[row.index].tokens,
            status=RequestStatus.FINISHED,
        )
    return outputs
