"""What ``fewbits sc`` and its subcommands say about themselves."""

from __future__ import annotations

from fewbits.cli.texts import Text

SC_TEXTS = {
    "error": Text(
        "measure the error of stochastic products under one setting",
        "Compare stochastic products with exact ones: mean squared error, bias and the worst case. The\n"
        "operands come from a file, or are captured from a model's linear layers while it reads a text.",
        """
fewbits sc error --operands ab.safetensors --length 32
fewbits sc error --model models/stories3m --text story.txt --length 64 --heatmap table.svg
""",
    ),
    "sweep": Text(
        "measure the error under many settings, as a table and a plot",
        "Measure the error of every combination of stream length, scramble and halving.",
        """
fewbits sc sweep --model models/stories3m --text story.txt --plot sweep.svg
fewbits sc sweep --operands ab.npz --lengths 16,32,64 --scrambles bitrev,off --json
""",
    ),
    "eval": Text(
        "measure a model's perplexity under stochastic settings",
        "Measure the perplexity of a model on a text under each setting, and for comparison with the\n"
        "model as it is and in INT8. With --output, a run that was stopped continues where it stopped.\n"
        "Four processes that write to one --output can take --share 1/4, 2/4, 3/4 and 4/4 of the text.",
        """
fewbits sc eval --model models/stories3m --text story.txt --lengths 16,32,64,128 --attention
fewbits sc eval --model models/llama --text wiki.txt --settings mixed.yaml --output eval.jsonl
""",
    ),
    "tasks": Text(
        "run tasks of lm-evaluation-harness under stochastic settings",
        "Run tasks on a model under each setting, and say what ran: every linear layer, expert and\n"
        "attention that a setting makes stochastic is counted, and one that ran otherwise is an error.",
        """
fewbits sc tasks --model models/llama --tasks arc_easy,piqa --settings mixed.yaml --limit 200
fewbits sc tasks --model models/llama --tasks my_task --task-folder tasks --settings 32 --attention
""",
    ),
    "energy": Text(
        "estimate the energy of a token under each setting, beside its perplexity",
        "Price every operation of a token (streams, conversions, INT and FP products, memory traffic) under\n"
        "each setting, and mark the settings that no other beats in both energy and perplexity.",
        """
fewbits sc energy --model models/stories3m --text story.txt --prices horowitz-45nm --attention
fewbits sc energy --model models/llama --text wiki.txt --prices cell.yaml --prices jouppi-7nm
""",
    ),
    "screen": Text(
        "compare many configurations with a base, and drop the worse ones early",
        "Evaluate all candidates on the same windows of text as the base. What comes before the first\n"
        "layer that a candidate changes is computed once. With --board, a run that was stopped continues.",
        """
fewbits sc screen --model models/llama --text wiki.txt --base mixed.yaml --candidates a.yaml b.yaml c.yaml
fewbits sc screen --model models/stories3m --text story.txt --base 32 --candidates *.yaml --board b.jsonl
""",
    ),
    "swap": Text(
        "measure what each operator loses at other stream lengths",
        "Give one operator at a time (q_proj ... down_proj, scores, values) another stream length, or\n"
        "INT8. Measured are the change of the loss, with a confidence interval, and the cycles it frees.",
        """
fewbits sc swap --model models/stories3m --text story.txt --base 32 --attention --to 16,24,48,64,int8
fewbits sc swap --model models/llama --text wiki.txt --base 32 --buckets 4 --tied --output swaps.json
""",
    ),
    "allocate": Text(
        "choose stream lengths under a budget of cycles",
        "Choose the settings of least loss under a budget, from the losses that fewbits sc swap measured.\n"
        "The loss is estimated on windows that took no part in the choice; resamples of the windows show\n"
        "how certain the choice is.",
        """
fewbits sc allocate --swaps swaps.json --budget 32 --output mixed.yaml
fewbits sc allocate --swaps swaps.json --budget 32 --over all --int8 --int8-cycles 32 --output m.yaml
""",
    ),
    "bundle": Text(
        "convert configurations from and to scmp_llm",
        "Convert a wrapper of scmp_llm (with its table, and perhaps a schedule of INT blocks) into a\n"
        "configuration, or a configuration into a bundle. What the other side cannot express is refused.",
        """
fewbits sc bundle --wrapper cell/wrapper.json --hybrid cell/hybrid.json --output c.yaml
fewbits sc bundle --settings mixed.yaml --model models/llama --output bundle
""",
    ),
    "fold": Text(
        "fold rotations and scales into a model's weights, which streams then round less",
        "Write a model that computes exactly the same in floating point, but loses less in streams: values\n"
        "and the residual stream rotated by Hadamard matrices, scales between queries and keys.",
        """
fewbits sc fold --model models/stories3m --output folded
fewbits sc fold --model models/llama --output folded --parts scales,values,residual --text wiki.txt
""",
    ),
    "calibrate": Text(
        "write a configuration that is measured on a text",
        "Run a model over a text and write a configuration of its stochastic products: AWQ or SmoothQuant\n"
        "scales, protected channels, layers that run in INT8, and stream lengths under a budget of cycles.",
        """
fewbits sc calibrate --model models/stories3m --text story.txt --budget 48 --output mixed.yaml
fewbits sc calibrate --model models/llama --text wiki.txt --budget 32 --attention auto --output mixed.json
""",
    ),
}
