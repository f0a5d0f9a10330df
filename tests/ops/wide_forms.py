"""Shapes at which linear maps of many tokens take every wide form.

tests/csrc/test_heuristics.py proves that, tests/ops/test_gemm_wide.py runs them on a GPU.
"""

# channels, inputs, gates, tokens. No tile divides the tokens, nor all channels or inputs; blocks
# have a tile each, or several; some stages of the ring are used once, some many times. Of one gate
# the channels are a multiple of 64, as a residual stream's are.
SHAPES = [
    (17024, 72, 1, 30),
    (1984, 1096, 1, 66),
    (2112, 72, 1, 450),
    (960, 648, 1, 66),
    (768, 3080, 1, 195),
    (960, 872, 1, 34),
    (768, 1160, 1, 100),
    (4416, 72, 1, 69),
    (1472, 1032, 1, 1557),
    (3200, 776, 1, 655),
    (2240, 2568, 1, 66),
    (8896, 72, 1, 65),
    (8512, 1032, 1, 284),
    (4288, 72, 1, 327),
    (2048, 2056, 1, 1000),
    (768, 3080, 1, 1001),
    (448, 2568, 1, 1453),
    (4416, 2248, 1, 66),
    (8512, 72, 1, 199),
    (8512, 392, 1, 515),
    (7232, 72, 1, 390),
    (7744, 392, 1, 778),
    (8, 1096, 2, 1493),
    (1152, 776, 2, 130),
    (408, 72, 2, 1153),
    (4344, 72, 2, 34),
    (4696, 1032, 2, 132),
    (4328, 72, 2, 72),
    (7128, 392, 2, 129),
    (6616, 72, 2, 66),
    (2312, 2056, 2, 773),
    (5960, 72, 2, 129),
    (6136, 392, 2, 389),
    (6440, 72, 2, 198),
    (7240, 392, 2, 392),
    (8, 1096, 3, 1481),
    (4280, 72, 3, 132),
    (4328, 72, 3, 69),
    (6760, 392, 3, 197),
]

# Of the cell with an output gate, whose channels are a multiple of 64.
GATED = [(-(-shape[0] // 64) * 64, *shape[1:]) for shape in SHAPES if shape[2] == 3]
