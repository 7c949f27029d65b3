from . import _core as _core
from . import sizes as sizes
from ._core import __version__ as __version__
from ._forecast import Forecast as Forecast
from ._forecast import forecast as forecast
from ._guard import guard as guard
from ._leases import Lease as Lease
from .capture import graph as graph
from .pools import GraphPool as GraphPool
from .pools import lend_on_oom as lend_on_oom
from .pools import sleep as sleep
from .pools import stats as stats
from .pools import use_pool as use_pool
from .pools import wake as wake
from .runner import GraphRunner as GraphRunner
from .switch import allocator as allocator
from .switch import disable as disable
from .switch import enable as enable
from .switch import enabled as enabled
from .switch import is_enabled as is_enabled
from .switch import library_path as library_path
from .switch import pluggable_allocator as pluggable_allocator
from .tools.pool_report import PoolReport as PoolReport
from .tools.pool_report import report as report

__all__: list[str]

def _not_installed() -> str: ...
