"""DRFA on 20 roles of Shakespeare: the definition says it all."""

from experiments.harness.natural import run

__all__ = ["run"]
