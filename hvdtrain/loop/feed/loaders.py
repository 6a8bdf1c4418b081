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

from hvdtrain.settings.safety.exits import print_message


def dataset_of(loader: DataLoader[Any], *, prints: bool) -> Dataset[Any]:
    """Return the loader's dataset; print what else of the loader is not used, as a warning if it selects samples."""
    sampler, batches, collate = loader.sampler, loader.batch_sampler, loader.collate_fn
    is_shuffle = (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    )
    selects = {
        f"batch_sampler {type(batches).__name__}": batches is not None and type(batches) is not BatchSampler,
        f"sampler {type(sampler).__name__}": not is_shuffle and type(sampler) is not SequentialSampler,
        f"collate_fn {getattr(collate, '__name__', type(collate).__name__)}": (
            collate not in (default_collate, default_convert)
        ),
        "drop_last": loader.drop_last,
    }
    unused = selects | {
        f"batch_size={loader.batch_size}": loader.batch_size is not None,
        "shuffle": is_shuffle,
        f"num_workers={loader.num_workers}": loader.num_workers > 0,
        "worker_init_fn": loader.worker_init_fn is not None,
        "generator": loader.generator is not None,
    }
    if prints and any(unused.values()):
        names = ", ".join(name for name, is_set in unused.items() if is_set)
        print_message(
            "warning" if any(selects.values()) else "note",
            f"the DataLoader of {type(loader.dataset).__name__}: only its dataset is used, each sample once per epoch, "
            f"shuffled, and not {names}. Choose samples with torch.utils.data.Subset, convert them in the Dataset, and "
            "pass --batch-size-per-rank and --seed.",
        )
    return loader.dataset
