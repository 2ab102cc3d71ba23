"""Issue 7, point 4: MasterWeights in transformers.Trainer through `optimizer_cls_and_kwargs`, without callback or subclass."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import megatron_sr as sr
from tests.tiny_models import hf_config

ROUNDING = sr.ParamRounding(seed=8)


def tiny_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(hf_config("qwen3", vocab=64, tied=True)).to(torch.bfloat16)


def rows(count: int = 32) -> list[dict]:
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(0, 60, (12,), generator=generator) for _ in range(count)]
    return [{"input_ids": t, "labels": t} for t in tokens]


def trainer(folder, model, rounding=ROUNDING, **arguments) -> Trainer:
    options = dict(
        output_dir=str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=6, weight_decay=0.1,
        lr_scheduler_type="linear", warmup_steps=2, save_steps=3, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    return Trainer(
        model=model,
        args=TrainingArguments(**options | arguments),
        train_dataset=rows(),
        optimizer_cls_and_kwargs=sr.trainer_optimizer(model, torch.optim.AdamW, rounding=rounding, lr=3e-3),
    )


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer")
    torch.set_num_threads(1)
    model = tiny_model()
    run = trainer(folder, model)
    run.train()
    return folder, run, model


def master_of(run: Trainer) -> sr.MasterWeights:
    return getattr(run.optimizer, "optimizer", run.optimizer)


def test_trainer_trains_with_rounded_weights(whole_run):
    _, run, model = whole_run
    opt = master_of(run)
    assert type(opt).__mro__[1] is sr.MasterWeights
    assert opt.steps == run.state.global_step == 6
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    rates = [entry["learning_rate"] for entry in run.state.log_history if "learning_rate" in entry]
    assert max(rates) == 3e-3  # the scheduler warms up to lr and decays it
    assert rates[0] < 3e-3
    assert [group["weight_decay"] for group in opt.param_groups] == [0.1, 0.0]
    for name, parameter in model.named_parameters():
        expected = sr.round_to_(torch.empty_like(parameter), opt.main_params()[parameter], noise=sr.Noise(8, 6, name))
        assert torch.equal(expected, parameter), name


def test_trainer_resume_from_checkpoint_continues_bit_for_bit(whole_run):
    folder, _, model = whole_run
    other = tiny_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    resumed = trainer(folder, other)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    assert master_of(resumed).steps == 6
    for (name, parameter), expected in zip(other.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, expected), name


def test_trainer_refuses_a_checkpoint_of_another_seed(whole_run):
    folder, _, _ = whole_run
    other = trainer(folder, tiny_model(), sr.ParamRounding(seed=9))
    with pytest.raises(ValueError, match="9 differs from the checkpoint's 8"):
        other.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
