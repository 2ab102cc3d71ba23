"""Two gloo ranks share one engine (a mock on the first rank): shares, errors everywhere, failures inside a collective export."""

import pytest
import torch
import torch.distributed as dist

from megatron_sr.rl.engines import SharedEngine
from megatron_sr.rollout.engine import Completion, Health, SamplingConfig, UpdateRefused, UpdateReport


class Mock:
    """Completes a prompt with its own first token + seed; aborts every third prompt once; refuses version 9 before it reads anything."""

    def __init__(self):
        self.version, self.asked, self.last = 0, 0, {}

    def generate(self, prompts, sampling, seeds):
        self.asked += 1
        reasons = ["abort" if self.asked == 1 and i % 3 == 0 else "length" for i in range(len(prompts))]
        return [
            [Completion(i, [p[0] + s], [-1.0], r, self.version)]
            for i, (p, s, r) in enumerate(zip(prompts, seeds, reasons))
        ]

    def update_weights(self, tensors, version, *, in_flight):
        if version == 9:
            raise UpdateRefused("refused early")
        count = len(list(tensors))
        self.version = version
        return UpdateReport(version, count, [], 0.0, 0.0, "digest")

    def health(self):
        return Health("serving", self.version)

    def shutdown(self):
        pass


def export():
    for i in range(5):
        tensor = torch.full((3,), float(dist.get_rank()))
        dist.all_reduce(tensor)  # what a tensor-parallel export does
        yield f"w{i}", tensor


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    engine = SharedEngine(Mock)
    assert engine.update_weights(export(), 1).tensors == 5
    prompts = [[100 * rank + i] for i in range(4 + rank)]  # the ranks need not have equally many
    groups = engine.generate(prompts, SamplingConfig(), [1000 * rank + i for i in range(4 + rank)])
    assert [g[0].token_ids[0] for g in groups] == [1100 * rank + 2 * i for i in range(4 + rank)]
    assert [g[0].prompt_index for g in groups] == list(range(4 + rank))
    assert {g[0].finish_reason for g in groups} == {"length"}
    assert engine.generate([[7]] if rank else [], SamplingConfig(), [0] if rank else []) == (
        [[Completion(0, [7], [-1.0], "length", 1)]] if rank else []
    )
    with pytest.raises(UpdateRefused, match="refused early"):  # on every rank
        engine.update_weights(export(), 9)
    assert engine.health() == Health("serving", 1)
    assert engine.update_weights(export(), 10).version == 10

    def broken():
        raise ConnectionError("no cluster")

    with pytest.raises(ConnectionError, match="no cluster"):
        SharedEngine(broken)
    dist.barrier()
    print(f"ok rank {rank}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
