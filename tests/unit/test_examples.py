"""The launch scripts of examples/: their exact command lines through Megatron's own parser and checks, against public model configs.

Parser, `validate_args` and TransformerConfig are Megatron's own. No GPU is needed or used. Mocks answer where Megatron asks what is
not here: the GPU's compute capability (9.0; 10.0 with BLACKWELL=1), and Transformer Engine's version and fused functions.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import ROOT

EXAMPLES = ROOT / "examples"
SETTINGS = {
    "MEGATRON_LM": "/megatron-lm",
    "MODEL": "/model",
    "PRETRAINED": "/pretrained",
    "DATA": "/data.jsonl",
    "SAVE": "/save",
}
TRAIN = {  # script and settings, by name; the name's first part is the folder
    "deepseek_r1_1_5b": ("train.sh", {}),
    "deepseek_r1_14b": ("train.sh", {}),
    "qwen3_30b_a3b": ("train.sh", {}),
    "qwen3_30b_a3b mxfp8": ("train_mxfp8.sh", {}),
    "qwen3_30b_a3b mxfp8 blackwell": ("train_mxfp8.sh", {"BLACKWELL": "1"}),
    "qwen3_5_397b_a17b": ("train.sh", {}),
    "qwen3_5_397b_a17b mtp": ("train.sh", {"MTP": "1"}),
}
RANKS = {"deepseek_r1_1_5b": 8, "deepseek_r1_14b": 16, "qwen3_30b_a3b": 64, "qwen3_5_397b_a17b": 256}
SCRIPTS = sorted(str(path.relative_to(EXAMPLES)) for folder in RANKS for path in (EXAMPLES / folder).glob("*.sh"))
SHARED = ("launch.sh", "sft.sh", "rl.sh", "slurm.sh")


def command_line(script: str, **settings) -> list[str]:
    """What the script would run: its words, as DRY_RUN=1 prints them."""
    environment = {"PATH": os.environ["PATH"], **SETTINGS, "DRY_RUN": "1", **settings}
    done = subprocess.run(["bash", EXAMPLES / script], env=environment, capture_output=True, text=True, check=True)
    return shlex.split(done.stdout)


def split(words: list[str]) -> tuple[dict, list[str]]:
    """The ranks and environment that torchrun starts, and the words after `-m`."""
    start = words.index("-m")
    torchrun = words[words.index("torchrun") : start]
    options = dict(zip(torchrun[1::2], torchrun[2::2]))
    ranks = int(options["--nnodes"]) * int(options["--nproc-per-node"])
    return {"ranks": ranks, "env": dict(word.split("=", 1) for word in words[1 : words.index("torchrun")])}, words[
        start + 1 :
    ]


@pytest.fixture(scope="module")
def parsed(tmp_path_factory) -> dict:
    """Megatron's validated arguments of every training script, parsed in one process that knows the CPU host and the plugin."""
    folder = tmp_path_factory.mktemp("examples")
    jobs = {}
    for name, (script, settings) in TRAIN.items():
        start, words = split(command_line(f"{name.split()[0]}/{script}", **settings))
        assert words[:3] == ["megatron_sr", "run", "/megatron-lm/pretrain_gpt.py"]
        jobs[name] = {**start, "arguments": words[3:], "capability": [10, 0] if "blackwell" in name else [9, 0]}
    (folder / "jobs.json").write_text(json.dumps(jobs))
    program = [sys.executable, "-m", "tests.unit.examples_parser", folder / "jobs.json", folder / "parsed.json"]
    subprocess.run(program, cwd=ROOT, check=True)
    return json.loads((folder / "parsed.json").read_text())


def config(name: str) -> dict:
    return json.loads((ROOT / f"tests/data/model_configs/{name.split()[0]}.json").read_text())


def test_every_script_is_checked():
    assert {f"{name.split()[0]}/{script}" for name, (script, _) in TRAIN.items()} | {
        "deepseek_r1_1_5b/rl.sh",
        "deepseek_r1_14b/rl.sh",
    } == set(SCRIPTS)


@pytest.mark.parametrize("name", TRAIN)
def test_megatrons_parser_and_checks_accept_the_command_line(parsed, name):
    assert "refused" not in parsed[name], parsed[name]["refused"]
    assert parsed[name]["args"]["world_size"] == RANKS[name.split()[0]]
    assert parsed[name]["args"]["param_rounding"] == "stochastic"
    assert parsed[name]["args"]["param_rounding_log_interval"] == (0 if "mxfp8" in name else 50)  # refused with mxfp8


def test_the_check_would_notice(parsed):
    """Refused: an unknown flag, a layout that does not fit the ranks, what stochastic rounding refuses, flags that do not go together."""
    refused = parsed["must be refused"]
    assert "unrecognized arguments: --num-expert" in refused["--num-expert 7"]
    assert "is not divisible" in refused["--tensor-model-parallel-size 48"]
    assert "--qk-clip on" in refused["--qk-clip"]
    assert (
        "moe_act in recompute_modules is only supported with moe_grouped_gemm" in refused["--recompute-modules moe_act"]
    )


@pytest.mark.parametrize("name", TRAIN)
def test_model_arguments_equal_the_public_config(parsed, name):
    args, hf = parsed[name]["args"], config(name)
    rope = hf.get("rope_parameters", {})
    expected = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf["num_key_value_heads"],
        "group_query_attention": hf["num_key_value_heads"] < hf["num_attention_heads"],
        "kv_channels": hf.get("head_dim", hf["hidden_size"] // hf["num_attention_heads"]),
        "max_position_embeddings": hf["max_position_embeddings"],
        "position_embedding_type": "rope",
        "rotary_base": rope.get("rope_theta", hf.get("rope_theta")),
        "rotary_percent": rope.get("partial_rotary_factor", 1.0),
        "layernorm_epsilon": hf["rms_norm_eps"],
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": hf["model_type"].startswith("qwen3_5"),
        "swiglu": hf["hidden_act"] == "silu",
        "add_bias_linear": False,
        "add_qkv_bias": hf["model_type"] == "qwen2",
        "qk_layernorm": hf["model_type"] != "qwen2",
        "attention_output_gate": hf.get("attn_output_gate", False),
        "untie_embeddings_and_output_weights": not hf["tie_word_embeddings"],
        "attention_dropout": hf["attention_dropout"],
        "padded_vocab_size": hf["vocab_size"],
        "num_experts": hf.get("num_experts"),
        "mtp_num_layers": hf["mtp_num_hidden_layers"] if name.endswith("mtp") else None,
    }
    if "intermediate_size" in hf:
        expected["ffn_hidden_size"] = hf["intermediate_size"]
    if hf.get("num_experts"):
        assert hf["mlp_only_layers"] == []
        expected |= {
            "moe_router_topk": hf["num_experts_per_tok"],
            "moe_ffn_hidden_size": hf["moe_intermediate_size"],
            "moe_layer_freq": hf.get("decoder_sparse_step", 1),
            "moe_shared_expert_intermediate_size": hf.get("shared_expert_intermediate_size"),
            "moe_shared_expert_gate": "shared_expert_intermediate_size" in hf,
            "moe_aux_loss_coeff": [hf["router_aux_loss_coef"]],
            "moe_router_pre_softmax": not hf.get("norm_topk_prob", True),  # softmax over the chosen experts alone
        }
    if "linear_num_key_heads" in hf:
        expected |= {field: hf[field] for field in hf if field.startswith("linear_")}
        expected |= {
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": hf["full_attention_interval"],
        }
    assert {field: _scalar(args.get(field), field, expected) for field in expected} == expected


def _scalar(value, field: str, expected: dict):
    return [value] if isinstance(expected[field], list) and not isinstance(value, list) else value


@pytest.mark.parametrize("name", RANKS)
def test_the_model_has_as_many_parameters_as_its_name_says(name):
    hf = config(name)
    total = sum(parameters(hf).values())
    assert total == pytest.approx(hf["_parameters"], rel=1e-3)
    named = re.search(r"(\d+(?:\.\d+)?)B", hf["_source"]["model"])[1]
    assert total / 1e9 == pytest.approx(float(named), rel=0.2 if name == "deepseek_r1_1_5b" else 0.06)


def parameters(hf: dict) -> dict[str, int]:
    """Parameters of the whole model, experts apart; norms, biases and small vectors of the linear attention are left out."""
    hidden, layers, heads = hf["hidden_size"], hf["num_hidden_layers"], hf["num_attention_heads"]
    head = hf.get("head_dim", hidden // heads)
    queries = heads * head * (2 if hf.get("attn_output_gate") else 1)
    full = hidden * (queries + 2 * hf["num_key_value_heads"] * head) + heads * head * hidden
    linear_layers = layers - layers // hf["full_attention_interval"] if "full_attention_interval" in hf else 0
    attention = (layers - linear_layers) * full
    if linear_layers:
        keys = hf["linear_num_key_heads"] * hf["linear_key_head_dim"]
        values = hf["linear_num_value_heads"] * hf["linear_value_head_dim"]
        attention += linear_layers * hidden * (2 * keys + 3 * values + 2 * hf["linear_num_value_heads"])
    experts = hf.get("num_experts", 0) * layers * 3 * hidden * hf.get("moe_intermediate_size", 0)
    dense = hf.get("num_experts", 0) * hidden * layers + 3 * hidden * layers * (
        hf.get("shared_expert_intermediate_size", 0) if experts else hf["intermediate_size"]
    )
    return {"experts": experts, "layers": attention + dense, "embeddings": 2 * hf["vocab_size"] * hidden}


@pytest.mark.parametrize("name", RANKS)
def test_memory_in_the_scripts_is_what_arithmetic_gives(parsed, name):
    """BF16 params and FP32 gradients take 6 bytes, main params and moments 12 shared by the data-parallel ranks."""
    args, count, ranks = parsed[name]["args"], parameters(config(name)), RANKS[name]
    tensor, pipeline = args["tensor_model_parallel_size"], args["pipeline_model_parallel_size"]
    expert = args["expert_model_parallel_size"] * args["expert_tensor_parallel_size"]
    data = ranks // (tensor * pipeline)
    # the first of several stages holds one of the two embeddings
    local = (count["layers"] / pipeline + count["embeddings"] / min(2, pipeline)) / tensor
    local_experts = count["experts"] / (pipeline * expert)
    gigabytes = (local * (6 + 12 / data) + local_experts * (6 + 12 * pipeline * expert / ranks)) / 1e9
    said = int(re.search(r"By arithmetic (\d+) GB a GPU", (EXAMPLES / name / "train.sh").read_text())[1])
    assert said == pytest.approx(gigabytes, abs=1)


@pytest.mark.parametrize("script", [*SCRIPTS, "sft.sh", "rl.sh"])
def test_every_flag_is_explained(script):
    lines = (EXAMPLES / script).read_text().splitlines()
    flags = [line for line in lines if line.startswith("  --") or line.startswith("    --")]
    assert len(flags) >= (1 if script.endswith("/rl.sh") else 3)
    assert [line for line in flags if not re.search(r"  # \S", line)] == []
    assert [line for line in flags if len(re.findall(r"(?<!\S)--\w", line.split("  #")[0])) != 1] == []


@pytest.mark.parametrize(
    "script, settings", [("train.sh", "SAVE"), ("train.sh", "MEGATRON_LM"), ("train.sh", "PRETRAINED")]
)
def test_a_missing_setting_is_named(script, settings):
    environment = {"PATH": os.environ["PATH"], **SETTINGS, "DRY_RUN": "1"}
    del environment[settings]
    script = EXAMPLES / "qwen3_30b_a3b" / script
    done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True)
    assert (done.returncode, f"set {settings}: " in done.stderr) == (2, True)


def test_several_nodes_without_an_address_are_refused():
    environment = {"PATH": os.environ["PATH"], **SETTINGS}
    done = subprocess.run(
        ["bash", EXAMPLES / "qwen3_30b_a3b/train.sh"], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, "8 nodes need MASTER_ADDR" in done.stderr) == (2, True)


@pytest.mark.parametrize("name", ["deepseek_r1_1_5b", "deepseek_r1_14b"])
def test_the_rl_jobs_parser_and_checks_accept_the_command_line(name, tmp_path):
    from megatron_sr.rl import options

    for folder in ("model", "save"):
        (tmp_path / folder).mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(config(name)))
    settings = {"MODEL": str(tmp_path / "model"), "SAVE": str(tmp_path / "save")}
    start, words = split(command_line(f"{name}/rl.sh", **settings))
    assert words[0] == "megatron_sr.rl.train"
    assert start["ranks"] == RANKS[name]
    args = options.parser().parse_args(words[1:])
    options.check(args, start["ranks"])
    assert args.param_rounding == "stochastic"


@pytest.mark.parametrize("folder", RANKS)
def test_slurm_runs_the_script_on_every_node(folder, tmp_path):
    """With stand-ins of Slurm's commands: the batch script's nodes are the script's, and each node gets its rank."""
    batch = EXAMPLES / folder / "slurm.sbatch"
    nodes = int(re.search(r"^#SBATCH --nodes=(\d+)", batch.read_text(), re.MULTILINE)[1])
    assert nodes * 8 == RANKS[folder]
    for name, body in {"scontrol": "echo node0; echo node1", "srun": 'SLURM_NODEID=1 exec "${@:2}"'}.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **SETTINGS, "DRY_RUN": "1", "SLURM_NNODES": str(nodes)}
    environment |= {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_SUBMIT_DIR": str(EXAMPLES / folder)}
    words = shlex.split(
        subprocess.run(["bash", batch], env=environment, capture_output=True, text=True, check=True).stdout
    )
    start, command = split(words)
    assert start["ranks"] == RANKS[folder]
    assert words[words.index("--node-rank") + 1] == "1"
    assert words[words.index("--master-addr") + 1] == "node0"
    assert command[-2:] == ["--param-rounding-verify-interval", "500"]


@pytest.mark.parametrize("script", [*SCRIPTS, *SHARED, *(f"{folder}/slurm.sbatch" for folder in RANKS)])
def test_scripts_are_valid_bash(script):
    subprocess.run(["bash", "-n", EXAMPLES / script], check=True)


def test_each_folder_says_what_it_is():
    for folder in RANKS:
        text = (EXAMPLES / folder / "README.md").read_text()
        assert config(folder)["_source"]["model"].split()[0] in text
        assert "never run" in text.lower()
        linked = re.findall(r"\]\((?!http)([^)#]+)", text)
        assert linked
        assert [link for link in linked if not Path(EXAMPLES / folder / link).exists()] == []
