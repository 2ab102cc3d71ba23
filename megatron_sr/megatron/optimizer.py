"""Stochastic rounding in a Megatron-Core optimizer: `apply_param_rounding` and the `Controller` it returns.

At every cast site (see sites/) only the cast of FP32 main params to model params is replaced, by one launch over all shards of
an optimizer instance. The bits are a pure function of (main params, seed, step, tensor, element), so the copy may be repeated
at will.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from megatron_sr import checkpoint
from megatron_sr.config import FLAGS, ParamRounding
from megatron_sr.megatron import checkpoint_index, checkpoint_model, mxfp8, mxfp8_flags
from megatron_sr.megatron.identity import Identity, identify, model_chunks
from megatron_sr.megatron.metrics import Metrics
from megatron_sr.megatron.replicas import differing_replicas
from megatron_sr.megatron.sites import Site, make_sites, parts
from megatron_sr.megatron.support import check_supported, look_up


class Controller:
    """Parameter rounding of one Megatron optimizer, as `apply_param_rounding` has set it up.

    config      the ParamRounding, its format settled.
    step        draws so far, which is the number of successful optimizer steps (C7); 0 with nearest, which draws nothing.
    sites       the cast sites of this rank; none with nearest.
    identities  of this rank's whole model params; none with nearest.
    mxfp8       with format mxfp8, its codes and scales; else None.
    replaced    whether Megatron's own cast has been replaced; on a rank without parameters, elsewhere.
    """

    def __init__(self, config: ParamRounding, sites: list[Site], identities: dict[torch.nn.Parameter, Identity]):
        self.config, self.sites, self.identities = config, sites, identities
        self.mxfp8: mxfp8.MXFP8Weights | None = None
        self._on_metrics: list[Callable[[int, dict[str, float]], None]] = []
        self.replaced = bool(identities)
        self._metrics: Metrics | None = None
        self._checked = 0  # the last step that --param-rounding-verify-interval has checked
        self._elsewhere: int | None = None  # on a rank without parameters: the step of the others
        self._gathers_late = False

    @property
    def step(self) -> int:
        steps = sorted({site.step for site in self.sites})
        if len(steps) > 1:
            raise RuntimeError(
                f"chained optimizers have made {steps} steps; step the whole optimizer, not one of its parts"
            )
        return steps[0] if steps else self._elsewhere or 0

    def state_dict(self) -> dict:
        """The rounding state. It already rides in the optimizer's own state dict: needed only to look at it."""
        return checkpoint.rounding_state(self.config, self.step)

    def load_state_dict(self, state: dict) -> None:
        """Continue at the state's step. Raises ValueError when it was saved under another mode, seed, format or noise."""
        checkpoint.check_loadable(state, self.config)
        for site in self.sites:
            site.set_step(state["step"])

    def round_again(self) -> None:
        """Round main params to model params once more, without a new draw; the ranks' shards still have to be gathered."""
        for site in self.sites:
            site.round_()

    def mismatches(self) -> list[str]:
        """Names of the tensors of which this rank's share of the model params is not the rounding of its main params.

        With format mxfp8 collective, and params that were wrong are right afterwards.
        """
        if self.mxfp8 is not None:
            wrong = (
                mxfp8.recompute(self.mxfp8, site, functools.partial(checkpoint_model.gather_params, site.optimizer))
                for site in self.sites
            )
            return sorted({name for names in wrong for name in names})
        return sorted({name for site in self.sites for name in site.mismatches()})

    def verify(self) -> None:
        """Check that all replicas of every tensor hold the same bits, and that these are the rounding of the main params.

        Collective over all ranks; not between a step and an all-gather that overlaps with the next forward pass. Raises
        RuntimeError on every rank, naming tensors and ranks.
        """
        faults = [f"replicas differ: {text}" for text in differing_replicas(self.identities, _device(self.identities))]
        steps = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(steps, (self.step if self.sites else None, self.mismatches()))
        known = {step for step, _ in steps if step is not None}
        if len(known) > 1:
            faults.append(f"ranks have made different numbers of steps: {sorted(known)}")
        wrong: dict[str, list[int]] = {}
        for rank, (_, names) in enumerate(steps):
            for name in names:
                wrong.setdefault(name, []).append(rank)
        faults += [
            f"not the rounding of the main params: {name} on ranks {', '.join(map(str, ranks))}"
            for name, ranks in sorted(wrong.items())
        ]
        if faults:
            shown = "\n  ".join(faults[:20] + ([f"... and {len(faults) - 20} more"] if len(faults) > 20 else []))
            raise RuntimeError(
                f"model params are not what they should be after optimizer step {max(known, default=0)}:\n  {shown}\n"
                "something other than the optimizer has written to them, or memory or communication is faulty; go on from the "
                "last checkpoint"
            )

    def on_metrics(self, report: Callable[[int, dict[str, float]], None]) -> None:
        """Call `report(step, metrics)` on every rank after each step that --param-rounding-log-interval names; see metrics.py."""
        self._on_metrics.append(report)

    def _watch(self, optimizer) -> None:
        """Measure, check and call back around `optimizer.step`, which every rank calls whether it holds parameters or not."""
        original = optimizer.step

        @functools.wraps(original)
        def step(*args, **kwargs):
            self._agree_on_step()
            self._verify_if_due(late=True)
            measuring = self._due(self.config.log_interval, self.step + 1)
            if measuring:
                self._metrics = self._metrics or Metrics(self.sites, _device(self.identities))
                self._metrics.start()
            result = original(*args, **kwargs)
            successful = bool(result[0])
            metrics = self._metrics.finish(successful) if measuring else None
            if metrics is not None:
                for report in self._on_metrics:
                    report(self.step, metrics)
            if successful:
                if not self.sites:
                    self._elsewhere += 1
                self._verify_if_due(late=False)
            return result

        optimizer.step = step

    def _agree_on_step(self) -> None:
        """Once: a rank that holds no parameters (a frozen pipeline stage) learns the step, so that it logs and checks with the others."""
        if self._elsewhere is None:
            step = torch.tensor(self.step, device=_device(self.identities))
            torch.distributed.all_reduce(step, op=torch.distributed.ReduceOp.MAX)
            self._elsewhere = int(step)

    def _verify_if_due(self, late: bool) -> None:
        """With an overlapped all-gather, params are complete only when the next step begins: they are checked then."""
        if (
            late == self._gathers_late
            and self.step != self._checked
            and self._due(self.config.verify_interval, self.step)
        ):
            self._checked = self.step
            self.verify()

    @staticmethod
    def _due(interval: int, step: int) -> bool:
        return interval > 0 and step > 0 and step % interval == 0


def apply_param_rounding(optimizer, model, config: ParamRounding) -> Controller:
    """Make `optimizer` round main params to model params as `config` says. Once, before the first step and before loading.

    optimizer  what `get_megatron_optimizer` returned.
    model      the model chunk it optimizes, or the list of chunks; in DDP or bare.

    nearest (in the model's own format) leaves the step as it is, no attribute replaced (C4); it only says so when a checkpoint was
    saved under stochastic. Raises ValueError for what is not supported (C6), for an include or exclude glob that matches no
    tensor, and, naming it, for a parameter without a layout-independent identity. Collective over all ranks.
    """
    checkpoint_model.explain_absence()
    if _is_megatrons_own(config, optimizer, model):
        for number, part in enumerate(parts(optimizer)):
            if isinstance(getattr(part, "optimizer", None), torch.optim.Optimizer):
                checkpoint.on_load(part.optimizer, config, loaded=lambda state: None, announce=number == 0)
        return Controller(config, [], {})
    for part in parts(optimizer):
        check_supported(*_configs(part, model), format=config.format)
    config = config.for_dtype(_dtype(optimizer))
    if config.format == "mxfp8" and config.log_interval:
        raise ValueError(
            f"{FLAGS['log_interval']} {config.log_interval} does not work with {FLAGS['format']} mxfp8, whose model params are "
            "quantized after they have been counted; leave it out"
        )
    identities = identify(model)
    _check_globs(config, identities)
    controller = Controller(config, make_sites(optimizer, identities, config), identities)
    settings = [configuration for part in parts(optimizer) for configuration in _configs(part, model)]
    controller._gathers_late = any(getattr(configuration, "overlap_param_gather", False) for configuration in settings)
    controller._watch(optimizer)
    if config.format == "mxfp8":
        controller.mxfp8 = mxfp8.attach(optimizer, model, controller.sites, identities, config)
    composed = checkpoint_index.composed(identities)
    for number, site in enumerate(controller.sites):
        if isinstance(site, Site):  # FusedAdam's own main params are saved and read by its hooks
            checkpoint_model.attach(site, announce=number == 0, composed=composed)
    checkpoint_model.attach_layer_wise(optimizer, config)
    return controller


def _is_megatrons_own(config: ParamRounding, optimizer, model) -> bool:
    """Whether Megatron's own cast is what `config` asks for: to nearest, and into no format that is simulated."""
    if config.mode != "nearest":
        return False
    if config.format == "mxfp8":
        configs = _configs(parts(optimizer)[0], model)
        return mxfp8_flags.uses_transformer_engine(lambda field, default: look_up(configs, field, default))
    return config.format is None or config.format == ParamRounding().for_dtype(_dtype(optimizer)).format


def _dtype(optimizer) -> torch.dtype:
    """The dtype of the model params that are cast to."""
    config = parts(optimizer)[0].config
    return torch.float16 if config.fp16 else torch.bfloat16 if config.bf16 else torch.float32


def _configs(part, model) -> list:
    """The configurations behind one optimizer: its own, its DDP's, and those of the model's chunks."""
    ddp = [part.ddp_config] if hasattr(part, "ddp_config") else []
    return [part.config, *ddp, *(chunk.config for chunk in model_chunks(model))]


def _device(identities: dict) -> torch.device:
    return next(iter(identities)).device


def _check_globs(config: ParamRounding, identities: dict) -> None:
    """Raise ValueError for a glob that matches no tensor on any rank. Collective when globs are given."""
    unmatched = config.unmatched({identity.key for identity in identities.values()})
    if not config.include + config.exclude:
        return
    everyone = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, unmatched)
    nowhere = [glob for glob in unmatched if all(glob in others for others in everyone)]
    if nowhere:
        names = sorted({identity.key for identity in identities.values()})
        raise ValueError(
            f"--param-rounding-include/-exclude {' '.join(nowhere)} matches no tensor; this rank's are: {', '.join(names)}"
        )
