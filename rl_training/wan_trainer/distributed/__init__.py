"""Process groups, the device mesh and the collectives the trainer uses."""
