"""Run by Megatron-LM's interpreter: its own pretrain_gpt.py over several ranks, less one entry of its batches.

`python pretrain_megatron.py PRETRAIN_GPT.py MEGATRON-OPTIONS...`, one process per rank, with torchrun's variables.

Where samples come from several datasets, release 0.19.2 adds to each sample the number of its dataset (`dataset_id`),
which its training does not read. Under context parallelism it then splits each entry of a batch along the sequence,
and ends at this one, which has none: IndexError in `_get_batch_on_this_cp_rank_per_sequence_balancing`.
"""

import runpy
import sys
from pathlib import Path


def leave_out_dataset_id():
    from megatron.core.datasets.blended_dataset import BlendedDataset

    own = BlendedDataset.__getitem__
    BlendedDataset.__getitem__ = lambda self, index: {
        name: value for name, value in own(self, index).items() if name != "dataset_id"
    }


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)  # where its program finds the modules beside it
    leave_out_dataset_id()
    runpy.run_path(sys.argv[0], run_name="__main__")
