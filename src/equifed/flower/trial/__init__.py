"""A federation on one machine, to try things out."""
