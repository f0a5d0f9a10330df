"""The commands of `minserve`: their options, what they do without a server, and their output."""
