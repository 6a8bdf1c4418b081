"""hvdtrain.bandwidth on a network that changes one value on the last rank."""

from hvdtrain import bandwidth
from hvdtrain.ranks import links
from hvdtrain.settings.safety import exits


def damaged(comm):
    add = links.horovod_sum(comm)

    def add_and_damage(values):
        add(values)
        if comm.rank == comm.size - 1 and len(values) > 1:
            values[-1] += 1

    return add_and_damage


bandwidth.SUMS["ours"] = damaged
exits.run(bandwidth.main)
