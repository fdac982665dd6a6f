"""What each setting of a training run means, as `fewbits train --help` and `fewbits init` print it.

The keys are the fields of `fewbits.training.config.TrainConfig`, in their order and groups. Where a text says
"none", it means the value None (`null` in YAML), which every optional setting has until it is set.
"""

from __future__ import annotations

HELP = {
    # model
    "model": "folder or Hugging Face Hub name of the base model",
    "dtype": "dtype of everything that is not quantised; auto: bfloat16 on a GPU, float32 on a CPU",
    "device": "where to train; auto: on a GPU if there is one",
    "recipe": (
        "which number format goes where: a name that `fewbits recipes` lists (qlora_nf4, int8, ...), a"
        " YAML or JSON file, or a mapping such as {name: qlora_nf4, linear: {weight: int8}}; none:"
        " qlora_nf4, or unquantised weights with load_in_4bit: false"
    ),
    "load_in_4bit": "where no recipe is set: store the base weights in 4-bit NF4 (QLoRA)",
    "memory_budget": (
        "GPU memory that training may take, in GiB; auto: all that is free. Each layer keeps the"
        " activations that fit and recomputes or offloads the others. In place of a number, one choice for"
        " all layers: keep (fastest), recompute, offload to the host (least memory)"
    ),
    "cuda_graph": (
        "replay each training step as one CUDA graph, without the cost of launching kernels one by one;"
        " auto: for small models on packed data; true: always, with every batch padded to max_seq_length"
    ),
    # lora
    "lora_r": "rank of the LoRA adapters; none: the recipe's (16 if it has none); 0: no adapters",
    "lora_alpha": "the adapter's output is scaled by lora_alpha / lora_r; none: the recipe's",
    "lora_dropout": "dropout probability of the adapter's input; none: the recipe's",
    "lora_targets": "names of the linear layers that get adapters, or all-linear; empty: the recipe's",
    "lora_bias": "which biases train; none: the recipe's",
    "lora_rslora": "scale by lora_alpha / sqrt(lora_r) (rank-stabilised LoRA)",
    "lora_dora": (
        "DoRA: train magnitude and direction of the weights apart; computed by PEFT's layers, not the"
        " fused ones"
    ),
    "lora_init": (
        "initial values of the adapters. gaussian, orthogonal: random; loftq: so that they make up for"
        " the error of quantisation; pissa, olora: from weights that are not quantised; none: B is zero,"
        " so the adapter starts without effect"
    ),
    "lora_ranks": "other ranks for some layers, by the end of their name, as in lora_ranks.q_proj=32",
    "lora_module_alphas": "other values of lora_alpha for some layers, written like lora_ranks",
    "lora_plus_ratio": (
        "LoRA+: how many times larger the learning rate of B is than that of A (alias:"
        " loraplus_lr_ratio); none: the same rate"
    ),
    "modules_to_save": "modules that are trained in full beside the adapters, such as embed_tokens, lm_head",
    "trainable_tokens": "ids of tokens whose embedding rows are trained beside the adapters",
    # data
    "train_data": (
        "a JSONL, JSON, CSV, Parquet or text file, a folder saved by `datasets`, or the name of a dataset"
        " on the Hub; or a list of these, as mappings where one needs a weight, a split or field names of"
        " its own: [a.jsonl, {path: b.jsonl, weight: 0.5}]"
    ),
    "eval_data": "evaluation data, given like train_data",
    "eval_fraction": "without eval_data: share of the training rows that is held out for evaluation",
    "data_on_disk": (
        "for data larger than memory: a folder in which the tokens are kept, in an unnamed temporary"
        " file; datasets of the Hub are then streamed"
    ),
    "format": "what each row is; auto: decided by its columns",
    "fields": "your names of the expected columns, as in fields.prompt=question",
    "prompt_template": (
        "how an instruction row becomes a prompt: alpaca, question, chat (the tokenizer's chat template),"
        " or a text of your own with {instruction} and {input}"
    ),
    "chat_template": (
        "how chats are written: chatml, llama-3, mistral, gemma, qwen, phi, zephyr, alpaca, vicuna, a"
        " file with a Jinja template, or tokenizer (its own); none: the tokenizer's own, except that"
        " preference rows of plain text stay plain text"
    ),
    "template_tokens": (
        "special tokens of chat_template that the tokenizer lacks. text: they are tokenised like other"
        " text; add: they become tokens, and embedding and head are trained in full"
    ),
    "max_seq_length": "longest row, in tokens; none: what the model allows, at most 1024",
    "long_rows": "what happens to rows longer than max_seq_length: cut at the end, dropped, or refused",
    "packing": "put several rows into one sequence; they do not attend to each other",
    "responses_only": "compute the loss on responses only, not on prompts",
    "skip_bad_rows": "skip and count rows that cannot be used; otherwise the first one stops the run",
    # training
    "batch_size": "most rows (with packing: sequences) in one forward pass",
    "gradient_accumulation": (
        "forward passes for each optimizer step, over all processes together: a step has batch_size x"
        " gradient_accumulation rows, on any number of GPUs"
    ),
    "epochs": "passes over the data",
    "max_steps": "number of optimizer steps; overrides epochs",
    "learning_rate": "peak learning rate (alias: lr)",
    "scheduler": "how the learning rate changes after the warm-up",
    "warmup": "length of the warm-up: below 1 a share of all steps, from 1 on a number of steps",
    "weight_decay": "weight decay of matrices; biases and norms have none",
    "max_grad_norm": "gradients are clipped to this norm; 0: never",
    "optimizer": (
        "adamw, adafactor, sgd; adamw_8bit (8-bit moments); muon (for matrices, AdamW for the rest); from"
        " other packages: adamw_4bit (torchao), paged_adamw and paged_adamw_8bit (bitsandbytes),"
        " schedule_free (schedulefree)"
    ),
    "embedding_learning_rate": "learning rate of embeddings and head, if they train; none: learning_rate",
    "neftune_alpha": "NEFTune: strength of the noise added to embeddings in training; none: no noise",
    "seed": "seed of the adapters, of dropout, of the held-out split and of the order of the data",
    # method
    "method": (
        "what is trained for, and the columns it needs: sft (text, prompt and completion, or chats); dpo,"
        " orpo, cpo, simpo, reward (prompt, chosen, rejected); kto (prompt, completion, label); grpo and rloo"
        " (prompt, and functions in rewards)"
    ),
    "beta": (
        "beta of the preference methods, as TRL defines it for each: in dpo, kto, grpo and rloo, how strongly"
        " the model is held to what it was at the start; none: TRL's default"
    ),
    "rewards": "grpo and rloo only: functions that score completions, as module:function",
    "num_generations": "grpo and rloo only: completions per prompt; must divide the rows of a step; none: 8",
    "max_completion_length": (
        "grpo and rloo only: tokens of a completion; none: half of max_seq_length, at most 256"
    ),
    # several GPUs
    "parallel": (
        "how the processes share the model. ddp: each holds all of it; fsdp: each holds a share of the"
        " weights and gathers a layer when it needs it; tensor: each computes a part of every layer; auto:"
        " ddp if the model fits on each GPU, else fsdp"
    ),
    "tensor_size": "with tensor or fsdp: processes that share each layer; none: all with tensor, 1 with fsdp",
    "shard_size": (
        "with fsdp: how many neighbouring processes share one copy of the weights, such as the GPUs of"
        " one machine; every such group holds a copy; none: all processes share one"
    ),
    "keep_gathered": (
        "with fsdp: keep layers gathered between forward and backward pass; faster, but each GPU needs"
        " room for all weights"
    ),
    "communication": (
        "number format in which gradients are sent between processes; auto: the recipe's, if it names"
        " one; none: unquantised"
    ),
    "meeting_seconds": "how long the processes wait for each other to start, before the run stops",
    "wait_seconds": "how long a process that has started waits for another before the run stops",
    # output
    "logging_steps": "steps between two lines of metrics.jsonl",
    "eval_steps": "steps between evaluations; none: ten evaluations in the run",
    "save_steps": "steps between checkpoints; none: ten checkpoints in the run",
    "keep_checkpoints": "how many of the newest checkpoints are kept, besides the best one",
    "early_stopping_patience": "stop after this many evaluations without a lower loss; none: never",
    "keep_best": "if there is evaluation data: keep the best checkpoint and end with its weights",
    "output_dir": "folder of the run: checkpoints, figures, report and final model",
    "resume": "continue from the last checkpoint in output_dir, if there is one",
    "take_over": "use a run folder that a process on another machine still holds; only if that one is dead",
    "merge": "at the end, also write the model with its adapters merged, in 16 bits",
    "report": "at the end, write report.html",
    "title": "heading of the report; none: the model's name",
    "report_to": "where metrics are sent besides metrics.jsonl: tensorboard, wandb, trackio, mlflow",
    "samples": "number of evaluation rows that the model answers before and after training, for the report",
    "sample_prompts": "prompts that the model answers before and after training, for the report",
    "sample_tokens": "longest sample answer, in tokens",
}
