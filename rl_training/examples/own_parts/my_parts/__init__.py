"""Parts of a run that are not in the package; train.yaml names them."""
