"""Many clients at once in one process."""
