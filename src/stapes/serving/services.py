"""What the routes of the server share: ``app.state.services``."""

from __future__ import annotations

from dataclasses import dataclass

from stapes.serving.access import Keys, Origins
from stapes.serving.decoders import Decoders
from stapes.serving.engines import Engines
from stapes.serving.limits import Limits
from stapes.serving.logs import Log
from stapes.serving.metrics import Metrics
from stapes.serving.served import Served
from stapes.serving.settings import ServerSettings
from stapes.serving.uploads import Spool


@dataclass
class Services:
    """One of each."""

    settings: ServerSettings
    keys: Keys
    origins: Origins
    served: Served
    limits: Limits
    engines: Engines
    decoders: Decoders
    spool: Spool
    metrics: Metrics
    log: Log
