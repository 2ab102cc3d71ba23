"""The CPU host's guards, and its FusedAdam against torch's AdamW. That real Megatron runs on it, tests/distributed shows."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megatron_sr.megatron import host, launch
from megatron_sr.megatron.fused_adam import FusedAdam
from tests.launch import ROOT


def test_install_does_nothing_with_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(host, "_installed", False)
    before = (torch.cuda.current_device, torch.zeros, torch.Tensor.to, torch.distributed.barrier)
    host.install()
    host.install_training()
    assert (torch.cuda.current_device, torch.zeros, torch.Tensor.to, torch.distributed.barrier) == before


def test_install_after_megatron_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(host, "_installed", False)
    monkeypatch.setitem(sys.modules, "megatron.core", sys)
    with pytest.raises(RuntimeError, match=r"call install\(\) first"):
        host.install()


def test_device_contexts_still_work_on_the_host():
    """`with torch.device("meta")` lost its effect when it first met the host's wrappers: from_pretrained gave garbage."""
    code = """
from megatron_sr.megatron import host_cuda
host_cuda.install()
import torch
with torch.device("meta"):
    assert torch.zeros(2).device.type == torch.arange(3).device.type == torch.empty_like(torch.ones(1)).device.type == "meta"
assert torch.zeros(2, device="cuda").device.type == torch.ones(1).to("cuda:0").device.type == "cpu"
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_missing_script_is_named():
    with pytest.raises(FileNotFoundError, match="no_such_script.py does not exist"):
        launch.run_script("no_such_script.py", [])


def adam_run(make, start: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
    parameter = torch.nn.Parameter(start.clone())
    optimizer = make([parameter])
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("decoupled", [True, False])
def test_fused_adam_is_adam(decoupled):
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(500, generator=generator), torch.randn(5, 500, generator=generator)
    options = dict(lr=1e-2, weight_decay=0.1, betas=(0.9, 0.99), eps=1e-8)
    ours = adam_run(lambda p: FusedAdam(p, adam_w_mode=decoupled, **options), start, gradients)
    torchs = adam_run(lambda p: (torch.optim.AdamW if decoupled else torch.optim.Adam)(p, **options), start, gradients)
    torch.testing.assert_close(ours, torchs, rtol=0, atol=2e-6)  # weights about 1, five steps, FP32


def test_fused_adam_does_not_depend_on_where_a_shard_is_cut():
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(997, generator=generator), torch.randn(4, 997, generator=generator)

    def make(parameters):
        return FusedAdam(parameters, lr=1e-3, weight_decay=0.1)

    whole = adam_run(make, start, gradients)
    for cut in range(1, 70, 3):
        pieces = [adam_run(make, start[part], gradients[:, part]) for part in (slice(0, cut), slice(cut, None))]
        assert torch.equal(torch.cat(pieces), whole)


def test_fused_adam_counts_steps_per_group_and_not_for_empty_groups():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = FusedAdam([{"params": [parameter]}, {"params": []}])
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert [group.get("step") for group in optimizer.param_groups] == [1, None]
