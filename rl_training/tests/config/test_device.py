"""`device: cpu` is a declared resolution."""

import pytest

from wan_trainer.config import load_with_sources, resolve, resolve_device, settle_device
from wan_trainer.types import UserError

RECIPE = "configs/train_rl_5b_cps.yaml"


def test_cpu_replaces_gpu_kernels_and_says_so():
    loaded = load_with_sources(RECIPE, ["--device", "cpu", "--torch_compile_mode", "max-autotune"])
    config = loaded.config
    assert config.attention_backend == "native"
    assert config.use_liger_kernel is False
    assert config.torch_compile_backend == "aot_eager"
    assert config.torch_compile_mode is None
    assert config.param_dtype == "float32"
    changed = {key for key, source in loaded.sources.items() if source == "device: cpu"}
    assert changed == {
        "attention_backend",
        "use_liger_kernel",
        "torch_compile_backend",
        "torch_compile_mode",
        "param_dtype",
    }


def test_cpu_keeps_what_a_cpu_can_do(load):
    flags = ["--device", "cpu", "--param_dtype", "bfloat16", "--torch_compile_backend", "eager"]
    loaded = load(*flags, attention_backend="_native_math")
    assert loaded.config.param_dtype == "bfloat16"
    assert loaded.config.torch_compile_backend == "eager"
    assert loaded.config.attention_backend == "_native_math"
    assert "device: cpu" not in loaded.sources.values()


def test_a_cpu_has_no_device_memory_to_free(load):
    loaded = load("--device", "cpu", "--grpo_offload_inference_models")
    assert loaded.config.grpo_offload_inference_models is False
    assert loaded.sources["grpo_offload_inference_models"] == "device: cpu"
    kept = load("--device", "cuda", "--grpo_offload_inference_models").config
    assert resolve(kept, cuda_available=True).model.offload_inference_models


def test_auto_without_a_gpu_is_the_same_as_cpu():
    auto = load_with_sources(RECIPE, ["--device", "auto"]).config
    cpu = load_with_sources(RECIPE, ["--device", "cpu"]).config
    assert resolve_device(auto, cuda_available=False) == cpu
    assert resolve(auto, cuda_available=False) == resolve(cpu, cuda_available=False)
    assert resolve_device(auto, cuda_available=True).attention_backend == "_flash_3_hub"


def test_a_settled_device_marks_what_it_changed():
    auto = load_with_sources(RECIPE, ["--device", "auto"])
    settled = settle_device(auto, cuda_available=False)
    assert settled.config == resolve_device(auto.config, cuda_available=False)
    assert settled.sources["attention_backend"] == "device: cpu" and settled.sources["device"] == "cli"
    assert settle_device(auto, cuda_available=True).sources == auto.sources


def test_cuda_without_a_gpu_is_refused():
    config = load_with_sources(RECIPE, ["--device", "cuda"]).config
    with pytest.raises(UserError, match="use --device cpu"):
        resolve(config, cuda_available=False)


def test_an_unknown_family_is_refused_when_the_run_is_resolved(load):
    config = load(model_family="auto").config
    with pytest.raises(UserError, match="set model_family"):
        resolve(config, cuda_available=False)
    assert resolve(config, cuda_available=False, family="t2v-1.3b").model.family == "t2v-1.3b"
    with pytest.raises(UserError, match="496 is not a multiple of 32"):
        resolve(load(model_family="auto", width=496).config, cuda_available=False, family="ti2v-5b")
