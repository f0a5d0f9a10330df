"""The textbook's ways to compute h_t = a_t h_{t-1} + b_t, h_0 = b_0, in plain torch operators.

Each module has `scan(a, b)` for [batch, time, channels] tensors of any length from 1 on (Heinsen's
two have names of their own), and `work(time)`, which counts what the scan does. They compute in the
type of their inputs, have no gradients, and run on any device.
"""
