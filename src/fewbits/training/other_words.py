"""What other libraries call the settings of a run, for those who bring their habits.

A key that is no setting is refused (`unknown_key`), and the refusal names what was probably meant: by this
table, which comes before any likeness of letters; then by letters, for a slip of the keys only. ``lora_rank``
looks like ``lora_ranks`` and means ``lora_r``.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_SLIP = 0.85  # of letters in common: `learning_rat`, `lora_alhpa`; not `num_iterations` and num_generations

# Each setting, and what else it is called.
CALLED = {
    "model": "base_model model_name model_path model_id model_name_or_path base_model_name_or_path "
    "checkpoint pretrained_model_name_or_path hub_model_id",
    "dtype": "torch_dtype precision bf16 fp16 half compute_dtype bnb_4bit_compute_dtype",
    "device": "use_cpu cuda gpu",
    "recipe": "quantization quantize quant quantization_bit quantization_config bits load_in_8bit fp8",
    "memory_budget": "activation_checkpointing use_gradient_checkpointing "
    "activation_checkpointing_kwargs gradient_checkpointing_kwargs activation_offloading recompute memory",
    "cuda_graph": "cuda_graphs graph",
    "lora_r": "r rank lora_rank lora_dim lora_size adapter_rank lora_dimension network_dim",
    "lora_alpha": "alpha lora_scale lora_scaling scaling adapter_alpha network_alpha",
    "lora_dropout": "dropout adapter_dropout",
    "lora_targets": "target_modules targets lora_target lora_target_modules lora_modules modules "
    "lora_layers target_layers",
    "lora_bias": "bias",
    "lora_rslora": "use_rslora rslora",
    "lora_dora": "use_dora dora peft_use_dora",
    "lora_init": "init_lora_weights init_weights",
    "lora_ranks": "rank_pattern ranks",
    "lora_module_alphas": "alpha_pattern alphas",
    "train_data": "dataset datasets train_file train_dataset train train_path data_path dataset_path "
    "dataset_name training_data data_file data_files",
    "eval_data": "eval_file eval_dataset validation_file validation_data val_data valid_data dev_data "
    "test_data test_datasets val_dataset validation",
    "eval_fraction": "val_size val_set_size validation_split eval_split test_size val_fraction "
    "val_split validation_fraction eval_ratio",
    "fields": "dataset_text_field text_field text_column columns column_mapping",
    "format": "dataset_type data_format dataset_format",
    "prompt_template": "prompt_format prompt_style",
    "chat_template": "template chat_template_path conversation_template",
    "max_seq_length": "context_length seq_len seq_length sequence_len sequence_length max_length "
    "cutoff_len max_len block_size context ctx max_tokens model_max_length max_sequence_length n_ctx",
    "long_rows": "truncation truncate truncation_mode",
    "packing": "sample_packing pack neat_packing",
    "responses_only": "train_on_responses_only train_on_inputs completion_only_loss "
    "assistant_only_loss mask_prompt train_on_prompt mask_inputs",
    "batch_size": "bs batch train_batch_size micro_batch_size per_device_batch_size batchsize "
    "per_device_eval_batch_size eval_batch_size mbs",
    "gradient_accumulation": "grad_accum grad_accumulation accumulation_steps accumulate_grad_batches "
    "grad_acc_steps grad_acc gas",
    "epochs": "epoch n_epochs max_epochs num_epoch train_epochs",
    "max_steps": "steps num_steps max_iters iters iterations train_steps total_steps "
    "num_training_steps n_steps",
    "learning_rate": "peak_lr max_lr base_lr step_size learning_rate_init eta",
    "scheduler": "lr_scheduler lr_scheduler_type lr_schedule schedule lr_decay decay scheduler_type",
    "warmup": "warmup_steps warmup_ratio num_warmup_steps lr_warmup_steps warmup_iters warmup_proportion",
    "weight_decay": "wd l2 decoupled_weight_decay",
    "max_grad_norm": "clip grad_clip gradient_clipping gradient_clip clip_grad clip_grad_norm "
    "max_norm gradient_clip_val grad_norm",
    "optimizer": "optim optimiser opt optimizer_type optimizer_name",
    "seed": "random_seed random_state data_seed rng_seed",
    "method": "trainer task algorithm stage loss loss_type rl training_type training_method",
    "beta": "dpo_beta kl_coef kl_beta pref_beta",
    "rewards": "reward reward_funcs reward_functions reward_function",
    "num_generations": "group_size n_generations num_samples_per_prompt num_return_sequences rollouts",
    "max_completion_length": "max_new_tokens max_response_length response_length",
    "parallel": "strategy fsdp ddp deepspeed zero distributed fsdp_config parallelism",
    "tensor_size": "tp tp_size tensor_parallel tensor_parallel_size tensor_model_parallel_size",
    "communication": "gradient_compression compression",
    "meeting_seconds": "rdzv_timeout join_timeout rendezvous_timeout",
    "wait_seconds": "ddp_timeout timeout",
    "logging_steps": "log_steps log_every log_interval logging_interval log_freq",
    "eval_steps": "evaluation_steps eval_every eval_interval val_check_interval eval_freq "
    "eval_strategy evals_per_epoch",
    "save_steps": "save_every save_interval save_freq checkpoint_steps checkpoint_every save_strategy "
    "saves_per_epoch",
    "keep_checkpoints": "save_total_limit max_checkpoints keep_last checkpoints",
    "early_stopping_patience": "early_stopping patience early_stop",
    "keep_best": "load_best_model_at_end save_best best",
    "output_dir": "out out_dir output_folder output_path save_dir save_path run_dir outdir",
    "resume": "resume_from_checkpoint continue resume_from",
    "merge": "merge_lora merge_adapter save_merged",
    "title": "run_name name wandb_name experiment_name",
    "report_to": "log_with loggers logger tracker wandb wandb_project use_wandb tensorboard",
    "sample_tokens": "num_sample_tokens",
}
OTHER_WORDS = {word: ours for ours, words in CALLED.items() for word in words.split()}


def unknown_key(key: str, settings: Iterable[str]) -> str:
    """The sentence that refuses a key which is no setting.

    Args:
        key: as it was written.
        settings: all their names, aliases included.
    """
    names = sorted(settings)
    plain = key.lower().replace("-", "_")
    meant = OTHER_WORDS.get(plain) or next((name for name in names if name == plain), None)
    if meant is None:
        near = get_close_matches(plain, names, n=1, cutoff=_SLIP)
        words = [word for word in OTHER_WORDS if abs(len(word) - len(plain)) < 2]  # bdlora is no slip of dora
        near = near or [OTHER_WORDS[word] for word in get_close_matches(plain, words, n=1, cutoff=_SLIP)]
        meant = near[0] if near else None
    advice = f"did you mean {meant}?" if meant else f"the names are {', '.join(names)}."
    return f"the configuration has an unknown key {key!r}; {advice}"
