"""A small benchmark of sliding squares with the shape of the public VBVR evaluator."""
