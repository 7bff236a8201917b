"""FedMDFG's setting with two shards a client: the definition says it all."""

from experiments.harness.shards_table import run

__all__ = ["run"]
