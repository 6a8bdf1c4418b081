"""A DataLoader as a split: its dataset, and what else of it is not used."""

from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)

from hvdtrain.safety.exits import print_message


def dataset_of(loader: DataLoader[Any], *, prints: bool) -> Dataset[Any]:
    """Return the loader's dataset; print what else of the loader is not used."""
    kind, (chosen, batched) = type(loader.dataset).__name__, _unused(loader)
    if chosen and prints:
        print_message(
            "warning",
            f"the DataLoader of {kind}: its {', '.join(chosen)} is not used, but each sample of the dataset once per "
            "epoch. Choose the samples with torch.utils.data.Subset, and convert them in the Dataset.",
        )
    if batched and prints:
        print_message(
            "note",
            f"the DataLoader of {kind}: only its dataset is used, not {', '.join(batched)}. Pass --batch-size-per-rank "
            "and --seed; training samples are shuffled.",
        )
    return loader.dataset


def _unused(loader: DataLoader[Any]) -> tuple[list[str], list[str]]:
    """Return what selects or converts samples, and what only makes batches of them."""
    sampler, batches, collate = loader.sampler, loader.batch_sampler, loader.collate_fn
    is_shuffle = (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    )
    chosen = {
        f"batch_sampler {type(batches).__name__}": batches is not None and type(batches) is not BatchSampler,
        f"sampler {type(sampler).__name__}": not is_shuffle and type(sampler) is not SequentialSampler,
        f"collate_fn {getattr(collate, '__name__', type(collate).__name__)}": (
            collate not in (default_collate, default_convert)
        ),
        "drop_last": loader.drop_last,
    }
    batched = {
        f"batch_size={loader.batch_size}": loader.batch_size is not None,
        "shuffle": is_shuffle,
        f"num_workers={loader.num_workers}": loader.num_workers > 0,
        "worker_init_fn": loader.worker_init_fn is not None,
        "generator": loader.generator is not None,
    }
    return [name for name, is_set in chosen.items() if is_set], [name for name, is_set in batched.items() if is_set]
