"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import signal
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.extras import SAID, absent_packages, skipped_where_an_extra_is_absent

ROOT = Path(__file__).resolve().parents[1]

# Files whose tests start processes by the dozen. Of each of their tests the first variant is slow, which CI
# runs, and the others are nightly; a test that has a mark of its own keeps it.
MANY_PROCESSES = {
    "cli/test_launch.py",
    "models/test_corrupt_folders.py",
    "training/test_damaged_runs.py",
    "training/test_fsdp.py",
    "training/test_gradient_communication.py",
    "training/test_resume.py",
    "training/test_several_ranks.py",
    "training/test_sharded_checkpoint.py",
    "training/test_sharded_loading.py",
    "training/test_tensor_parallel.py",
}
# Files whose tests have many variants (families, formats, dtypes), each of a part of a second: the
# first and the last, which differ most, stay; those between are slow.
MANY_VARIANTS = {
    "fewjobs/test_front_ends.py",
    "inference/test_decode.py",
    "models/test_adapters.py",
    "models/test_experts.py",
    "models/test_fused.py",
    "models/test_fused_autocast.py",
    "models/test_fused_guard.py",
    "models/test_fused_proof.py",
    "models/test_fused_qat.py",
    "models/test_generic.py",
    "models/test_hybrids.py",
    "models/test_kept_weights.py",
    "models/test_live_batch.py",
    "models/test_peft_alone.py",
    "models/test_speculation.py",
    "models/test_transformers_patterns.py",
    "nn/test_attention.py",
    "training/test_preferences.py",
}
# Files each of whose tests builds a kernel's source: the first variant stays, the last and the middle one are
# slow, the others are nightly.
MANY_BUILDS = {
    "kernels/test_batch_rows.py",
    "kernels/test_columns.py",
    "kernels/test_decode_attention.py",
    "kernels/test_few_rows.py",
    "kernels/test_gated_lora_cuda.py",
    "kernels/test_packed_attention.py",
    "kernels/test_stochastic_emulated.py",
    "kernels/test_stochastic_lookup.py",
    "kernels/test_stochastic_many.py",
    "kernels/test_stochastic_rows.py",
}
# As MANY_VARIANTS, where those between differ in values rather than in what runs: the one in the middle is
# slow, the others are nightly.
LIKE_VARIANTS = {
    "export/test_k_quants.py",
    "fewjobs/test_whole_files.py",
    "formats/test_bitsandbytes.py",
    "kernels/test_gradient_codec.py",
    "kernels/test_linear_cross_entropy.py",
    "kernels/test_lora_linear.py",
    "kernels/test_matmul_packed.py",
    "models/test_attention.py",
    "models/test_checkpointing_choice.py",
    "models/test_decode_generate.py",
    "models/test_device_map.py",
    "models/test_engine_folder.py",
    "models/test_float8_head.py",
    "models/test_fused_sequences.py",
    "models/test_gpu_fallbacks.py",
    "models/test_hf_quantizer.py",
    "models/test_merge.py",
    "models/test_not_finite.py",
    "models/test_predicted_memory.py",
    "models/test_record.py",
    "models/test_registered_specs.py",
    "models/test_stochastic_attention.py",
    "models/test_stochastic_recipe.py",
    "models/test_travel.py",
    "models/test_trl_head.py",
    "training/test_gpu_plan.py",
    "training/test_qat.py",
    "training/test_run.py",
}
# Files with few tests that take long: first, so that no process is left alone with one at the end.
LONG_AND_FEW = (
    "kernels/test_interpreter.py",
    "training/test_several_ranks.py",
    "test_import.py",
    "test_architecture.py",
    "test_examples.py",
    "kernels/test_launches.py",
    "fewjobs/test_runner.py",
    "training/test_run.py",
    "cli/test_models.py",
    "training/test_tensor_parallel.py",
    "cli/test_launch.py",
    "training/test_resume.py",
    "fewjobs/test_scenarios.py",
    "fewjobs/test_front_ends.py",
)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):  # xdist would begin with the files of most tests
        config.option.loadscopereorder = False


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports make objects by the million and little garbage: searching for it is a quarter of their time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    variants = defaultdict[str, list[pytest.Item]](list)
    places = {ROOT / "tests" / name: place for place, name in enumerate(LONG_AND_FEW)}
    processes = {ROOT / "tests" / name for name in MANY_PROCESSES}
    many = {ROOT / "tests" / name for name in MANY_VARIANTS}
    builds = {ROOT / "tests" / name for name in MANY_BUILDS}
    like = {ROOT / "tests" / name for name in LIKE_VARIANTS}
    for item in items:
        own = any(item.get_closest_marker(m) for m in ("slow", "nightly", "gpu", "multi"))
        if item.path in processes | many | builds | like and not own:
            variants[item.nodeid.partition("[")[0]].append(item)
    for same in variants.values():
        path, between = same[0].path, same[1:-1]
        middle = len(between) // 2
        if path in processes:
            slow, nightly = same[:1], same[1:]
        elif path in many:
            slow, nightly = between, []
        else:
            slow, nightly = between[middle : middle + 1], between[:middle] + between[middle + 1 :]
            slow += same[1:][-1:] if path in builds else []
        for item in slow:
            item.add_marker(pytest.mark.slow)
        for item in nightly:
            item.add_marker(pytest.mark.nightly)
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    return (yield from skipped_where_an_extra_is_absent(absent_packages()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    said = item.stash.setdefault(SAID, [])
    return (yield from skipped_where_an_extra_is_absent(absent_packages(), said))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real data and small real models beside the checkout; without it, tests skip."""
    path = ROOT.parent / "shared"
    if not path.is_dir():
        pytest.skip("needs ../shared")
    return path


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny products gain nothing from a second thread, and lose much on busy cores."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _signals_mean_what_they_do_at_a_terminal() -> Generator[None]:
    """``nohup`` and a script's ``&`` have SIGHUP and SIGINT ignored, which programs started here inherit.

    A handler is not inherited: programs get the system's own again, and this process still ignores them.
    """
    names = [name for name in ("SIGHUP", "SIGINT", "SIGQUIT") if hasattr(signal, name)]
    numbers = [getattr(signal, name) for name in names]
    ignored = [number for number in numbers if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda number, frame: None)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="module", autouse=True)
def _old_objects_are_not_searched(_one_thread: None) -> None:
    """What is there before a module's tests, above all millions of objects of imported libraries, stays.

    Every training run collects garbage when it ends or runs out of memory: half a second with them, and
    hundreds of times. What a module's own tests leave behind is found as ever.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)
