"""The environment variables that this package reads or sets."""

VARIABLE = "CUDAGRAPH_POOL"
RECORD = "CUDAGRAPH_POOL_RECORD"  # a folder, set by ``cudagraph-pool record``
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # torch's: 0 keeps it from calling entry points

# What VARIABLE and its options may say.
ON = ("1", "true", "yes", "on")
OFF = ("0", "false", "no", "off")


def asks(request: str) -> bool:
    """Whether a value of VARIABLE asks for anything."""
    return request.lower() not in ("", *OFF)
