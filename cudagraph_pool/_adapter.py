"""The adapter: the extension module for the torch that is here. Wheels have one for each."""

import shlex
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

import cudagraph_pool

# The minor releases of torch 2 that there are adapters for.
MINORS: Final = range(11, 16)
SUPPORTED: Final = f"2.{MINORS[0]} to 2.{MINORS[-1]}"
_INSTALL: Final = "pip install --no-deps --force-reinstall ."
_IN_A_CLONE: Final = "in a clone of cudagraph_pool, "

_loaded: ModuleType | None = None


def releases() -> list[str]:
    """The minor releases of torch that this installation has an adapter for: ``["2.11"]``."""
    return [f"2.{minor}" for minor in MINORS if find_spec(f"cudagraph_pool._torch_2_{minor}")]


def loaded_adapter() -> Any:
    """The adapter if something has loaded it, else None: only then can anything be enabled."""
    return _loaded


def load_adapter() -> Any:
    """The adapter for the torch that is here. Raises ImportError, which says what sets it right."""
    global _loaded
    if _loaded is not None:
        return _loaded
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            "cudagraph_pool needs PyTorch to be enabled, and there is none: install a CUDA build "
            f"of torch {SUPPORTED}{and_the_adapter()}"
        ) from error
    found = str(torch.__version__)
    if torch.version.cuda is None:
        raise ImportError(
            f"cudagraph_pool needs a CUDA build of PyTorch; torch {found} is none: "
            f"install one of torch {SUPPORTED}{and_the_adapter()}"
        )
    release = ".".join(found.split(".")[:2])
    name = f"cudagraph_pool._torch_{release.replace('.', '_')}"
    if find_spec(name) is None:
        raise ImportError(no_adapter(found))
    try:
        _loaded = import_module(name)
    except ImportError as error:
        raise ImportError(
            f"cudagraph_pool's adapter for torch {release} cannot be loaded by torch {found}: "
            f"{error}: {_command()}"
        ) from error
    return _loaded


def and_the_adapter() -> str:
    return "" if releases() else f", then its adapter, which was left out: {_IN_A_CLONE}{_INSTALL}"


def _command() -> str:
    """What builds the adapter for the torch that Python finds, wherever that is."""
    torch = find_spec("torch")
    folders = torch.submodule_search_locations if torch else None
    chosen = "".join(f"CGP_TORCH_DIR={shlex.quote(folder)} " for folder in (folders or ())[:1])
    return _IN_A_CLONE + chosen + _INSTALL


def no_adapter(found: str) -> str:
    """Why there is no adapter for this release of torch, and which command sets it right."""
    if find_spec("cudagraph_pool._core") is None:
        return cudagraph_pool._not_installed()
    version = cudagraph_pool.__version__
    major, minor = found.split(".")[:2]
    if major != "2" or int(minor) not in MINORS:
        return (
            f"cudagraph_pool {version} supports torch {SUPPORTED}, and this is torch {found}: "
            "install one of these, or a newer cudagraph_pool"
        )
    has = ", ".join(releases())
    built = f"for torch {has} alone" if has else "without an adapter for PyTorch"
    return (
        f"cudagraph_pool {version} was built {built}, and this is torch {found}: {_command()}; "
        f"torch {SUPPORTED} are supported"
    )
