"""Importing does nothing: `import fewbits` loads no torch, and no module of it changes another library.

Everything runs in new processes, because this one has it all loaded already. What an import adds is modules,
which are counted, and CPU time of the process, beside that of what it stands on in the same process: a busy
machine fails nothing, nor do sources that are compiled each time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

# What fewbits stands on; whatever else it needs, it must import where it is used.
STAND_ON = """
import torch, transformers, peft, accelerate, safetensors.torch, psutil, yaml
import rich.console, rich.progress, rich.table
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel, Trainer
import transformers.quantizers.auto, transformers.quantizers.base, transformers.integrations
import peft.tuners.lora, peft.utils.save_and_load
try:
    import triton.language
except ImportError:
    pass
"""

# What the libraries are before and after: every attribute of their modules and classes, registries, settings.
SNAPSHOT = """
import logging, os, signal, types, warnings
import transformers.models.gemma2.modeling_gemma2, transformers.models.qwen3.modeling_qwen3
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models import gemma2, llama, qwen3

def owners():
    for module in (
        torch, torch.nn, torch.nn.functional, torch.Tensor, torch.nn.Module, torch.nn.Linear, torch.optim,
        torch.autograd, torch.utils.checkpoint, transformers, transformers.modeling_utils,
        transformers.trainer, llama.modeling_llama, gemma2.modeling_gemma2, qwen3.modeling_qwen3,
        PreTrainedModel, Trainer, LlamaForCausalLM, transformers.quantizers.base,
        transformers.quantizers.base.HfQuantizer, peft, peft.PeftModel, peft.tuners.lora,
        peft.tuners.lora.LoraModel, peft.tuners.lora.LoraLayer, peft.LoraConfig,
    ):
        yield module
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__.startswith(("transformers.models.", "peft.")):
                yield value

def attributes():
    return {id(o): (str(o), {k: id(v) for k, v in vars(o).items()}) for o in owners()}

def registries():
    auto = transformers.quantizers.auto
    found = {"quantizers": auto.AUTO_QUANTIZER_MAPPING, "configs": auto.AUTO_QUANTIZATION_CONFIG_MAPPING}
    found["attention"] = dict(ALL_ATTENTION_FUNCTIONS.items())
    for module in (peft.mapping, peft.peft_model, peft.utils.constants):
        found |= {k: v for k, v in vars(module).items() if k.isupper() and isinstance(v, dict)}
    return {k: {str(a): id(b) for a, b in v.items()} for k, v in found.items()}

def settings():
    return {
        "environ": dict(os.environ), "filters": [str(f) for f in warnings.filters], "cwd": os.getcwd(),
        "root": (logging.root.level, len(logging.root.handlers)), "path": list(sys.path),
        "dtype": str(torch.get_default_dtype()), "threads": torch.get_num_threads(),
        "precision": torch.get_float32_matmul_precision(), "seed": torch.random.initial_seed(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "signals": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)],
        "hooks": [id(sys.excepthook), id(sys.stdout), id(sys.stderr)],
        "verbosity": transformers.logging.get_verbosity(),
    }

def log_levels():
    named = logging.root.manager.loggerDict
    return {name: log.level for name, log in named.items() if isinstance(log, logging.Logger)}

kept = list(owners())  # alive, so that no id is used twice

def state():
    return attributes(), registries(), settings(), log_levels()

def changes(before, after):
    for key, (name, old) in before[0].items():
        new = after[0][key][1]
        yield from (f"{name}.{k}" for k in old if new.get(k) != old[k])
        owner = next(o for o in kept if id(o) == key)
        if not isinstance(owner, types.ModuleType):  # a module may gain submodules and lazy names
            yield from (f"{name}.{k} is new" for k in new.keys() - old.keys())
    for i in (1, 2):
        yield from (f"{k}: {before[i][k]} -> {after[i][k]}" for k in before[i] if before[i][k] != after[i][k])
    yield from (f"log level of {k}" for k in before[3] if before[3][k] != after[3][k])
"""

IMPORT_ALL = """
import importlib, pkgutil, fewbits, fewjobs
packages = (fewbits, fewjobs)
ours = {p.__name__ for p in packages}
names = [m.name for p in packages for m in pkgutil.walk_packages(p.__path__, f"{p.__name__}.")]
names = [name for name in names if not name.endswith("__main__")]
loaded, before = set(sys.modules), state()
start = time.process_time()
for name in names:
    importlib.import_module(name)
out["seconds"] = time.process_time() - start
out["changed"] = list(changes(before, state()))
heavy = ("datasets", "trl", "matplotlib", "bitsandbytes", "torchao", "pandas", "torch._dynamo")
out["heavy"] = [m for m in heavy if m in sys.modules and m not in loaded]
out["foreign"] = sorted(m for m in set(sys.modules) - loaded if m.partition(".")[0] not in ours)
out["names"], out["watched"] = names, sum(len(attributes) for _, attributes in before[0].values())
"""

# The watch is not blind.
PLANT_CHANGES = """
before = state()
torch.nn.functional.cross_entropy = lambda: None
LlamaForCausalLM.planted = lambda: None
transformers.quantizers.auto.AUTO_QUANTIZER_MAPPING["planted"] = None
warnings.simplefilter("ignore")
out["seen"] = list(changes(before, state()))
"""


def in_a_new_process(code: str, environment: dict[str, str] | None = None) -> dict:
    """Run ``code``, which fills the dictionary ``out``."""
    program = "import json, sys, time\nout = {}\n" + textwrap.dedent(code) + "\nprint(json.dumps(out))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_import_fewbits_is_light() -> None:
    code = """
    before, start = set(sys.modules), time.process_time()
    import fewbits
    out["seconds"] = time.process_time() - start
    dir(fewbits), fewbits.__version__
    out["loaded"] = [m for m in ("torch", "transformers", "peft", "numpy", "rich") if m in sys.modules]
    out["new"] = len(set(sys.modules) - before)
    """
    out = in_a_new_process(code)
    assert out["loaded"] == []
    assert out["new"] < 100  # of which fewbits' own are few
    assert out["seconds"] < 0.5


@pytest.fixture(scope="module")
def floors() -> dict:
    """torch, then what needs it alone, then the public names; all compiled by an import before."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    in_a_new_process(_FLOORS, environment)
    return in_a_new_process(_FLOORS, environment)


_FLOORS = """
    start = time.process_time()
    import torch
    out["torch"] = time.process_time() - start

    start = time.process_time()
    import fewbits.formats, fewbits.recipes, fewbits.device
    import fewbits.kernels.decoder.rmsnorm, fewbits.kernels.product.matmul_packed
    out["lower"] = time.process_time() - start
    heavy = ("transformers", "peft", "bitsandbytes", "torchao", "rich", "torch._dynamo")
    out["loaded by lower"] = [m for m in heavy if m in sys.modules]

    import fewbits
    names = [name for name in fewbits.__all__ if name not in ("FewbitsConfig", "register")]
    found = [getattr(fewbits, name) for name in names]
    out["public"] = time.process_time() - start
    out["names"] = names
    heavy = ("transformers", "peft", "datasets", "trl", "torch._dynamo")
    out["loaded by public"] = [m for m in heavy if m in sys.modules]
"""


def test_the_lower_floors_need_torch_alone(floors: dict) -> None:
    assert floors["loaded by lower"] == []
    assert floors["lower"] < 0.6 * floors["torch"]


def test_the_public_names_add_little_to_torch(floors: dict) -> None:
    """transformers and peft come when something is called; only FewbitsConfig derives from one of theirs."""
    assert "FastLanguageModel" in floors["names"] and floors["loaded by public"] == []
    assert (
        floors["public"] < floors["torch"]
    )  # 0.7 of it on an idle machine; most of it: Triton's own import, and kernels' source


@pytest.fixture(scope="module")
def everything() -> dict:
    """All of fewbits imported, once what it stands on is there."""
    timed = f"start = time.process_time()\n{STAND_ON}\nout['stands on'] = time.process_time() - start\n"
    return in_a_new_process(timed + SNAPSHOT + IMPORT_ALL + PLANT_CHANGES)


def test_importing_everything_adds_little(everything: dict) -> None:
    assert len(everything["names"]) > 40
    assert everything["heavy"] == []
    assert len(everything["foreign"]) < 20, everything["foreign"]
    assert everything["seconds"] < 0.5 * everything["stands on"]  # a fifth, where all of it is compiled first


def test_importing_everything_changes_nothing_elsewhere(everything: dict) -> None:
    assert everything["watched"] > 5000
    assert everything["changed"] == []


def test_the_watch_sees_planted_changes(everything: dict) -> None:
    seen = " ".join(everything["seen"])
    assert len(everything["seen"]) >= 4
    assert all(word in seen for word in ("cross_entropy", "planted is new", "quantizers", "filters"))
