"""The faults that mutate.py plants in the core and the adapter, by what they break."""

from __future__ import annotations

from mutants import (
    adapter,
    adapter_bases,
    adapter_faults,
    adapter_mempools,
    checkpoints,
    exec_cache,
    exec_table,
    failing,
    fences,
    foretold,
    free_bytes,
    graph_kinds,
    mapped,
    placement,
    pool,
    pool_set,
    proofs,
    usage,
)
from mutants.mutant import Mutant

__all__ = ["MUTANTS", "Mutant"]

MUTANTS: list[Mutant] = [
    *free_bytes.MUTANTS,
    *placement.MUTANTS,
    *mapped.MUTANTS,
    *fences.MUTANTS,
    *proofs.MUTANTS,
    *foretold.MUTANTS,
    *pool.MUTANTS,
    *pool_set.MUTANTS,
    *usage.MUTANTS,
    *checkpoints.MUTANTS,
    *adapter.MUTANTS,
    *adapter_faults.MUTANTS,
    *adapter_mempools.MUTANTS,
    *adapter_bases.MUTANTS,
    *exec_table.MUTANTS,
    *exec_cache.MUTANTS,
    *graph_kinds.MUTANTS,
    *failing.MUTANTS,
]
