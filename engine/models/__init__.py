"""The models: cells (minGRU, minLSTM), the convolution and the language model around them.

Begin with minrnn/lm.py; minrnn/cell.py explains what a cell is.
"""
