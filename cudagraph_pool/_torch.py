"""Importing this gives the adapter for the torch that is here, which ``_torch.pyi`` describes."""

import sys

from ._adapter import load_adapter

sys.modules[__name__] = load_adapter()
