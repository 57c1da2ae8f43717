"""A step of verl on packed answers, on sequences that two or more ranks share: the part of its worker around a model.

    torchrun --nproc-per-node 2 examples/verl_log_probabilities.py

In a run of verl, two settings do this: `actor_rollout_ref.model.external_lib=burst.verl` and
`+actor_rollout_ref.model.override_config.attn_implementation=burst`. Started with one rank, the program prints the same
losses.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from verl.utils import ulysses
from verl.utils.import_utils import import_external_libs

VOCABULARY, LENGTHS = 64, (50, 6, 39)


def main(steps: int = 5) -> None:
    """Raise the log-probabilities of some answers and lower those of others; print the loss of each step."""
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    import_external_libs("burst.verl")  # as verl does with `external_lib`
    ulysses.set_ulysses_sequence_parallel_group(dist.group.WORLD)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation="burst")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    whole = torch.randint(VOCABULARY, (1, sum(LENGTHS)))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    advantages = torch.tensor([1.0, -1.0, 0.5]).repeat_interleave(torch.tensor(LENGTHS))  # of each answer
    tokens, positions, padding = ulysses.ulysses_pad_and_slice_inputs(whole, positions, sp_size=ranks)
    following, _, _ = ulysses.ulysses_pad_and_slice_inputs(whole.roll(-1, dims=1), None, sp_size=ranks)
    losses = []
    for _ in range(steps):
        logits = model(input_ids=tokens, position_ids=positions).logits
        own = logits[0].log_softmax(dim=-1).gather(1, following[0, :, None])[:, 0]
        log_probabilities = ulysses.gather_outputs_and_unpad(own, gather_dim=0, unpad_dim=0, padding_size=padding)
        loss = -(log_probabilities * advantages).mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad.div_(ranks))  # the mean over the ranks, which FSDP forms in verl
        optimizer.step()
        optimizer.zero_grad()
        losses.append(f"{loss.item():.5f}")
    if dist.get_rank() == 0:
        print(f"{ranks} ranks: losses {', '.join(losses)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
