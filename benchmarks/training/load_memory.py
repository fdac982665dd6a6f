"""Host memory while a plain checkpoint is loaded into packed form.

    python benchmarks/training/load_memory.py                # about 1.3 GB of bfloat16 weights in 4 shards
    python benchmarks/training/load_memory.py --layers 4     # smaller

A random Llama is written shard by shard to a temporary folder; a fresh process then loads it on the CPU
while a thread reads /proc/self/status every 2 ms. RssAnon is memory that the process owns; VmRSS adds file
pages of the memory-mapped shards, which the system takes back when it needs them. Figures are differences to
the moment before loading.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

CHILD = "--child"


def write_model(folder: Path, *, layers: int, hidden: int, vocab: int, shards: int) -> int:
    """Write a random bfloat16 Llama shard by shard; returns its bytes."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    heads = hidden // 64
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        from transformers import LlamaForCausalLM

        shapes = {name: p.shape for name, p in LlamaForCausalLM(config).named_parameters()}
    names = list(shapes)
    per_shard = -(-len(names) // shards)
    weight_map: dict[str, str] = {}
    total = 0
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = names[number * per_shard : (number + 1) * per_shard]
        tensors = {n: (torch.randn(shapes[n]) * 0.02).to(torch.bfloat16) for n in part}
        total += sum(t.nbytes for t in tensors.values())
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def status() -> dict[str, int]:
    """Bytes of RssAnon and VmRSS now."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {w[0].rstrip(":"): int(w[1]) * 1024 for w in lines if w and w[0] in ("RssAnon:", "VmRSS:")}


def load(folder: str, recipe: str | None) -> dict[str, float]:
    """Load the model in this process and report peaks."""
    import torch
    from transformers import AutoModelForCausalLM

    from fewbits import FewbitsConfig

    torch.set_num_threads(1)
    config = {"quantization_config": FewbitsConfig(recipe)} if recipe else {}
    torch.nn.Linear(256, 256)(torch.randn(256, 256))  # the allocator's and the math library's own pages
    before = status()
    peak = dict(before)
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            for key, value in status().items():
                peak[key] = max(peak[key], value)
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **config)
    seconds = time.perf_counter() - start
    done.set()
    thread.join()
    parameters = list(model.parameters())
    return {
        "model_bytes": sum(p.nbytes for p in parameters),
        "peak_anon_bytes": peak["RssAnon"] - before["RssAnon"],
        "peak_rss_bytes": peak["VmRSS"] - before["VmRSS"],
        "seconds": seconds,
    }


def measure(
    *, layers: int, hidden: int, vocab: int, recipe: str | None, parent: str | None = None
) -> dict[str, float]:
    """Write, load in a fresh process, delete; bytes and seconds."""
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        total = write_model(Path(folder), layers=layers, hidden=hidden, vocab=vocab, shards=4)
        command = [sys.executable, __file__, CHILD, folder, recipe or ""]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
    largest = max(vocab * hidden, hidden * (hidden * 11 // 4 // 64 * 64)) * 2
    return {
        "checkpoint_bytes": total,
        "largest_tensor_bytes": largest,
        **json.loads(result.stdout.splitlines()[-1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--recipe", default="qlora_nf4", help="'' loads it unquantised")
    options = parser.parse_args()
    for key, value in measure(**vars(options)).items():
        print(f"{key:22} {value:,.1f}" if key == "seconds" else f"{key:22} {value / 2**20:10,.1f} MiB")


if __name__ == "__main__":
    if CHILD in sys.argv:
        print(json.dumps(load(sys.argv[2], sys.argv[3] or None)))
    else:
        main()
