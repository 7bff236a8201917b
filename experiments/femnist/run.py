"""All methods on 105 writers: the definition says it all."""

from experiments.harness.all_methods import run

__all__ = ["run"]
