"""Imported by the fork server of `run_ranks`: what every rank would otherwise import or compute anew.

Only modules, and tables that a library keeps for the life of a process; no threads, no groups.
"""

import gc
from contextlib import suppress
from importlib import import_module

# Until everything is imported: the collector would visit all of it again and again.
gc.disable()

for name in (
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "torch.distributed.tensor",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization",
    "diffusers.models.autoencoders.autoencoder_kl_wan",
    "diffusers.models.transformers.transformer_wan",
    "diffusers.pipelines.wan.pipeline_wan_i2v",
    "transformers.models.umt5.modeling_umt5",
    "peft",
    "PIL.PngImagePlugin",
    "rich._emoji_codes",
    "wan_trainer.training.run",
    # A record of the scorers' runtime imports them.
    "imageio",
    "shapely",
    "skimage",
):
    # One that a library renames costs every rank its import, and nothing else.
    with suppress(ImportError):
        import_module(name)

# Loading any text encoder compiles a thousand patterns for the names of all models, for a second.
import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("umt5")
import_module("wan_trainer.training.start").own_code_digest()

# A rank's collections would visit, and so copy, every page of what was imported for it.
gc.freeze()
gc.enable()
