"""Shapes at which linear maps of many tokens take every wide form.

tests/csrc/test_choice.py proves that, tests/ops/test_wide_maps.py runs them on a GPU.
"""

# channels, inputs, gates, tokens. No tile divides the tokens, nor all channels or inputs; blocks
# have a tile each, or several; some stages of the ring are used once, some many times. Of one gate
# the channels are a multiple of 64, as a residual stream's are.
SHAPES = [
    (1472, 1088, 1, 145),
    (320, 1032, 1, 1557),
    (7744, 72, 1, 145),
    (2048, 2048, 1, 1000),
    (8512, 72, 1, 145),
    (1536, 384, 1, 1500),
    (8512, 384, 1, 300),
    (776, 1032, 2, 145),
    (1152, 768, 2, 256),
    (1640, 1088, 2, 195),
    (7760, 72, 2, 65),
    (3080, 2048, 2, 1000),
    (1160, 768, 2, 1000),
    (6680, 72, 2, 145),
    (2600, 384, 2, 700),
    (5240, 72, 3, 65),
    (1160, 768, 3, 700),
]
