"""What is public, and where it is defined: the package reads this file at run time, too."""

from .gathering import FolderStore as FolderStore
from .gathering import MemoryStore as MemoryStore
from .ingestion import Ingested as Ingested
from .ingestion import bounds_of as bounds_of
from .ingestion import ingest as ingest
from .replica import BestPoint as BestPoint
from .replica import Exchanged as Exchanged
from .replica import Replica as Replica
from .replica import ReplicaWarning as ReplicaWarning
from .sources import Fault as Fault
from .sums import Sums as Sums
from .sums import accumulate as accumulate
from .sums import finish as finish
from .sums import merge as merge
from .sums import rebased as rebased
from .sums import zero as zero
from .training import LostProcessError as LostProcessError
from .training import Processes as Processes
from .training import data_parallel as data_parallel
