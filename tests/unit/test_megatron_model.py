"""A model whose function Megatron would not compute is refused (C6): equal bits in another model would not show."""

import json

import pytest
from transformers import AutoConfig

from megatron_sr.megatron.model import Layout, transformer_config
from tests.tiny_models import hf_config


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob=False"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers=.0."),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ("qwen3", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, "rope_type='linear'"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}, "use_sliding_window=True"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_c6_fields_that_change_the_function_are_refused(family, change, message, tmp_path):
    fields = hf_config(family).to_dict()
    if "use_sliding_window" in change:
        del fields["layer_types"]  # derived from the window when the file is read
    (tmp_path / "config.json").write_text(json.dumps(fields | change))
    config = AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"config.json has {message}, .*two different models"):
        transformer_config(config, Layout())


def test_c6_other_families_and_layouts_that_do_not_divide_are_refused():
    config = hf_config("qwen3")
    with pytest.raises(ValueError, match="num_key_value_heads=2 of the model cannot be split into 4"):
        transformer_config(config, Layout(tensor=4))
    config.model_type = "llama"
    with pytest.raises(ValueError, match="model_type 'llama' is not one of qwen2, qwen3, qwen3_moe"):
        transformer_config(config, Layout())
