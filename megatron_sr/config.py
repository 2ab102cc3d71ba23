"""What a user chooses about parameter rounding: `ParamRounding`, its validation and its command-line flags."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase

MODES = ("nearest", "stochastic")
FORMATS = ("bf16", "fp16", "e8m4", "e8m5", "e8m6", "e8m7", "e8m8", "e8m9", "e8m10", "mxfp8")
NOISES = ("step", "fixed")
ON_MISMATCH = ("error", "recompute")
SAVE_MODEL = ("full", "none")
MXFP8_COLUMNWISE = ("shared", "nearest")
MXFP8_SCALING = ("1d", "2d")
SEED_MAX = 2**64 - 1

FLAGS = {
    "mode": "--param-rounding",
    "seed": "--param-rounding-seed",
    "format": "--param-rounding-format",
    "noise": "--param-rounding-noise",
    "stream": "ParamRounding(stream=)",
    "include": "--param-rounding-include",
    "exclude": "--param-rounding-exclude",
    "log_interval": "--param-rounding-log-interval",
    "verify_interval": "--param-rounding-verify-interval",
    "on_mismatch": "--param-rounding-on-mismatch",
    "save_model": "--param-rounding-save-model",
    "mxfp8_columnwise": "--param-rounding-mxfp8-columnwise",
    "mxfp8_scaling": "--param-rounding-mxfp8-scaling",
}
"""The flag of each field, as messages name it."""

BIT_FIELDS = ("mode", "seed", "format", "noise", "stream", "include", "exclude", "mxfp8_columnwise", "mxfp8_scaling")
"""The fields that decide the bits of the model params: a resumed run must agree in all of them."""

# torch is not imported here: parsing flags should not cost seconds. By the name of the dtype of a model param:
_DEFAULT_FORMAT = {"bfloat16": "bf16", "float16": "fp16"}
_STORABLE = {
    "bfloat16": ("bf16", "e8m4", "e8m5", "e8m6", "e8m7", "mxfp8"),
    "float16": ("fp16",),
    "float32": ("e8m4", "e8m5", "e8m6", "e8m7", "e8m8", "e8m9", "e8m10"),
}


@dataclass(frozen=True)
class ParamRounding:
    """How FP32 main params become model params after each optimizer step.

    mode    nearest: the framework's own cast, untouched. stochastic: one keyed draw per successful optimizer step.
    seed    0 .. 2**64 - 1. With the step and a tensor's key it determines every rounding decision.
    format  the number format of the model params; None: that of their dtype, see `for_dtype`. e8m4 .. e8m10 are simulated (BF16's
            exponent, fewer or more mantissa bits), mxfp8 is BF16 (stream 0) and then E4M3 with block scales (stream 1).
    noise   step: a new draw each step (the paper's scheme). fixed: the same threshold per element at every step
            (sparse weight deltas; not the paper's scheme).
    stream  0 is the forward weights; other streams are independent noise for second roundings and studies.
    include, exclude  globs (as fnmatch, case-sensitive) on the names of whole tensors, in Megatron the keys of its distributed
            checkpoints, such as "decoder.layers.mlp.router.weight". A tensor is rounded stochastically if it matches an `include`
            (or there is none) and no `exclude`; the others to nearest. One glob or a sequence of them.
    log_interval      log the share of unchanged weights and the distance of main and model params every so many steps; 0: never.
    verify_interval   check every so many steps that all replicas of a tensor have the same bits and that these are the rounding
                      of the main params; 0: never.
    on_mismatch       error: a checkpoint whose model params are not the rounding of its main params is refused. recompute: its
                      model params are rounded again from its main params.
    save_model        none: checkpoints hold no model params; they are recomputed from main params on load.
    mxfp8_columnwise  shared: row- and column-wise MXFP8 copies use the same noise. nearest: column-wise copies round to nearest.
    mxfp8_scaling     1d: a scale for 32 neighbours. 2d: a scale for a tile of 32 x 32, which makes both copies equal.

    Raises ValueError for a value outside these ranges, naming the flag, the value and the way out.
    """

    mode: str = "stochastic"
    seed: int = 1234
    format: str | None = None
    noise: str = "step"
    stream: int = 0
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    log_interval: int = 0
    verify_interval: int = 0
    on_mismatch: str = "error"
    save_model: str = "full"
    mxfp8_columnwise: str = "shared"
    mxfp8_scaling: str = "1d"

    def __post_init__(self):
        _one_of("mode", self.mode, MODES)
        _in_range(FLAGS["seed"], self.seed, 0, SEED_MAX)
        if self.format is not None:
            _one_of("format", self.format, FORMATS)
        _one_of("noise", self.noise, NOISES)
        _in_range(FLAGS["stream"], self.stream, 0, 2**32 - 1)
        for field in ("include", "exclude"):  # a list from JSON, or one glob
            object.__setattr__(self, field, _globs(field, getattr(self, field)))
        _in_range(FLAGS["log_interval"], self.log_interval, 0, 2**31 - 1)
        _in_range(FLAGS["verify_interval"], self.verify_interval, 0, 2**31 - 1)
        _one_of("on_mismatch", self.on_mismatch, ON_MISMATCH)
        _one_of("save_model", self.save_model, SAVE_MODEL)
        _one_of("mxfp8_columnwise", self.mxfp8_columnwise, MXFP8_COLUMNWISE)
        _one_of("mxfp8_scaling", self.mxfp8_scaling, MXFP8_SCALING)
        if self.mode == "nearest" and self.save_model == "none":
            raise ValueError(
                f"{FLAGS['save_model']} none leaves model params to be recomputed by keyed rounding; it needs {FLAGS['mode']} "
                "stochastic (to round some tensors to nearest, add --param-rounding-exclude)"
            )

    def to_dict(self) -> dict:
        """Plain values, as `ParamRounding(**dict)` takes them back; also after a trip through JSON."""
        return asdict(self)

    def for_dtype(self, dtype) -> ParamRounding:
        """This configuration with its `format` settled for model params of `dtype` (a torch.dtype): bf16 or fp16 unless chosen.

        Raises ValueError when `dtype` cannot hold the format, naming the way out.
        """
        name = str(dtype).removeprefix("torch.")
        format = self.format or _DEFAULT_FORMAT.get(name)
        if name not in _STORABLE or format is None:
            raise ValueError(
                f"{FLAGS['mode']} {self.mode}: model params are {name}, which main params are not rounded to; "
                "train in BF16 (--bf16) or FP16 (--fp16)"
            )
        if format not in _STORABLE[name]:
            raise ValueError(
                f"{FLAGS['format']} {format} does not fit into {name} model params, which hold {', '.join(_STORABLE[name])}; "
                "choose one of these or another dtype (--bf16, --fp16)"
            )
        return replace(self, format=format)

    def rounds(self, name: str) -> bool:
        """Whether the whole tensor `name` is rounded stochastically, by `include` and `exclude`; False: to nearest."""
        included = not self.include or any(fnmatchcase(name, glob) for glob in self.include)
        return included and not any(fnmatchcase(name, glob) for glob in self.exclude)

    def unmatched(self, names) -> list[str]:
        """The globs of `include` and `exclude` that match none of `names`: most likely typing errors."""
        return [glob for glob in self.include + self.exclude if not any(fnmatchcase(name, glob) for name in names)]


def _one_of(field: str, value, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{FLAGS[field]}={value!r} is not known; choose one of: {', '.join(allowed)}")


def _in_range(flag: str, value, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{flag}={value!r} must be a whole number from {low} to {high}")
    if not low <= value <= high:
        raise ValueError(f"{flag}={value} is out of range; choose a whole number from {low} to {high}")


def _globs(field: str, value) -> tuple[str, ...]:
    globs = (value,) if isinstance(value, str) else tuple(value or ())
    for glob in globs:
        if not isinstance(glob, str) or not glob:
            raise ValueError(f"{FLAGS[field]}={glob!r} is not a glob; give a pattern of tensor names such as '*norm*'")
    return globs


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the `--param-rounding*` flags, as every command of this project and Megatron's parser take them.

    Values are checked by `from_flags`, whose messages say more than argparse's own.
    """
    group = parser.add_argument_group("parameter rounding")

    def add(field: str, help: str, metavar: str, **options) -> None:
        group.add_argument(FLAGS[field], metavar=metavar, help=help, **options)

    add(
        "mode",
        "how FP32 main params become model params after each optimizer step (default: nearest)",
        _choices(MODES),
        default="nearest",
    )
    add("seed", "seed of the rounding noise, 0 to 2**64-1 (default: the value of --seed)", "N", type=int)
    add("format", "number format of the model params (default: that of their dtype)", _choices(FORMATS))
    add(
        "noise",
        "step: a new draw at each step. fixed: the same threshold per element at every step (default: step)",
        _choices(NOISES),
        default="step",
    )
    add(
        "include",
        "round only tensors whose name matches a glob stochastically, the others to nearest",
        "GLOB",
        nargs="+",
    )
    add(
        "exclude",
        "round tensors whose name matches a glob to nearest, for example '*norm*' '*router*'",
        "GLOB",
        nargs="+",
    )
    add(
        "log_interval",
        "log unchanged weights and the distance of main and model params every N steps (default: 0, never)",
        "N",
        type=int,
        default=0,
    )
    add(
        "verify_interval",
        "every N steps check that replicas agree and that model params are the rounding of main params "
        "(default: 0, never)",
        "N",
        type=int,
        default=0,
    )
    add(
        "on_mismatch",
        "a checkpoint whose model params are not the rounding of its main params: stop, or round them again "
        "(default: error)",
        _choices(ON_MISMATCH),
        default="error",
    )
    add(
        "save_model",
        "none: checkpoints hold no model params, which are recomputed on load (default: full)",
        _choices(SAVE_MODEL),
        default="full",
    )
    add("mxfp8_columnwise", "noise of column-wise MXFP8 copies: that of the row-wise ones, or none (default: shared)",
        _choices(MXFP8_COLUMNWISE), default="shared")  # fmt: skip
    add("mxfp8_scaling", "MXFP8 scales: one for 32 elements, or one for a tile of 32 x 32 (default: 1d)",
        _choices(MXFP8_SCALING), default="1d")  # fmt: skip


def _choices(values: tuple[str, ...]) -> str:
    return "{" + ",".join(values) + "}"


def from_flags(args: argparse.Namespace) -> ParamRounding:
    """ParamRounding from parsed flags. Raises ValueError as ParamRounding does."""
    chosen = {"mode": args.param_rounding}
    for field, flag in FLAGS.items():
        value = getattr(args, flag.removeprefix("--").replace("-", "_"), None)  # a YAML file may leave out a flag
        if field != "mode" and value is not None:
            chosen[field] = value
    if "seed" not in chosen:
        chosen["seed"] = args.seed
        _in_range("--seed", args.seed, 0, SEED_MAX)  # named as what the user gave
    return ParamRounding(**chosen)
