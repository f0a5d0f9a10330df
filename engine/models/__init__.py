"""The models: cells (minGRU, minLSTM), the convolution and the language model around them.

lm.py is the page to begin with; cell.py says what a cell is.
"""
