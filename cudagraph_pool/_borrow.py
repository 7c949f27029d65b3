"""Tensors on memory that somebody else owns."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def borrow(tensor: Tensor, owner: object) -> Tensor:
    """The same memory as a tensor that keeps ``owner`` alive, and not the block that it lies in.

    The storage's Python object lives as long as the storage does, and holds the owner. The owner
    must not hold the tensor: nobody would find that circle.
    """
    if tensor.is_conj():
        return borrow(tensor.conj(), owner).conj()
    if tensor.is_neg():
        return borrow(tensor._neg_view(), owner)._neg_view()
    storage = tensor.untyped_storage()
    borrowed: Any = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    borrowed._owner = owner
    with counting_changes():
        empty = tensor.new_empty(0)
        return empty.set_(borrowed, tensor.storage_offset(), tensor.size(), tensor.stride())


def version_of(tensor: Tensor) -> Tensor:
    """An empty tensor that counts the changes of another one, without keeping its memory."""
    with counting_changes():
        counter = tensor.detach()
        counter.data = tensor.new_empty(0)
        return counter


def counting_changes() -> AbstractContextManager[Any]:
    """Tensors that are made in inference mode count no changes, and cannot require gradients."""
    in_inference_mode = torch.is_inference_mode_enabled()
    return torch.inference_mode(False) if in_inference_mode else nullcontext()
