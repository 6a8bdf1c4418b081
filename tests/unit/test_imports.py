"""What a start need not wait for: modules that a script does not import before it uses them."""

import subprocess
import sys

import pytest

NEVER_AT_FIRST = {"matplotlib", "sklearn", "scipy", "pandas", "horovod", "mpi4py", "launch", "tensorflow"} | {
    "torch.distributed.pipelining"
}


@pytest.mark.parametrize(
    ("script", "besides"),
    [
        ("effnet", set()),
        ("bert", {"torchvision", "hvdtrain.vision", "transformers", "huggingface_hub", "simple_icd_10_cm"}),
        ("bandwidth", {"torch._dynamo", "torchvision", "tensorboard", "sympy", "triton", "PIL"}),
        ("compare.__main__", {"torch", "matplotlib.pyplot", "tensorboard"}),
    ],
)
def test_a_script_imports_nothing_that_its_start_does_not_need(script, besides):
    code = f"import sys, hvdtrain.{script}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    never = NEVER_AT_FIRST - ({"matplotlib", "scipy"} if script.startswith("compare") else set())
    assert not (never | besides) & set(done.stdout.split())
