"""Checks of the Python side: torch, Triton, and packages that do not go together."""

from __future__ import annotations

import re
from collections import defaultdict

from fewbits.doctor.host import Host
from fewjobs.finding import Finding

# Distributions that install the same module over each other.
SAME_MODULE = {
    "torch": ("torch", "torch-nightly", "pytorch"),
    "triton": ("triton", "pytorch-triton", "triton-nightly", "pytorch-triton-rocm"),
}


def torch(host: Host) -> Finding:
    """Whether torch can be imported, and sees the GPU."""
    facts = host.torch
    again = "pip install --force-reinstall torch, for the CUDA version that your driver supports"
    if facts.get("absent"):
        return Finding("torch", "problem", "not installed", "fewbits computes with it.", "pip install torch")
    if "error" in facts:
        why = f"It fails with: {' '.join(str(facts['error']).split())[:300]}"
        return Finding("torch", "problem", "torch cannot be imported", why, f"Install it again: {again}.")
    what = f"{facts.get('version')}, CUDA {facts.get('cuda') or 'none'}"
    if not host.gpus:
        return Finding("torch", "ok", what)
    if not facts.get("cuda"):
        why, fix = "This build of torch runs on the CPU only.", f"Install one with CUDA: {again}."
        return Finding("torch", "problem", f"{what}, though there is a GPU", why, fix)
    if not facts.get("sees_gpu"):
        return Finding(
            "torch",
            "problem",
            f"{what}, and it sees no GPU though nvidia-smi does",
            f"The driver ({host.gpus[0].driver}) may be older than CUDA {facts['cuda']} needs, or "
            "CUDA_VISIBLE_DEVICES hides the GPUs.",
            "Update the driver, or install a torch built for an older CUDA; look at CUDA_VISIBLE_DEVICES.",
        )
    return Finding("torch", "ok", what)


def triton(host: Host) -> Finding:
    """Whether Triton is there, in the version that torch asks for."""
    version = next((v for name in SAME_MODULE["triton"] if (v := host.version_of(name))), None)
    if version is None:
        return Finding(
            "Triton",
            "problem" if host.gpus else "note",
            "not installed",
            "fewbits' GPU kernels are written in it; on a CPU the reference is used.",
            "pip install triton, in the version that your torch asks for" if host.gpus else "",
        )
    pinned = _pinned(host, "torch", "triton")
    if pinned and pinned != version.split("+")[0]:
        return Finding(
            "Triton",
            "warning",
            f"{version}, but torch asks for {pinned}",
            "torch.compile and Triton kernels are tested in that pair only.",
            f"pip install triton=={pinned}",
        )
    return Finding("Triton", "ok", version)


def _pinned(host: Host, package: str, requirement: str) -> str | None:
    """The exact version of ``requirement`` that an installed package asks for."""
    for name, _, requires, _ in host.distributions:
        for line in requires if name == package else ():
            match = re.match(rf"{requirement}\s*\(?\s*==\s*([\w.]+)", line)
            if match is not None:
                return match[1]
    return None


def conflicts(host: Host) -> list[Finding]:
    """Packages that cannot work together."""
    findings = [*_twice(host), *_over_each_other(host), *_beside_torch(host), *_bitsandbytes(host)]
    return findings or [Finding("packages", "ok", f"{len(host.distributions)} installed, no conflict known")]


def _twice(host: Host) -> list[Finding]:
    """One package in two versions, of which the first found wins."""
    versions: dict[str, list[str]] = defaultdict(list)
    for name, version, _, _ in host.distributions:
        if version not in versions[name]:
            versions[name].append(version)
    watched = {"torch", "triton", "transformers", "peft", "accelerate", "bitsandbytes", "numpy", "fewbits"}
    return [
        Finding(
            "packages",
            "warning",
            f"{name} is installed {len(installed)} times: {', '.join(installed)}",
            "Which one is imported depends on the order of folders.",
            f"pip uninstall {name} until it is gone (also outside the environment), then install it once.",
        )
        for name, installed in versions.items()
        if name in watched and len(installed) > 1
    ]


def _over_each_other(host: Host) -> list[Finding]:
    findings = []
    for module, names in SAME_MODULE.items():
        here = [name for name in names if host.version_of(name)]
        if len(here) > 1:
            what = f"{' and '.join(here)} are both installed"
            why = f"Both write the module {module}; files of the two are mixed."
            fix = f"pip uninstall {' '.join(here)}, then install {module} alone."
            findings.append(Finding("packages", "problem", what, why, fix))
    return findings


def _beside_torch(host: Host) -> list[Finding]:
    """torchvision and torchaudio, whose compiled parts fit one torch."""
    findings = []
    version = host.version_of("torch")
    for name in ("torchvision", "torchaudio"):
        pinned, here = _pinned(host, name, "torch"), host.version_of(name)
        if here and version and pinned and pinned != version.split("+")[0]:
            what = f"{name} {here} needs torch {pinned}, but torch {version} is installed"
            why = "Importing it fails, and transformers imports it."
            fix = f"pip install --upgrade {name} torch, or pip uninstall {name} if nothing needs it"
            findings.append(Finding("packages", "problem", what, why, fix))
    return findings


def _bitsandbytes(host: Host) -> list[Finding]:
    """bitsandbytes brings a library for each CUDA version; torch's must be among them."""
    cuda = str(host.torch.get("cuda") or "")
    folder = next((f for name, _, _, f in host.distributions if name == "bitsandbytes"), None)
    if not cuda or folder is None:
        return []
    needed = f"libbitsandbytes_cuda{''.join(cuda.split('.')[:2])}"
    libraries = sorted(path.stem for path in folder.glob("bitsandbytes/libbitsandbytes_cuda*"))
    if needed in libraries:
        return []
    return [
        Finding(
            "packages",
            "warning",
            f"bitsandbytes has no {needed}; it has {', '.join(libraries) or 'no CUDA library'}",
            f"Its GPU functions do not run with a torch built for CUDA {cuda}.",
            "pip install --upgrade bitsandbytes; fewbits' own formats do not need it.",
        )
    ]
