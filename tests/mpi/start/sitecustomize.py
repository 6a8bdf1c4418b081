"""Ranks of tests start without torch's compiler, which costs 1.8 CPU seconds; whoever asks it for more loads it."""

import importlib
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

COMPILER = "torch._dynamo"
NAMES = (COMPILER, f"{COMPILER}.utils")


class Stub(types.ModuleType):
    """A module of the compiler that knows what eager code asks it for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        load()
        return getattr(importlib.import_module(self.__name__), name)


class Compiler(MetaPathFinder, Loader):
    """Loads the compiler when another of its modules is imported."""

    def find_spec(self, name: str, _path: Any, _target: Any = None) -> ModuleSpec | None:
        if not name.startswith(f"{COMPILER}.") or not isinstance(sys.modules.get(COMPILER), Stub):
            return None
        load()
        importlib.import_module(name)
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        """It was, when it was imported."""


def load() -> None:
    for name in NAMES:
        if isinstance(sys.modules.get(name), Stub):
            del sys.modules[name]
    importlib.import_module(COMPILER)


compiler, utils = (Stub(name) for name in NAMES)
compiler.__path__ = []  # a package
compiler.disable = lambda function, *_, **__: function
compiler.graph_break = lambda *_, **__: None
utils.is_compile_supported = lambda _: False  # asked by torchvision for operations that no test runs
sys.modules.update(zip(NAMES, (compiler, utils), strict=True))
sys.meta_path.insert(0, Compiler())
