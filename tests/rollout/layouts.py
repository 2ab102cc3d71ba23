"""The two-rank layouts that an export is tested in: name, family, checkpoint's arguments, layout, expert tensor parallel size."""

from megatron_sr.megatron.model import Layout

CASES = [
    ("dense-dp2", "qwen3", {}, Layout(), None),
    ("dense-tp2", "qwen3", {}, Layout(tensor=2), None),
    ("dense-pp2", "qwen3", {}, Layout(pipeline=2), None),
    ("tied-tp2", "qwen3", {"tied": True}, Layout(tensor=2), None),
    ("tied-pp2", "qwen3", {"tied": True}, Layout(pipeline=2), None),
    ("bias-tp2", "qwen2", {"hidden": 128}, Layout(tensor=2), None),
    ("moe-ep2", "qwen3_moe", {}, Layout(expert=2), None),
    ("moe-tp2", "qwen3_moe", {}, Layout(tensor=2), None),
    ("moe-pp2", "qwen3_moe", {}, Layout(pipeline=2), None),
    ("moe-tp2-ep2-etp1", "qwen3_moe", {}, Layout(tensor=2, expert=2), 1),
]

# The layouts of two ranks that feed engines of one and of two workers.
PARITY = {
    "dense": ("dense-dp2", "dense-tp2", "dense-pp2"),
    "moe": ("moe-ep2", "moe-tp2", "moe-pp2", "moe-tp2-ep2-etp1"),
}
