"""hvdtrain.bandwidth on a network that changes one value on the last rank."""

from hvdtrain import bandwidth
from hvdtrain.ranks import allreduce
from hvdtrain.safety import exits


def damaged(comm):
    add = allreduce.horovod_sum(comm)

    def add_and_damage(values):
        add(values)
        if comm.rank == comm.size - 1 and len(values) > 1:
            values[-1] += 1

    return add_and_damage


allreduce.SUMS["ours"] = damaged
exits.run(bandwidth.main)
