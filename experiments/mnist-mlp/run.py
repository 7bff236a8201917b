"""SCAFF-PD-IA's network on MNIST, trained well: the definition says it all."""

from experiments.harness.shards_table import run

__all__ = ["run"]
