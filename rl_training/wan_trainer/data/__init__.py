"""Data: unpacking the public archives, data sets, the order of the stream, and batches."""
