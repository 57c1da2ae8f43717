"""Passes of a decoder layer that compute little and move much: SwiGLU's product and rotary positions.

On GPUs each is one Triton kernel that reads its inputs once and writes its results once, where torch's own operations
pass over memory several times with fp32 temporaries. Everywhere else the torch twin beside the call computes, and it is
the kernels' oracle. `choose` says which of the two takes a tensor, `swiglu` and `rotary` are the operations,
`kernels_triton` has the kernels.
"""
