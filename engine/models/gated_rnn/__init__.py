"""GRU and LSTM language models, with the cells of torch.nn, from PyTorch state dicts."""
