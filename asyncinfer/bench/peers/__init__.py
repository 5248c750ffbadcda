"""Other engines on which `asyncinfer bench serve` runs the same work, one module each.

They run in processes of their own, if need be on another interpreter (`worker.py`). So these
modules import nothing from this package.
"""

from asyncinfer.bench.peers.process import PeerError, PeerProcess
from asyncinfer.bench.peers.table import PEERS, installed_peers, parse_peers, require_transformers

__all__ = [
    "PEERS",
    "PeerError",
    "PeerProcess",
    "installed_peers",
    "parse_peers",
    "require_transformers",
]
