"""The paper's model family: the cells minGRU and minLSTM, and the language model around them."""
