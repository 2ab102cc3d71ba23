"""Model params in Megatron's checkpoints: verified on load, or left out and recomputed.

What a checkpoint holds twice - FP32 main params, and model params that are their rounding - must agree. After the optimizer's state
has come back (Megatron loads the model before it) each rank compares its own shard:

    checkpoint of               model params must be               afterwards
    the same configuration      its stochastic rounding            as they are
    a run without rounding      the rounding to nearest            rounded stochastically, at the optimizer's step
    another configuration       (refused, or with recompute:)      rounded anew, at the saved step
    --param-rounding-save-model none   absent                      rounded anew, at the saved step

Three methods of each DistributedOptimizer or Float16 optimizer are wrapped, on the instance: `sharded_state_dict`, where entries of
model params become LocalNonpersistentObjects (Megatron's own way to say "not stored"), `load_state_dict` and, for --ckpt-format
torch, `load_parameter_state_from_dp_zero`. Whether a checkpoint holds model params stands in its content metadata, which Megatron-LM
stores and hands back on load.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from megatron_sr import checkpoint
from megatron_sr.config import FLAGS, ParamRounding
from megatron_sr.megatron.checkpoint_index import COMPOSED, bucket_index, is_rounded
from megatron_sr.megatron.recompute import Mismatch, Piece, differing, listing, mismatches

SAVE_MODEL = "param_rounding_save_model"
"""The key in the content metadata of a checkpoint."""


def attach(site, announce: bool = True, composed: dict[str, list] | None = None) -> None:
    """Make the checkpoints of `site.optimizer` verify, or leave out, the model params that `site` rounds. Once per site.

    composed  what `checkpoint_index.composed` gives: saved for `megatron-sr verify`.
    announce  print what a load changes; of chained optimizers, which load one after another, only the first one does.
    site  a cast site (`megatron_sr.megatron.sites`) with an optimizer that holds main params apart from model params.
    From now on `site.optimizer.load_state_dict` raises ValueError, naming the tensors, when the model's params (loaded before) are
    not the rounding of the main params that it has loaded and the configuration says on_mismatch="error".
    """
    _ModelParams(site, announce, composed or {})


def attach_layer_wise(optimizer, config: ParamRounding) -> None:
    """Gather what ranks have rounded when a layer-wise distributed optimizer (Muon) has been loaded. Others are left as they are.

    There each rank rounds the whole params that it owns, and the other ranks get them by the optimizer's own all-gather.
    Raises ValueError with save_model="none", as owners change with the data-parallel size and replicas are saved by others.
    """
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    for part in getattr(optimizer, "chained_optimizers", ()):
        attach_layer_wise(part, config)
    if not isinstance(optimizer, LayerWiseDistributedOptimizer):
        return
    if config.save_model == "none":
        raise ValueError(
            f"{FLAGS['save_model']} none does not work with the layer-wise distributed optimizer; use {FLAGS['save_model']} full"
        )
    original = optimizer.load_state_dict

    def load_state_dict(state_dict) -> None:
        original(state_dict)
        if optimizer.overlap_param_gather:  # the next forward pass gathers
            return
        if optimizer.use_buffer_param_sync:
            optimizer.start_param_sync_for_bucket_group_subset()
        else:
            optimizer.allgather_params()

    optimizer.load_state_dict = load_state_dict


def explain_absence() -> None:
    """From now on a `dist_checkpointing.load` that fails for want of the model params that a checkpoint leaves out says so, and why.

    It changes no load that works. Idempotent. For loads that no optimizer of ours takes part in: a nearest run, --finetune.
    """
    from megatron.core import dist_checkpointing

    original = dist_checkpointing.load
    if hasattr(original, "explains_absence"):
        return

    @functools.wraps(original)
    def load(sharded_state_dict, checkpoint_dir, *more, **named):
        try:
            return original(sharded_state_dict, checkpoint_dir, *more, **named)
        except BaseException as error:  # torch's CheckpointException is no Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit)) or not _wants_model_params(sharded_state_dict):
                raise
            content = dist_checkpointing.load_content_metadata(str(checkpoint_dir)) or {}
            if content.get(SAVE_MODEL) != "none":
                raise
            raise ValueError(
                f"{checkpoint_dir} holds no model params ({FLAGS['save_model']} none): they are recomputed from its main params. "
                f"Load it with the optimizer's state (no --finetune, no --no-load-optim) and {FLAGS['mode']} stochastic; to get a "
                f"checkpoint that holds them, save once more with {FLAGS['save_model']} full"
            ) from error

    load.explains_absence = True
    dist_checkpointing.load = load


def _wants_model_params(state) -> bool:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    entries = (entry for entry in nested_values(state) if isinstance(entry, ShardedBase))
    return any(isinstance(entry.data, torch.Tensor) and is_rounded(entry.data) for entry in entries)


class _ModelParams:
    def __init__(self, site, announce: bool, composed: dict[str, list]):
        self.site, self.announce, self.composed = site, announce, composed
        self.saved: dict | None = None  # the rounding state that is being loaded
        self.absent = False  # the checkpoint that is being loaded holds no model params
        site.inner.register_load_state_dict_pre_hook(self._remember)
        self._sharded_state_dict = site.optimizer.sharded_state_dict
        self._load_state_dict = site.optimizer.load_state_dict
        site.optimizer.sharded_state_dict = self.sharded_state_dict
        site.optimizer.load_state_dict = self.load_state_dict
        if hasattr(site.optimizer, "load_parameter_state_from_dp_zero"):
            self._load_dp_zero = site.optimizer.load_parameter_state_from_dp_zero
            site.optimizer.load_parameter_state_from_dp_zero = self.load_parameter_state_from_dp_zero

    def _remember(self, _, state_dict: dict) -> None:
        self.saved = checkpoint.find(state_dict["param_groups"])

    def sharded_state_dict(self, model_sharded_state_dict, is_loading=False, *more, metadata=None, **named):
        """As Megatron's. Changes `model_sharded_state_dict` in place when the checkpoint holds no model params."""
        config = self.site.config
        self.absent = (metadata or {}).get(SAVE_MODEL, "full") == "none" if is_loading else config.save_model == "none"
        if not is_loading and metadata is not None:
            metadata[SAVE_MODEL] = config.save_model
            if self.composed:
                metadata[COMPOSED] = self.composed
        elif not is_loading and self.absent:
            raise ValueError(
                f"{FLAGS['save_model']} none needs a checkpoint with content metadata, which tells the next load that model "
                "params are absent: give sharded_state_dict a metadata dict and dist_checkpointing.save the same "
                f"as content_metadata, or use {FLAGS['save_model']} full"
            )
        state = self._sharded_state_dict(model_sharded_state_dict, is_loading, *more, metadata=metadata, **named)
        if not is_loading:
            state |= bucket_index(self.site, metadata)
        if self.absent:
            _leave_out(model_sharded_state_dict, _rounded_params(self.site))
        return state

    def load_state_dict(self, state_dict) -> None:
        self._load_state_dict(state_dict)
        # A DistributedOptimizer also loads its own state dict, without main params, to allocate its state.
        if "param_state" in state_dict or "gbuf_ranges" not in vars(self.site.optimizer):
            self._loaded()

    def load_parameter_state_from_dp_zero(self, *args, **named) -> None:
        self._load_dp_zero(*args, **named)
        self._loaded()

    def _loaded(self) -> None:
        """Main params, step and (unless absent) model params are those of the checkpoint."""
        site, config = self.site, self.site.config
        saved = checkpoint.saved_config(self.saved) if self.saved else ParamRounding(mode="nearest")
        changed = checkpoint.differences(saved, config) if self.saved else {}
        if self.absent:
            self._say(f"model params are recomputed from main params at step {site.step}: the checkpoint holds none")
            self._recompute()
        elif changed:
            self._recompute()
        elif not self.saved:
            self._report(_everywhere(_unlike(site, saved), site))
            self._recompute()
        elif config.format == "mxfp8":  # a second rounding follows the all-gather, of whole tensors
            # Where params live in Transformer Engine's tensors, the pieces are a buffer that holds nothing between steps.
            comparable = not site.optimizer.ddp_config.reuse_grad_buf_for_mxfp8_param_ag
            loaded = [piece.model.clone() for piece in _pieces(site)] if comparable else []
            self._recompute()
            if comparable:
                self._report(_everywhere(differing(_pieces(site), loaded), site))
        else:
            wrong = _everywhere(_unlike(site, config), site)
            self._report(wrong)
            if wrong:
                self._recompute()
        if not self.saved:
            self._say(
                f"{FLAGS['mode']} {config.mode} (seed {config.seed}) from step {site.step} on: this checkpoint was saved without it"
            )
        elif changed:
            listed = ", ".join(f"{FLAGS[field]} {old} -> {new}" for field, (old, new) in changed.items())
            self._say(f"model params are rounded anew at step {site.step}, with other settings: {listed}")

    def _say(self, message: str) -> None:
        if self.announce:
            checkpoint.say(message)

    def _recompute(self) -> None:
        self.site.round_()
        gather_params(self.site.optimizer)

    def _report(self, wrong: list[Mismatch]) -> None:
        if not wrong:
            return
        step, listed = self.site.step, listing(wrong)
        if self.site.config.on_mismatch == "error":
            raise ValueError(
                f"the checkpoint's model params are not the rounding of its main params at step {step}: {listed}. It was edited, "
                "mixed from two checkpoints or damaged. Load an older one (--ckpt-step), or, if the main params are right, "
                f"{FLAGS['on_mismatch']} recompute"
            )
        group = _group(self.site)
        checkpoint.say(
            f"rank {torch.distributed.get_rank()}: model params are recomputed from main params at step {step}; the checkpoint's "
            f"differed: {listed}",
            speaks=group is None or group.rank() == 0,  # of the ranks that share these params; not all do with rank 0
        )


def _rounded_params(site) -> set[torch.nn.Parameter]:
    """The model params that the ranks of this optimizer round together: in a DistributedOptimizer each rank has pieces of some only."""
    shared = (param for buffer in getattr(site.optimizer, "buffers", ()) for param in buffer.params)
    return {piece.param for piece in site.pieces} | {param for param in shared if is_rounded(param)}


def _unlike(site, config: ParamRounding) -> list[Mismatch]:
    """The tensors of which this rank's model params are not the rounding of its main params under `config`.

    A site without pieces (main params inside FusedAdam) can only be compared with its own configuration, and does not count.
    """
    keys = site.mismatches()  # under its own; also brings an offloaded optimizer's staging memory up to date
    if not site.pieces:
        return [Mismatch(key) for key in keys] if config is site.config else []
    return mismatches(_pieces(site), config, site.step) if keys or config is not site.config else []


def _pieces(site) -> Iterator[Piece]:
    for piece in site.pieces:
        yield Piece(
            piece.identity.key, piece.identity.segments, piece.place.detach().view(-1), piece.main.detach().view(-1)
        )


def _group(site):
    """The ranks that share the optimizer's params; None where each rank has its own (Float16 optimizer)."""
    return getattr(site.optimizer, "data_parallel_group", None)


def _everywhere(wrong: list[Mismatch], site) -> list[Mismatch]:
    """The mismatches of all ranks that share the optimizer's params, so that these act alike. Collective over that group."""
    group = _group(site)
    if group is None or group.size() == 1:
        return wrong
    everyone: list = [None] * group.size()
    torch.distributed.all_gather_object(everyone, wrong, group=group)
    total: dict[str, Mismatch] = {}
    for one in (one for ranks in everyone for one in ranks):
        known = total.get(one.key, Mismatch(one.key, 0, 0))
        total[one.key] = Mismatch(one.key, known.differing + one.differing, known.numel + one.numel)
    return [total[key] for key in sorted(total)]


def gather_params(optimizer) -> None:
    """The parameter all-gather of this optimizer's buckets; nothing to do where every rank rounds whole params.

    Not `start_param_sync` of the model chunks: that also gathers the buckets of other optimizers, whose ranks may not be here.
    """
    own = {id(bucket) for buffer in getattr(optimizer, "buffers", ()) for bucket in buffer.buckets}
    for chunk in getattr(optimizer, "model_chunks", ()) if own else ():
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            if any(id(bucket) in own for bucket in group.buckets):
                chunk._start_bucket_group_param_sync(group, force_sync=True)


def _leave_out(state, params: set[torch.nn.Parameter]) -> None:
    """Replace the entries of `params` in a model's sharded state dict, in place and at any depth.

    On load they come back as NaN, without memory of their own, and are overwritten once main params are there: a load that forgot
    to recompute them would not go unnoticed.
    """
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase

    for key, entry in state.items() if isinstance(state, dict) else enumerate(state):
        if isinstance(entry, (dict, list)):
            _leave_out(entry, params)
        elif isinstance(entry, ShardedBase) and isinstance(entry.data, torch.nn.Parameter) and entry.data in params:
            nan = torch.full((), torch.nan, dtype=entry.data.dtype, device=entry.data.device)
            state[key] = LocalNonpersistentObject(nan.expand(entry.data.shape))
