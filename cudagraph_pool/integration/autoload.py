"""Entry points by which others call this package, to enable it without an edit.

They do nothing unless ``CUDAGRAPH_POOL`` or ``CUDAGRAPH_POOL_RECORD`` is set. ``import torch``
imports this module in every process, so that it imports nothing before that is known.
"""

import os

from .environment import RECORD, VARIABLE, asks

_arranged: set[str] = set()  # the loggers that will say so


def torch() -> None:
    """``torch.backends``: called at the end of ``import torch``."""
    _arrange("cudagraph_pool")
    folder = os.environ.get(RECORD)
    if folder:
        from torch.cuda import _lazy_call

        from ..tools.record import start

        _lazy_call(lambda: start(folder))


def vllm() -> None:
    """``vllm.general_plugins``: called in each process of vLLM's, perhaps several times, also
    without torch's entry points. vLLM prints what is logged below its own name.
    """
    logger = "vllm.cudagraph_pool"
    if _arrange(logger):
        _offer_sleep_backend(logger)
        from torch.cuda import _lazy_call

        from .vllm import serve_all_reduce, serve_estimate

        # They import much of vLLM.
        _lazy_call(lambda: serve_all_reduce(logger))
        _lazy_call(lambda: serve_estimate(logger))


def _offer_sleep_backend(logger: str) -> None:
    """vLLM imports it if ``sleep_mode_backend`` names it. Before 0.30 there is none to be named."""
    module = f"{__package__}.vllm_sleep"
    try:
        from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

        SleepModeBackendFactory.register_backend("cudagraph_pool", module, "GraphPoolBackend")
    except Exception as error:  # of a plugin it would end vLLM
        import logging

        logging.getLogger(logger).debug("vLLM takes no sleep mode backend: %s", error)


def sglang() -> None:
    """``sglang.srt.plugins``: the same, but SGLang prints what anybody logs."""
    _arrange("cudagraph_pool")
    if asks(os.environ.get(VARIABLE, "")):
        from .sglang import serve_memory_saver

        serve_memory_saver()


def _arrange(logger: str) -> bool:
    """Lets the package be enabled when torch initialises CUDA; now, if it has. Not earlier: who
    has asked CUDA for anything cannot fork. Returns whether it was asked for, and not done before.
    """
    request = os.environ.get(VARIABLE, "")
    if not asks(request) or logger in _arranged:
        return False
    _arranged.add(logger)
    from torch.cuda import _lazy_call

    def enable() -> None:
        from .request import enable

        enable(request, logger)

    _lazy_call(enable)
    return True
