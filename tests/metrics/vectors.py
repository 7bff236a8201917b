"""Strategies: one number per client."""

import numpy as np
from hypothesis import strategies as st


def vectors(low: float = 0.0, high: float = 1e6, min_size: int = 1, max_size: int = 15):
    """Vectors with ties and exact zeros among ordinary numbers."""
    smallest = low if low else 1e-9  # else tests of scale would meet underflow
    number = st.one_of(st.floats(smallest, high), st.sampled_from([max(low, 0.0), 1.0, 2.5]))
    return st.lists(number, min_size=min_size, max_size=max_size).map(np.array)


def positive_vectors(min_size: int = 1, max_size: int = 15):
    return vectors(1e-3, 1e3, min_size, max_size)
