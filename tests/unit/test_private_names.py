"""The private names of torch, torchvision and Horovod that the project uses: another version may be without them."""

import ast
import pkgutil
import re
from functools import cache
from operator import attrgetter
from pathlib import Path

import pytest
import torch

PROJECT = Path(__file__).parents[2]
FOLDERS = ("hvdtrain", "scripts", "bench", "examples", "tests/gpu", "tests/simgpu")

# Where they were last seen. A name in lower case is imported, another one is an attribute of one of `examples`.
LAST_SEEN = {
    "torch 2.14.1": """
        torch._C._current_graph_task_id torch._C._disabled_torch_function_impl torch._C._ensureCUDADeviceGuardSet
        torch._C._distributed_c10d._create_work_from_future
        torch._C._only_lift_cpu_tensors torch._C._set_only_lift_cpu_tensors
        torch._amp_foreach_non_finite_check_and_unscale_ torch._foreach_add torch._foreach_add_
        torch._foreach_addcmul_ torch._foreach_copy_ torch._foreach_div torch._foreach_div_ torch._foreach_lerp_
        torch._foreach_mul_ torch._foreach_norm torch._foreach_sqrt_ torch._foreach_sub torch._foreach_sub_
        torch._dynamo.testing.CompileCounterWithBackend
        torch._subclasses.fake_tensor.FakeTensor torch._subclasses.fake_tensor.FakeTensorMode
        torch._subclasses.fake_tensor.init_gpu_context
        torch.cuda._lazy_init torch.cuda._sleep torch.distributed.ProcessGroup._get_backend
        torch.cuda._sanitizer.EventHandler._handle_device_synchronization
        torch.cuda._sanitizer.EventHandler._handle_event_creation
        torch.cuda._sanitizer.EventHandler._handle_event_record
        torch.cuda._sanitizer.EventHandler._handle_event_synchronization
        torch.cuda._sanitizer.EventHandler._handle_event_wait
        torch.cuda._sanitizer.EventHandler._handle_kernel_launch
        torch.cuda._sanitizer.EventHandler._handle_memory_deallocation
        torch.cuda._sanitizer.EventHandler._handle_stream_creation
        torch.cuda._sanitizer.EventHandler._handle_stream_synchronization
        torch.nn.modules.batchnorm._BatchNorm torch.nn.modules.batchnorm._NormBase
        torch.ops.aten._local_scalar_dense torch.ops.aten._pin_memory
        torch.ops.aten._scaled_dot_product_efficient_attention torch.ops.aten._to_copy torch.ops.aten._unique2
        torch.ops.aten._unsafe_view
        torch.testing._internal.distributed.fake_pg.FakeStore
        torch.optim.optimizer._foreach_supported_types torch.utils._foreach_utils._foreach_supported_types
        torch.utils._python_dispatch.TorchDispatchMode torch.utils._pytree.tree_leaves
        torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers
        Adam._step_supports_amp_scaling Loader._iterator Module._buffers Module._modules
        Module._non_persistent_buffers_set Module._parameters Module._save_to_state_dict Module._state_dict_hooks
        Module._state_dict_pre_hooks Node._input_metadata Node._sequence_nr Overload._overloadpacket Overload._schema
        Parameter._is_param Scaler._found_inf_per_device Scaler._per_optimizer_states SpectralNorm._u Storage._cdata
        Tensor._make_wrapper_subclass""",
    "torchvision 0.29.1": "torchvision.models._api.load_state_dict_from_url",
    "horovod 0.28.1": """
        horovod.torch.mpi_ops._basics horovod.torch.mpi_ops._handle_map
        Optimizer._allreduce_grad_async Optimizer._group_counts Optimizer._grouped_allreduce_grad_async
        Optimizer._handles Optimizer._p_to_group""",
}
STAGE = "torch.distributed.pipelining.PipelineStage"
ONLY_IN = {  # a minor version of torch
    "2.11": f"{STAGE}._validate_fwd_outputs",
    "2.14": f"{STAGE}._validate_stage_tensors {STAGE}._warmup_backward_result {STAGE}._warmup_forward_vote",
}
NAMES = " ".join([*LAST_SEEN.values(), ONLY_IN.get(torch.__version__[:4], "")]).split()
PYTHON = re.compile(
    "_(SubParsersAction|actions|asdict|current_frames|exit|expand_help|getframe|get_formatter|option_string_actions)"
)
OURS = ("hvdtrain", "launch", "scripts", "bench", "tests")
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "patch", "object"}  # functions that take a name as text


@cache
def examples():
    module = torch.nn.Linear(1, 1)
    normed = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(2, 2))
    return {
        "Adam": torch.optim.Adam(module.parameters(), fused=True),
        "Loader": torch.utils.data.DataLoader([1]),
        "Module": module,
        "Node": module(torch.ones(1)).grad_fn,
        "Overload": torch.ops.aten.add.Tensor,
        "Parameter": torch.nn.Parameter(torch.ones(1).as_subclass(type("Own", (torch.Tensor,), {}))),
        "Scaler": torch.amp.GradScaler("cpu"),
        "SpectralNorm": normed.parametrizations.weight[0],
        "Storage": module.weight.untyped_storage(),
        "Tensor": torch.Tensor,
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_private_name_is_still_there(name):
    kind, _, attribute = name.partition(".")
    if kind == "Optimizer":  # one that exists needs a Horovod that has started
        optimizer = pkgutil.resolve_name("horovod.torch.optimizer._DistributedOptimizer")
        assert hasattr(optimizer, attribute) or attribute in optimizer.__init__.__code__.co_names
    elif kind in examples():
        attrgetter(attribute)(examples()[kind])
    else:
        pkgutil.resolve_name(name)


def private(text):
    return re.findall(r"\b_[a-zA-Z]\w*", text)


def used(tree):
    """Private names that this code imports, reads as attributes, or names in a text for `getattr` and the like."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name):
                yield from private(name)
            case ast.ImportFrom(module=str(module), level=0) if module.split(".")[0] not in OURS:
                yield from private(" ".join([module.replace(".", " "), *(name.name for name in node.names)]))
            case ast.Call(func=ast.Name(id=function) | ast.Attribute(attr=function)) if function in BY_NAME:
                texts = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
                yield from (name for text in texts if re.fullmatch(r"[\w.]+", text) for name in private(text))


def made(tree):
    """Names that this code defines."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def test_every_private_name_that_is_not_ours_has_a_row():
    texts = [file.read_text() for folder in FOLDERS for file in (PROJECT / folder).rglob("*.py")]
    trees = [ast.parse(text) for text in texts if "torch" in text or "horovod" in text]
    ours = {name for tree in trees for name in made(tree)}
    theirs = {name for tree in trees for name in used(tree) if not PYTHON.fullmatch(name)} - ours
    listed = {part for name in NAMES for part in private(name.replace(".", " "))}
    assert theirs - listed == set()


def test_they_were_looked_for_in_the_newest_versions():
    pins = "".join(file.read_text() for file in PROJECT.glob("requirements/*.in"))
    pins += (PROJECT / "requirements/horovod.lock").read_text()
    for library in LAST_SEEN:
        name, version = library.split()
        found = re.findall(rf"^{name}==([\d.]+)", pins, re.MULTILINE)
        assert max(found, key=lambda one: tuple(map(int, one.split(".")))) == version
