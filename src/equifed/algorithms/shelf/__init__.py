"""Fair methods beyond the five papers and their baselines."""
