"""Splits replicas over ranks as stages."""

from collections.abc import Sequence

from hvdtrain.core.layout import Layout
from hvdtrain.core.step import precision_context
from hvdtrain.loop.draft import Job
from hvdtrain.replica.point_to_point import join_replica_on_all
from hvdtrain.stages.layout import Stages
from hvdtrain.stages.settings import Order
from hvdtrain.stages.stage import make_stage, measure_on_all, require_blocks


def make_stages(job: Job, *, cuts: Sequence[int] | None, order: Order, recompute: bool) -> Layout:
    """Return this rank's stage, cut as in the checkpoint unless `cuts` is given; the model keeps only that part.

    Raises BadInput if a stage of the first replica does not see the run folder.
    """
    from hvdtrain.stages.pipeline import Pipeline  # takes a second to import

    comm, blocks = job.comm, require_blocks(job.cuts.blocks)
    stages = comm.replica.size
    recorded = tuple(job.resumed.get("stages_at", ()))
    if cuts is None and len(recorded) == stages - 1:
        cuts = recorded
    join_replica_on_all(comm, job.device, f"--stages {stages}", is_shared=job.is_shared)
    context = precision_context(job.device, job.precision)
    passages = measure_on_all(comm, job.model, blocks, job.example, device=job.device, context=context)
    pipeline = Pipeline(comm.replica.rank, stages, job.device, order=order, phases=job.phases)
    stage = make_stage(job, blocks, passages, cuts=cuts, pipeline=pipeline, recompute=recompute)
    return Stages(comm, stage, job.model)
