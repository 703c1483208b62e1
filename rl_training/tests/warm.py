"""Imported by the fork server of `run_ranks`: what every rank would otherwise compute anew.

Only tables that the library keeps for the life of a process and that nothing changes; no threads, no groups.
"""

import gc

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

# Loading any text encoder compiles a thousand patterns for the names of all models, for a second.
get_checkpoint_conversion_mapping("umt5")
# A rank's garbage collections would visit, and so copy, every page of what was imported for it.
gc.collect()
gc.freeze()
