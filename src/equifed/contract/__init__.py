"""What an algorithm may see: arrays, streams, local work, clients."""
