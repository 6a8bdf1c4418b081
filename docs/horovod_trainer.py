"""transformers' Trainer on Horovod's ranks, whose step is exactly that of the mean loss over the global batch.

    from horovod_trainer import HorovodTrainer      before anything of transformers and accelerate

For transformers 5.23.0 and accelerate 1.15.0: it leans on hooks that they do not document.
See docs/how-to/from-hf-trainer.md.
"""

import os

own = os.environ.get("HOROVOD_LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK"))
gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
if own is not None and (gpus is None or "," in gpus):  # of several GPUs Trainer would use all on each rank
    os.environ["CUDA_VISIBLE_DEVICES"] = own if gpus is None else gpus.split(",")[int(own)]

import horovod.torch as hvd  # noqa: E402

hvd.init()
for name in list(os.environ):  # to accelerate each process is alone
    if name.startswith(("OMPI_COMM_WORLD_", "PMI")) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        del os.environ[name]

import torch.nn.functional as F  # noqa: E402
from torch.utils.data import DistributedSampler  # noqa: E402
from transformers import Trainer  # noqa: E402


class HorovodTrainer(Trainer):
    """For heads with one label per sequence or per token; -100 counts nothing. Rank 0 alone writes and reports."""

    loss_is_scaled_for_ga = True  # see compute_loss

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        here = self.args.distributed_state  # Trainer and its callbacks write and report where these are 0
        here.process_index = here.local_process_index = hvd.rank()
        if hvd.rank() > 0:
            self.args.save_strategy = "no"

    def train(self, *arguments, **options):
        done = super().train(*arguments, **options)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)  # rank 0 may have loaded its best ones
        return done

    def evaluation_loop(self, *arguments, **options):
        found = super().evaluation_loop(*arguments, **options)
        return found._replace(metrics=hvd.broadcast_object(found.metrics, root_rank=0))  # by which all stop early

    def _get_train_sampler(self, train_dataset=None):
        return DistributedSampler(train_dataset or self.train_dataset, hvd.size(), hvd.rank(), seed=self.args.seed)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        items = sum((batch["labels"] != -100).sum() for batch in batches)
        return batches, hvd.allreduce(items, op=hvd.Sum)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if return_outputs:  # an evaluation
            return super().compute_loss(model, inputs, return_outputs)
        labels = inputs.pop("labels").flatten()
        logits = model(**inputs).logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels, reduction="sum") / num_items_in_batch

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:  # the last batch of a step
            hvd.grouped_allreduce_([one.grad for one in model.parameters() if one.grad is not None], op=hvd.Sum)
        return hvd.allreduce(loss, op=hvd.Sum)
