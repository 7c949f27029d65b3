"""The names of environment variables that this package reads or sets, each once."""

VARIABLE = "CUDAGRAPH_POOL"
RECORD = "CUDAGRAPH_POOL_RECORD"  # a folder, set by ``cudagraph-pool record``
PROGRAM = "CUDAGRAPH_POOL_PROGRAM"  # the process that ``record`` or ``run --report`` becomes
