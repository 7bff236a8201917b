"""Who carries out the contract in our own processes: loop, stacked, distributed."""
