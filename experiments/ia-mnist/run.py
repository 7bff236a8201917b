"""IA's networks on MNIST: the definition says it all."""

from experiments.harness.ia_networks import run

__all__ = ["run"]
