"""Checks of the CUDA side: driver, toolkit, what it was built for, cuDNN, NCCL, host compiler."""

from __future__ import annotations

import re
from pathlib import Path

from fewbits.doctor.host import Host
from fewjobs.finding import Finding, Status

# (release, architecture, what happens, source): reports of toolkits that misbehave.
KNOWN_BAD_TOOLKITS = (
    (
        (12, 8),
        "aarch64",
        "cudafe++, its front end, was seen growing by 14 GB a minute to 140 GB per process on Transformer "
        "Engine 2.3; fewer jobs do not help",
        "TransformerEngine issue 1996",
    ),
)


def driver(host: Host) -> Finding:
    """The GPU driver."""
    smi, loaded = host.smi, host.read("/proc/driver/nvidia/version")
    if host.gpus:
        gpu, count = host.gpus[0], len(host.gpus)
        name = gpu.name if count == 1 else f"{count} GPUs, the first {gpu.name}"
        return Finding("GPU driver", "ok", f"{gpu.driver}, {name}")
    if smi is None and not loaded:
        return Finding(
            "GPU driver",
            "note",
            "no NVIDIA driver or GPU here",
            "Everything runs on the CPU, slowly.",
            "In a container, start it with its GPUs (docker run --gpus all); else install NVIDIA's driver.",
        )
    said = "does not answer" if smi is None or smi.timed_out else f"ends with code {smi.code}"
    return Finding(
        "GPU driver",
        "problem",
        f"nvidia-smi {said if smi is not None else 'is missing'}, and no GPU can be used",
        "The driver's library and its kernel module may differ, or the GPU has failed.",
        "Restart the machine, or install the driver again; in a container, try nvidia-smi outside it.",
    )


def toolkit(host: Host) -> Finding:
    """The CUDA toolkit against the torch that extensions are built for."""
    name = "CUDA toolkit"
    if host.toolkit is None:
        what = "no nvcc" if host.nvcc is None else f"{host.nvcc} does not say its version"
        return Finding(
            name,
            "note",
            what,
            "fewbits needs none; building other CUDA libraries from source does.",
            "Prefer wheels; else install the toolkit of torch's CUDA version and set CUDA_HOME.",
        )
    major, minor = host.toolkit
    what = f"{major}.{minor} ({host.nvcc})"
    built = str(host.torch.get("cuda") or "")
    if not built or built == f"{major}.{minor}":
        return Finding(name, "ok", what)
    if int(built.split(".")[0]) == major:
        return Finding(name, "note", f"{what}; torch was built with {built}", "Minor versions mix well.")
    return Finding(
        name,
        "warning",
        f"{what}, but torch was built with {built}",
        "torch refuses to build extensions with another major version.",
        f"Install the CUDA {built} toolkit and point CUDA_HOME at it, or a torch built with CUDA {major}.",
    )


def known_bad_toolkit(host: Host) -> Finding:
    """Toolkits with a known fault."""
    for release, machine, what, source in KNOWN_BAD_TOOLKITS:
        if host.toolkit == release and host.machine == machine:
            return Finding(
                "known toolkit faults",
                "warning",
                f"CUDA {release[0]}.{release[1]} on {machine}: {what}",
                f"A compiler that grows without end takes the whole machine with it ({source}).",
                "Look for a wheel (fewbits doctor PACKAGE), try another toolkit version, or contain it: "
                "ulimit -d 16000000 (KiB) in the building shell ends the runaway alone.",
            )
    return Finding("known toolkit faults", "ok", "none known")


def capability(host: Host) -> list[Finding]:
    """Whether torch, Triton and nvcc can make code for every GPU here."""
    if not host.gpus:
        return []
    supported = {
        "torch": (
            host.torch.get("architectures") or [],
            "Install a torch built for it (a newer one, as a rule).",
        ),
        "Triton": (_ptxas_targets(host), "Install a newer Triton, with the torch that belongs to it."),
        "nvcc": (_nvcc_targets(host), "Use a newer CUDA toolkit, or wheels."),
    }
    findings = []
    for gpu in sorted(set(host.gpus), key=lambda g: g.capability):
        dotted = "{}.{}".format(*gpu.capability)
        for tool, (targets, fix) in supported.items():
            if targets and not _runs(gpu.capability, targets):
                what = f"{gpu.name} has {dotted}; {tool} makes code for {', '.join(targets)}"
                why = f"{tool} cannot make kernels for this GPU."
                status: Status = "warning" if tool == "nvcc" else "problem"
                findings.append(Finding("compute capability", status, what, why, fix))
    if findings:
        return findings
    tools = [tool for tool, (targets, _) in supported.items() if targets]
    dotted = ", ".join(sorted({"{}.{}".format(*gpu.capability) for gpu in host.gpus}))
    return [Finding("compute capability", "ok", f"{dotted}; known to {', '.join(tools) or 'nobody asked'}")]


def _runs(capability: tuple[int, int], targets: list[str]) -> bool:
    """Whether code for one of the targets runs: same major and no newer minor, or older PTX."""
    major, minor = capability
    for target in targets:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", target)
        if match is None:
            continue
        has = (int(match[2]), int(match[3]))
        if has == capability or (not match[4] and match[1] == "compute" and has <= capability):
            return True
        if match[1] == "sm" and match[4] != "a" and has[0] == major and has[1] <= minor:
            return True
    return False


def _nvcc_targets(host: Host) -> list[str]:
    done = host.run(host.nvcc, "--list-gpu-code") if host.nvcc else None
    return [] if done is None or done.code else re.findall(r"sm_\d+[af]?\b", done.out)


def _ptxas_targets(host: Host) -> list[str]:
    """What the assemblers inside Triton know."""
    targets: set[str] = set()
    for folder in host.packages:
        for path in Path(folder).glob("triton/backends/nvidia/bin/ptxas*"):
            done = host.run(str(path), "--help")
            targets |= set(re.findall(r"\bsm_\d+[af]?\b", done.out)) if done is not None else set()
    return sorted(targets, key=lambda target: (len(target.rstrip("af")), target))


def cudnn(host: Host) -> Finding:
    """cuDNN's headers, which Transformer Engine and others compile against."""
    text = host.header("cudnn_version.h")
    numbers = [re.search(rf"#define CUDNN_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCHLEVEL")]
    if all(numbers):
        return Finding("cuDNN headers", "ok", ".".join(m[1] for m in numbers if m is not None))
    return Finding(
        "cuDNN headers",
        "note",
        "not found",
        "fewbits needs none; building Transformer Engine from source does.",
        "Install cuDNN's development package, or set CUDNN_PATH to the folder above its include.",
    )


def nccl(host: Host) -> Finding:
    """NCCL, for several GPUs."""
    text = host.header("nccl.h")
    numbers = [re.search(rf"#define NCCL_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    headers = f"headers {'.'.join(m[1] for m in numbers if m is not None)}" if all(numbers) else ""
    inside = f"torch's {host.torch['nccl']}" if host.torch.get("nccl") else ""
    if inside or headers:
        return Finding("NCCL", "ok", ", ".join(part for part in (inside, headers) if part))
    return Finding(
        "NCCL",
        "warning" if len(host.gpus) > 1 else "note",
        "not found",
        "Training on several GPUs goes through it.",
        "It comes with a torch built for CUDA: install one." if len(host.gpus) > 1 else "",
    )


def host_compiler(host: Host) -> Finding:
    """The C++ compiler, against the newest that nvcc accepts."""
    name = "host compiler"
    words = (host.environ.get("NVCC_CCBIN") or host.environ.get("CXX") or "g++").split()
    compiler = words[1] if len(words) > 1 and Path(words[0]).name in ("ccache", "sccache") else words[0]
    done = host.run(compiler, "-dumpfullversion", "-dumpversion")
    if done is None or done.code:
        return Finding(
            name,
            "problem" if host.gpus else "warning",
            f"{compiler} cannot be run",
            "Triton compiles a small C program for each kernel, and every source build needs a compiler.",
            "Install gcc and g++, or name yours in CC and CXX.",
        )
    version = done.out.strip()
    first = (host.run(compiler, "--version") or done).out
    label, macro = ("clang", "__clang_major__") if "clang" in first else ("gcc", "__GNUC__")
    what = f"{label} {version}"
    # nvcc's own header refuses what is newer; it is the one place that is true of this very toolkit.
    text = host.header("crt/host_config.h")
    match = re.search(r"^#if\s+__GNUC__ > (\d+)", text, re.MULTILINE) if macro == "__GNUC__" else None
    if match is None:
        return Finding(name, "ok", what)
    newest = int(match[1])
    major = int((re.match(r"\d+", version) or ["0"])[0])
    if major <= newest:
        return Finding(name, "ok", f"{what}; nvcc accepts up to {newest}")
    return Finding(
        name,
        "warning",
        f"{what}, but this nvcc accepts gcc up to {newest}",
        "CUDA sources do not compile with it.",
        f"Install gcc-{newest} and set CC=gcc-{newest} CXX=g++-{newest} NVCC_CCBIN=g++-{newest}.",
    )
