"""Other engines that `asyncinfer bench serve` runs the same work on, a module each.

They run in processes of their own, by an interpreter of their own where theirs cannot be this one
(`worker.py`). So a module here imports nothing of this package.
"""

from asyncinfer.bench.peers.process import PeerProcess
from asyncinfer.bench.peers.table import PEERS, installed_peers, parse_peers, require_transformers

__all__ = ["PEERS", "PeerProcess", "installed_peers", "parse_peers", "require_transformers"]
