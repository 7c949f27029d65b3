// The C functions, of pluggable_allocator.cc.
#pragma once

#include <cuda_runtime_api.h>

#include "torch/scopes/routes.h"

namespace cgp {

extern "C" void* cudagraph_pool_malloc(size_t bytes, int device, cudaStream_t stream);
extern "C" void cudagraph_pool_free(void* pointer, size_t bytes, int device, cudaStream_t stream);
extern "C" void cudagraph_pool_reset();
extern "C" void cudagraph_pool_memory_fraction(double fraction, int device);
extern "C" void* cudagraph_pool_base_alloc(void* pointer, size_t* bytes);
extern "C" void cudagraph_pool_record_stream(void* pointer, cudaStream_t stream);
extern "C" void cudagraph_pool_begin_allocate_to_pool(int device, MempoolId_t id,
                                                      StreamFilter filter);
extern "C" void cudagraph_pool_end_allocate_to_pool(int device, MempoolId_t id);
extern "C" void cudagraph_pool_release_pool(int device, MempoolId_t id);

}  // namespace cgp
