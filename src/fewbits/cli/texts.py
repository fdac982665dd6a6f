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
        "watch a small model learn, in two minutes, on any machine",
        "Fine-tune the built-in model on a generated task, over 4-bit weights, on this machine.\n"
        "Needs no network, no GPU and no file from elsewhere.",
        """
fewbits demo
fewbits demo --output /tmp/demo --seed 7
""",
    ),
    "init": Text(
        "write a configuration: five questions, or flags",
        "Ask five questions (model, data, method, recipe, folder) and write a commented YAML file for\n"
        "fewbits train. What a flag answers is not asked; without a terminal the flags say all.",
        """
fewbits init
fewbits init qlora.yaml --model models/stories3m --train-data rows.jsonl --yes
fewbits init dpo.yaml --model models/qwen3 --train-data pairs.jsonl --method dpo --output-dir runs/dpo
""",
    ),
    "recipes": Text(
        "list the recipes: bits, what trains, what they run on",
        "Every recipe by its name: the bits a weight takes, which weights a run trains, the number format\n"
        "in which matrices are multiplied, and the oldest GPU that has hardware for that.",
        """
fewbits recipes
fewbits recipes --json
""",
    ),
    "models": Text(
        "say which model families are fused, unfused or refused",
        "Build a tiny model of each family, pack it, and say whether its decoder layers are computed by the\n"
        "fused kernels, by transformers' own layers, or not at all. Names are transformers' model types, or\n"
        "folders of models; without a name, the families that fewbits describes by hand.",
        """
fewbits models
fewbits models gpt2 mixtral models/stories3m
fewbits models --all --json > families.json
""",
    ),
    "plan": Text(
        "what training a model takes on a GPU, on paper",
        "Predict from config.json alone, for every recipe, the memory of weights, gradients, optimizer and\n"
        "activations, the largest batch and the longest sequence; and name the fastest recipe that fits.\n"
        "Needs no GPU and no weights.",
        """
fewbits plan models/stories3m --gpu rtx4090
fewbits plan models/llama --gpu h200 --batch 4x2048
fewbits plan models/llama --gpu 24GiB --recipe qlora_nf4 --json
""",
    ),
    "preview": Text(
        "show a run's rows as the model will see them",
        "Read the data of a run, apply the chat template and the tokenizer, and show the first rows with\n"
        "the tokens that train in colour (between [[ and ]] where there is none), how long the rows are,\n"
        "and how much of a batch is padding.",
        """
fewbits preview qlora.yaml
fewbits preview qlora.yaml max_seq_length=2048 --rows 10 --html preview.html
""",
    ),
    "train": Text(
        "fine-tune a model",
        "Fine-tune a model as a YAML file says. Settings can be given on the command line too, as key=value\n"
        "or as flags of the same name. A flag overrides key=value, and both override the file.",
        """
fewbits train qlora.yaml
fewbits train qlora.yaml learning_rate=1e-4 --max-steps 200
fewbits train qlora.yaml --resume
fewbits train --model models/stories3m --train-data rows.jsonl --output-dir runs/mine
""",
    ),
    "generate": Text(
        "write text with a model",
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
        "measure a model on a text, on rows, or on tasks",
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
        "compare models with a reference on one text",
        "Compare every model with the first one: the KL divergence, and how often both find the same next\n"
        "token the likeliest. Also shows each model's perplexity, size and speed. PATH@RECIPE quantises a\n"
        "model while it is loaded.",
        """
fewbits compare models/llama models/llama@qlora_nf4 models/llama@int8 --text wiki.txt
fewbits compare models/llama runs/mine merged --text wiki.txt --window 512 --plot sizes.svg
""",
    ),
    "quantize": Text(
        "write a packed copy of a checkpoint",
        "Quantise a checkpoint, tensor by tensor, into a packed one that every fewbits command and\n"
        "FastLanguageModel.from_pretrained load. Prints the rounding error of each layer. With --calibrate\n"
        "weights are rounded so that the layers' outputs on a text change little (GPTQ, AWQ); if that is\n"
        "interrupted, the same command goes on where it stopped.",
        """
fewbits quantize models/llama models/llama-nf4 --recipe qlora_nf4
fewbits quantize models/llama models/llama-int8 --recipe int8 --json > errors.json
fewbits quantize models/llama models/llama-w3 --format int3_g128_zp --calibrate rows.jsonl --method awq+gptq
fewbits quantize models/llama models/llama-3b5 --bits 3.5 --calibrate rows.jsonl --report loss.svg
""",
    ),
    "merge": Text(
        "fold an adapter into its base model",
        "Add a LoRA adapter to the weights of the original checkpoint and write the result as a 16-bit\n"
        "model. It is read back and compared with base and adapter before the folder gets its name.",
        """
fewbits merge runs/mine merged
fewbits merge runs/mine/final merged --base models/llama
""",
    ),
    "export": Text(
        "write a model for another engine",
        "Write a model, with its adapter merged, in the file format of another program. The files are read\n"
        "back and the logits compared before the folder gets its name. Weights that are packed in the\n"
        "target's format already are copied without rounding them again.\n"
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
        "upload a run's model, an adapter or an export to the hub",
        "Upload a folder in one commit, with a model card: recipe, data by name, curve, what is packed.\n"
        "A training run stands for its final model or adapter. Refused before any work where the hub cannot\n"
        "be asked, nobody is logged in, or an adapter names a base that nobody else has.",
        """
fewbits push runs/mine me/my-adapter --base meta-llama/Llama-3.2-1B --private
fewbits push runs/mine/merged me/my-model
fewbits push exported me/my-model-gguf
""",
    ),
    "report": Text(
        "write a training run's report again",
        "Write report.html from the files of a training run, finished or not.",
        """
fewbits report runs/mine
""",
    ),
    "bench": Text(
        "measure kernels and training steps",
        "Measure kernels and training steps.",
        """
fewbits bench --help
""",
    ),
    "doctor": Text(
        "say what is wrong with this machine, and what to do",
        "Look at driver, toolkit, torch, compilers, memory limits and packages, and say what does not fit.\n"
        "Works with torch broken or absent. Exit code 1 if there is a problem.",
        """
fewbits doctor
fewbits doctor transformer-engine flash-attn
fewbits doctor --json > findings.json
""",
    ),
    "build": Text(
        "run a source build within the memory there is",
        "Run any build command so that its compilers never use more memory than there is: each starts when\n"
        "it fits; what does not fit is paused, moved to the disk or run alone. Finished objects are kept.",
        """
fewbits build -- pip wheel --no-build-isolation transformer-engine
fewbits build --memory 12G -- ninja -C build -j8
fewbits build --keep /scratch/build -- python setup.py bdist_wheel
fewbits build --plan profile.json --memory 32G
""",
    ),
    "plan-gpus": Text(
        "how long a step takes on many GPUs, on paper",
        "What a step of data-parallel training costs on many GPUs, with gradients in 32 to 4 bits: from\n"
        "the step's time on one GPU, the trained values and the network. What the model leaves out, and how\n"
        "far it was off where we could measure: docs/guide/gradient-communication.md.",
        """
fewbits plan-gpus --values 8e9 --step-ms 980 --network-gbit 100
fewbits plan-gpus --values 1.7e9 --step-ms 400 --network-gbit 10 --node-size 1 --gpus 2,4,8
fewbits plan-gpus --values 8e9 --step-ms 980 --network-gbit 3200 --gpus 64,256,1024 --json
""",
    ),
    "sc": Text(
        "stochastic computing: errors, perplexities, calibration",
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
        "print a shell's completion script",
        "Print a script that completes commands and flags with the Tab key. Save it where your shell looks.",
        """
fewbits completion bash > ~/.local/share/bash-completion/completions/fewbits
fewbits completion zsh > ~/.zfunc/_fewbits        # a folder in $fpath
fewbits completion fish > ~/.config/fish/completions/fewbits.fish
""",
    ),
}
