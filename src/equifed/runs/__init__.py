"""From a TOML table or Python objects to a run folder, one or many."""
