"""The HTTP service and the command line, on top of the package `engine`."""
