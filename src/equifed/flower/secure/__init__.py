"""Sums that the server learns without learning any part of them."""
