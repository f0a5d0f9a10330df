"""Shapes at which linear maps with sums in a fixed order take every form that they can take.

tests/csrc/test_heuristics.py proves that, tests/ops/test_fixed_order.py runs them on a GPU.
"""

# channels, inputs, gates
SHAPES = [
    (72, 384, 1),
    (384, 1536, 1),
    (896, 320, 1),
    (1088, 384, 1),
    (1408, 384, 1),
    (768, 3072, 1),
    (2048, 3072, 1),
    (6144, 768, 1),
    (6144, 2048, 1),
    (17000, 2048, 1),
    (136, 320, 2),
    (200, 1536, 2),
    (768, 384, 2),
    (1152, 768, 2),
    (1408, 384, 2),
    (3072, 2048, 2),
    (6144, 384, 2),
    (8192, 2048, 2),
    (136, 3072, 3),
    (200, 1536, 3),
    (4600, 320, 3),
    (4416, 384, 3),
    (8192, 192, 3),
    (8192, 2048, 3),
]
# Of the cell with an output gate, whose channels are a multiple of 64.
GATED = [(-(-shape[0] // 64) * 64, *shape[1:]) for shape in SHAPES if shape[2] == 3]
TOKENS = [1, 8, 9, 16, 24, 33, 64, 65, 100, 130, 170, 200, 256, 300, 512, 700, 1000, 2048]
