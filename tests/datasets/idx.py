"""Write arrays as IDX, the format of MNIST."""

import struct


def idx(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
