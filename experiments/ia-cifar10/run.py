"""IA's networks on CIFAR-10: the definition says it all."""

from experiments.harness.ia_networks import run

__all__ = ["run"]
