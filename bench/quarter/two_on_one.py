"""A rank of several on one GPU: python -m bench.quarter.two_on_one sums | MODULE OPTIONS, under mpirun -np 2.

NCCL rejects two ranks of one host on one GPU, so each rank claims another host (NCCL_HOSTID), and NCCL sends over the
loopback. Never fast: it runs the code between streams, Horovod's thread and NCCL. hvdtrain's own refusal of a shared
GPU is off in this process only.
"""

import os
import runpy
import sys

SETTINGS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none"}
LATE = 20_000_000  # cycles, some 10 ms


def sums() -> None:
    """Horovod's sums of tensors that are late on their stream: a sum that does not wait reads other numbers."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    for dtype, mib in ((torch.float32, 1), (torch.float16, 1), (torch.float32, 16)):
        values = torch.full((mib * 2**18,), float(hvd.rank() + 1), device=device, dtype=dtype)
        if on_gpu:
            torch.cuda._sleep(LATE)
        values += 1
        total = hvd.allreduce(values, op=hvd.Sum, name=f"{dtype}.{mib}")
        assert total.unique().tolist() == [5.0], total.unique()
        print(f"rank {hvd.rank()}: {mib} MiB of {dtype} are right", flush=True)
    gathered = hvd.allgather(torch.full((1, 2), hvd.rank(), device=device))
    assert gathered.tolist() == [[0, 0], [1, 1]], gathered
    hvd.shutdown()


def main() -> None:
    os.environ["NCCL_HOSTID"] = f"rank{os.environ['OMPI_COMM_WORLD_RANK']}"
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    module, *options = sys.argv[1:]
    if module == "sums":
        sums()
        return
    from hvdtrain.program import checks

    checks.require_own_device = lambda *_: None  # type: ignore[attr-defined]
    sys.argv = [module, *options]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
