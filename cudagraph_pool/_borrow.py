"""Tensors on memory that somebody else owns."""

from typing import Any

import torch
from torch import Tensor


def borrow(tensor: Tensor, owner: object) -> Tensor:
    """The same memory as a tensor that keeps ``owner`` alive, and not the block that it lies in:
    its storage's object has it. The owner must not hold the tensor: nobody would find that circle.
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
    with torch.inference_mode(False):  # it may be written to outside of that mode
        empty = tensor.new_empty(0)
        return empty.set_(borrowed, tensor.storage_offset(), tensor.size(), tensor.stride())
