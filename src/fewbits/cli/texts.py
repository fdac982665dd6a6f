"""What each subcommand says about itself."""

from __future__ import annotations

from typing import NamedTuple


class Text(NamedTuple):
    """The words of one subcommand."""

    help: str
    description: str
    examples: str


TEXTS = {
    "demo": Text(
        "watch a small model learn, in a minute or two, on any machine",
        "Fine-tune the built-in model on a generated task, over 4-bit weights, on this machine.\n"
        "Needs no network, no GPU and no file from elsewhere.",
        """
fewbits demo
fewbits demo --output /tmp/demo --seed 7
""",
    ),
    "init": Text(
        "write a configuration file for fewbits train",
        "Ask five questions (model, data, method, recipe, folder) and write a commented YAML file for\n"
        "fewbits train. A question whose answer is given as a flag is not asked; without a terminal, give\n"
        "--model and --train-data as flags, and the other settings keep their defaults unless you give\n"
        "them.",
        """
fewbits init
fewbits init qlora.yaml --model models/stories3m --train-data rows.jsonl --yes
fewbits init dpo.yaml --model models/qwen3 --train-data pairs.jsonl --method dpo --output-dir runs/dpo
""",
    ),
    "recipes": Text(
        "list the recipes: their number formats, and which GPUs run them",
        "A recipe says in which number formats a model is stored, multiplied and trained. For each recipe:\n"
        "the bits of a stored weight, what a run trains, the number format of matrix products, and the\n"
        "oldest GPU with hardware for it (as a CUDA compute capability).",
        """
fewbits recipes
fewbits recipes --json
""",
    ),
    "models": Text(
        "list which model families work, and which have fast kernels",
        "Build a tiny model of each family, quantise it, and say whether its decoder layers run through\n"
        "fewbits' fused kernels (fused), through transformers' own layers (unfused), or cannot be\n"
        "quantised (refused). Name transformers' model types or model folders; without a name, all\n"
        "families are tried for which fewbits has a description.",
        """
fewbits models
fewbits models gpt2 mixtral models/stories3m
fewbits models --all --json > families.json
""",
    ),
    "plan": Text(
        "predict whether training a model fits on a GPU, without one",
        "Predict from config.json alone, for every recipe, the memory of weights, gradients, optimizer and\n"
        "activations, the largest batch and the longest sequence; and name the fastest recipe that fits.\n"
        "Needs no GPU and no weights.",
        """
fewbits plan models/stories3m --gpu rtx4090
fewbits plan models/llama --gpu h200 --batch 4x2048
fewbits plan models/llama --gpu 24GiB --recipe qlora_nf4 --json
""",
    ),
    "warm": Text(
        "compile a model's kernels for this GPU ahead of time",
        "Run two layers of a model's widths, of its config.json alone: load, train with and without\n"
        "recomputation, generate. What is compiled stays in Triton's cache folder, where later processes\n"
        "find it: a step in making a container's image, say. Needs the GPU, or one like it.",
        """
fewbits warm models/llama --batch 4x2048
fewbits warm models/llama/config.json --recipe qlora_nf4_fp8 --json
""",
    ),
    "preview": Text(
        "show the training rows as the model will see them",
        "Read the data of a run, apply the chat template and the tokenizer, and show the first rows with\n"
        "the tokens that count in the loss in colour (in a file or pipe: between [[ and ]]), how long the\n"
        "rows are, and how much of a batch is padding.",
        """
fewbits preview qlora.yaml
fewbits preview qlora.yaml max_seq_length=2048 --rows 10 --html preview.html
""",
    ),
    "train": Text(
        "fine-tune a model",
        "Fine-tune a model with the settings of a YAML file (fewbits init writes one). Settings can be\n"
        "given on the command line too, as key=value or as flags. A flag overrides key=value, and both\n"
        "override the file. Only model and train_data have no default.",
        """
fewbits train qlora.yaml
fewbits train qlora.yaml learning_rate=1e-4 --max-steps 200
fewbits train qlora.yaml --resume
fewbits train --model models/stories3m --train-data rows.jsonl --output-dir runs/mine
""",
    ),
    "generate": Text(
        "generate text: continue a prompt, chat, or answer a file",
        "Continue a prompt, answer a file of chat messages, or chat; text appears as it is written. With\n"
        "--input, answer a file of many prompts, several at a time. If that is interrupted, give the same\n"
        "command again: it goes on where it stopped.",
        """
fewbits generate --model models/stories3m --prompt "Once upon a time"
fewbits generate --model models/qwen3 --chat --recipe qlora_nf4
fewbits generate --model runs/mine --messages question.json --temperature 0 --cache int4
fewbits generate --model runs/mine --input rows.jsonl --output answers.jsonl
echo "Once upon a time" | fewbits generate --model models/stories3m --prompt -
""",
    ),
    "eval": Text(
        "measure perplexity, loss and exact match, or benchmark scores",
        "Measure perplexity on a text, or loss and exact matches on rows of data (written with the chat\n"
        "template of the run that trained the model), or the score on tasks of lm-evaluation-harness.",
        """
fewbits eval --model models/stories3m --text tinystories.txt
fewbits eval --model models/stories3m --text tinystories.txt --recipe qlora_nf4 --window 512 --stride 256
fewbits eval --model models/stories3m --text - --json < tinystories.txt
fewbits eval --model runs/mine --rows held-out.jsonl --answers 50 --show
fewbits eval --model runs/mine --tasks hellaswag,arc_easy --limit 100
fewbits eval --model models/stories3m --text tinystories.txt --cache int8/int4
""",
    ),
    "compare": Text(
        "compare models with a first one: KL divergence, size, speed",
        "Compare every model with the first one: the KL divergence, and how often both find the same next\n"
        "token the likeliest. Also shows each model's perplexity, size and speed. PATH@RECIPE quantises a\n"
        "model while it is loaded.",
        """
fewbits compare models/llama models/llama@qlora_nf4 models/llama@int8 --text wiki.txt
fewbits compare models/llama runs/mine merged --text wiki.txt --window 512 --plot sizes.svg
""",
    ),
    "quantize": Text(
        "write a quantised copy of a model",
        "Quantise a checkpoint, tensor by tensor, into a folder that every fewbits command and\n"
        "FastLanguageModel.from_pretrained load. Prints the rounding error of each layer. With --calibrate\n"
        "weights are rounded so that the layers' outputs on a text change little (GPTQ, AWQ, trained\n"
        "codes), and --recover trains scales and norms afterwards; if that is interrupted, the same command\n"
        "goes on where it stopped.",
        """
fewbits quantize models/llama models/llama-nf4 --recipe qlora_nf4
fewbits quantize models/llama models/llama-int8 --recipe int8 --json > errors.json
fewbits quantize models/llama models/llama-w3 --format int3_g128_zp --calibrate rows.jsonl --method awq+gptq
fewbits quantize models/llama models/llama-w3 --format int3_g64_zp --calibrate rows.jsonl --recover 10
fewbits quantize models/llama models/llama-3b5 --bits 3.5 --calibrate rows.jsonl --report loss.svg
""",
    ),
    "merge": Text(
        "merge a LoRA adapter into its base model",
        "Add a LoRA adapter to the weights of the original checkpoint and write the result as a 16-bit\n"
        "model. It is read back and compared with base and adapter before the folder gets its name.",
        """
fewbits merge runs/mine merged
fewbits merge runs/mine/final merged --base models/llama
""",
    ),
    "export": Text(
        "write a model for llama.cpp, vLLM and other engines",
        "Write a model, with its adapter merged, in the file format of another program. The files are read\n"
        "back and the logits compared before the folder gets its name. Weights that are already in\n"
        "the target's format are copied without rounding them again.\n"
        "  gguf:             f16, bf16, q8_0, q6_k, q5_k_m, q4_k_m, q3_k_m, q2_k, q4_0, iq4_xs, more;\n"
        "                    several with commas\n"
        "  compressed_tensors: w2a16 to w8a16, w4a16_asym, w4a8, w4afp8, w8a8, fp8, fp8_dynamic, fp8_block,\n"
        "                    nvfp4, nvfp4a16, mxfp4, mxfp4a16, mxfp8, mxfp8a16\n"
        "  gptq, gptq_v2:    int2, int3, int4, int8 by rows or groups, such as int4_g128 or int4_g128_zp\n"
        "  awq:              int4_g128_zp and its kind\n"
        "  bitsandbytes:     nf4, nf4_dq, fp4, fp4_dq, int8\n"
        "  torchao:          float8, int8, int2 to int8 in groups\n"
        "  16bit, bf16, f16: a plain folder",
        """
fewbits export runs/mine exported --to gguf:q4_k_m --calibrate rows.jsonl
fewbits export models/llama exported --to gguf:q8_0 --overwrite
fewbits export runs/mine for-vllm --to compressed_tensors:fp8_dynamic
fewbits export models/llama-w4 for-gptq --to gptq
""",
    ),
    "push": Text(
        "upload a model, an adapter or an export to the Hugging Face Hub",
        "Upload a folder in one commit, with a model card that names the recipe, the data, the loss curve\n"
        "and what is quantised. Of a training run, the final model or adapter is uploaded. Refused before\n"
        "any work if the Hub cannot be reached, you are not logged in, or an adapter's base model is a\n"
        "folder of this machine (name it on the Hub with --base).",
        """
fewbits push runs/mine me/my-adapter --base meta-llama/Llama-3.2-1B --private
fewbits push runs/mine/merged me/my-model
fewbits push exported me/my-model-gguf
""",
    ),
    "report": Text(
        "write the HTML report of a training run again",
        "Write report.html from the files of a training run, finished or not.",
        """
fewbits report runs/mine
""",
    ),
    "bench": Text(
        "time kernels and training steps on this GPU",
        "Time kernels (fewbits bench kernels) and whole training steps (fewbits bench train), or find the\n"
        "fastest tile sizes for this GPU (fewbits bench tune).",
        """
fewbits bench --help
""",
    ),
    "doctor": Text(
        "find what is wrong with this machine, and say how to fix it",
        "Check driver, CUDA toolkit, torch, compilers, memory limits and packages, and say what does not\n"
        "work together and what to do. Also works where torch is broken or absent. Changes nothing. Exit\n"
        "code 1 if there is a problem.",
        """
fewbits doctor
fewbits doctor transformer-engine flash-attn
fewbits doctor --json > findings.json
""",
    ),
    "build": Text(
        "compile another library without running out of memory",
        "Run any build command (pip, ninja, make, cmake) so that its compilers together stay within the\n"
        "memory of this machine or job: each starts when it fits; one that does not fit is paused, moved\n"
        "to disk or run alone. Finished object files are kept for the next attempt.",
        """
fewbits build -- pip wheel --no-build-isolation transformer-engine
fewbits build --memory 12G -- ninja -C build -j8
fewbits build --keep /scratch/build -- python setup.py bdist_wheel
fewbits build --plan profile.json --memory 32G
""",
    ),
    "plan-gpus": Text(
        "predict the time of a training step on many GPUs, without them",
        "Predict the time of a data-parallel training step on many GPUs, with gradients exchanged in 32 to\n"
        "4 bits, from the time of a step on one GPU, the number of trained values and the speed of the\n"
        "network. docs/guide/gradient-communication.md says what this leaves out and how far off it was.",
        """
fewbits plan-gpus --values 8e9 --step-ms 980 --network-gbit 100
fewbits plan-gpus --values 1.7e9 --step-ms 400 --network-gbit 10 --node-size 1 --gpus 2,4,8
fewbits plan-gpus --values 8e9 --step-ms 980 --network-gbit 3200 --gpus 64,256,1024 --json
""",
    ),
    "sc": Text(
        "simulate stochastic-computing hardware",
        "Compute a model as stochastic-computing hardware would: measure the error of its matrix products\n"
        "and its perplexity, and choose the stream length of each layer under a budget of cycles.",
        """
fewbits sc error --model models/stories3m --text story.txt --length 32
fewbits sc sweep --model models/stories3m --text story.txt --plot sweep.svg
fewbits sc eval --model models/stories3m --text story.txt --lengths 16,32,64,128 --output eval.jsonl
fewbits sc calibrate --model models/stories3m --text story.txt --budget 48 --output mixed.yaml
""",
    ),
    "completion": Text(
        "print a script for tab completion in your shell",
        "Print a script that completes commands and flags with the Tab key. Save it where your shell\nlooks.",
        """
fewbits completion bash > ~/.local/share/bash-completion/completions/fewbits
fewbits completion zsh > ~/.zfunc/_fewbits        # a folder in $fpath
fewbits completion fish > ~/.config/fish/completions/fewbits.fish
""",
    ),
}
